"""Tests of the events that a stage reports, also on an emulated processor."""

from collections import Counter

import pytest

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.models import ModelAdapter
from collapipe.stage_runtime import EmulatedProcessor
from collapipe.stage_runtime.operation_counts import StageWork, Work
from collapipe.tensors import Frame
from collapipe.work_shares import FORWARD_SHARE

from .chains import (
    HALVES,
    THIRDS,
    TRAINING,
    WHOLE,
    MakeBatch,
    States,
    assert_identical,
    make_chain,
    steps_of,
    train_chain,
    train_plainly,
)

# --- events


def test_each_micro_batch_is_reported_with_its_samples_and_sent_bytes(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, THIRDS, [3, 2, 1])
    batches = [make_batch(number) for number in range(3)]
    passed: list[Frame] = []
    forward = chain.mailboxes[1].put
    chain.stages[0]._send_forward = lambda frame: (passed.append(frame), forward(frame))[1]
    chain.train(0, batches, 0.0)
    embedding, blocks, head = (observer.work for observer in chain.observers)
    assert embedding == [(0, 3, frame.byte_length) for frame in passed]
    assert blocks == [(3, 3, frame.byte_length) for frame in passed]
    assert head == [(0, 3, 0)] * 3
    activations = [3 * batch["input_ids"].shape[1] * 16 * 4 for batch in batches]
    assert all(frame.byte_length > size for frame, size in zip(passed, activations, strict=True))


def test_time_of_embedding_and_head_is_reported_apart_from_that_of_blocks(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    for cuts, has_end_unit in ((THIRDS, [True, False, True]), (HALVES, [True, True])):
        chain = make_chain(bert, bert_states, TRAINING, cuts, [2] * len(has_end_unit))
        chain.train(0, [make_batch(0), make_batch(1)], 0.0)
        for expected, observer in zip(has_end_unit, chain.observers, strict=True):
            seconds = sum(observer.seconds["FORWARD"] + observer.seconds["BACKWARD"])
            apart = sum(observer.end_unit_seconds)
            assert 0 < apart <= seconds if expected else apart == 0


def test_most_micro_batches_and_bytes_are_reported_after_each_mini_batch(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    stash = {}
    for recompute in (False, True):
        for window in (1, 3):
            stages = range(2) if recompute else ()
            chain = make_chain(bert, bert_states, TRAINING, HALVES, [window, 1], recompute=stages)
            chain.train(0, [make_batch(0)] * 4, 0.0)
            (in_flight, stash[recompute, window]), (of_head, _) = (
                observer.steps[0] for observer in chain.observers
            )
            assert 1 <= in_flight <= window
            assert of_head == 1
            assert stash[recompute, window] % in_flight == 0
            stash[recompute, window] //= in_flight
    assert stash[False, 1] == stash[False, 3] > 3 * 4 * 16 * 4
    assert stash[True, 1] == stash[True, 3] == 0  # the inputs of an embedding are side tensors


def test_recomputing_stage_holds_the_bytes_of_its_inputs_only(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, THIRDS, [1, 1, 1], recompute=range(3))
    batch = make_batch(0)
    chain.train(0, [batch], 0.0)
    assert chain.observers[1].steps[0][1] == batch["input_ids"].numel() * 16 * 4


def test_updates_and_evaluations_are_reported(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, HALVES, [2, 1])
    chain.evaluate([make_batch(0), make_batch(1)])
    chain.train(0, [make_batch(0)], 0.0)
    chain.run_in_parallel(lambda stage: stage.apply_update(1.0))
    chain.run_in_parallel(lambda stage: stage.apply_update(1.0))  # no update is pending
    for observer in chain.observers:
        assert len(observer.seconds["evaluation"]) == 2
        assert len(observer.seconds["update"]) == 1
        assert min(observer.seconds["evaluation"] + observer.seconds["update"]) > 0


# --- an emulated processor


class Device(EmulatedProcessor):
    """Needs 50 ms for every action, and records the actions."""

    def __init__(self) -> None:
        super().__init__(EmulationFile(None), "device-0-0")
        self.asked: list[tuple[Work, float]] = []

    def seconds(self, work: Work, overhead_share: float) -> float:
        self.asked.append((work, overhead_share))
        return 0.05


def test_emulation_changes_no_bit_and_its_seconds_are_reported(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    steps = steps_of(make_batch, num_steps=1, size=2)
    device = Device()
    chain = make_chain(bert, bert_states, TRAINING, HALVES, [2, 1], processor=device)
    assert_identical(
        train_chain(chain, TRAINING, steps), train_plainly(bert, bert_states, TRAINING, steps)
    )
    for observer in chain.observers:
        assert {name: len(seconds) for name, seconds in observer.seconds.items()} == {
            "FORWARD": 2,
            "BACKWARD": 2,
            "update": 1,
        }
        assert all(min(seconds) >= 0.05 for seconds in observer.seconds.values())


def test_emulated_processor_gets_the_work_of_the_units(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    device = Device()
    chain = make_chain(bert, bert_states, TRAINING, WHOLE, [1], processor=device)
    batch = make_batch(0)
    chain.evaluate([batch])
    results = chain.train(0, [batch], 0.0)
    work = StageWork([unit.module for unit in chain.units], 16)
    assert device.asked == [
        (work.forward(batch), FORWARD_SHARE),
        (work.forward(batch), FORWARD_SHARE),
        (work.backward(batch), 1 - FORWARD_SHARE),
    ]
    assert results[0].times.forward_seconds >= 0.05
    assert results[0].times.backward_seconds >= 0.05


def test_stage_without_units_is_not_slowed(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    device = Device()
    chain = make_chain(bert, bert_states, TRAINING, [0, 0, 5], [1, 1], processor=device)
    chain.train(0, [make_batch(0)], 0.0)
    assert len(device.asked) == 2


def test_times_of_actions_and_waits_fit_into_the_step(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, HALVES, [2, 1])
    results = chain.train(0, [make_batch(0), make_batch(1)], 0.0)
    reported = sum(sum(observer.waits) for observer in chain.observers)
    assert reported == pytest.approx(sum(result.times.waiting_seconds for result in results))
    for result in results:
        times = result.times
        parts = times.forward_seconds + times.backward_seconds + times.waiting_seconds
        assert 0 < times.forward_seconds < times.total_seconds
        assert 0 < times.backward_seconds < times.total_seconds
        assert parts <= times.total_seconds
    kinds = Counter(str(one)[:2] for one in chain.passes)
    assert kinds == {"0F": 2, "0B": 2, "1F": 2, "1B": 2}
