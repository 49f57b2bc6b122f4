"""Tests of the events that a stage reports, also on an emulated processor, and of their metrics."""

from collections import Counter

import pytest
from prometheus_client import REGISTRY

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.stage_runtime import EmulatedProcessor
from collapipe.stage_runtime.operation_counts import StageWork, Work
from collapipe.stage_runtime.stage_metrics import StageMetrics
from collapipe.tensors import FrameKind
from collapipe.work_shares import FORWARD_SHARE

from .chains import HALVES, THIRDS, WHOLE, TinyModel

# --- events


def test_each_micro_batch_is_reported_with_its_samples_and_sent_bytes(tiny: TinyModel) -> None:
    chain = tiny.chain(THIRDS)
    batches = tiny.batches(3)
    sent = chain.record_sent(0)
    chain.train(0, batches)
    passed = [frame for frame in sent if frame.kind is FrameKind.FORWARD]
    embedding, blocks, head = (observer.work for observer in chain.observers)
    assert embedding == [(0, 3, frame.byte_length) for frame in passed]
    assert blocks == [(3, 3, frame.byte_length) for frame in passed]
    assert head == [(0, 3, 0)] * 3
    activations = [3 * batch["input_ids"].shape[1] * 16 * 4 for batch in batches]
    assert all(frame.byte_length > size for frame, size in zip(passed, activations, strict=True))


def test_times_of_actions_and_waits_fit_into_the_step(tiny: TinyModel) -> None:
    for cuts, has_end_unit in ((THIRDS, [True, False, True]), (HALVES, [True, True])):
        chain = tiny.chain(cuts)
        results = chain.train(0, tiny.batches(2))
        for expected, observer, result in zip(has_end_unit, chain.observers, results, strict=True):
            seconds = sum(observer.seconds["FORWARD"] + observer.seconds["BACKWARD"])
            apart = sum(observer.end_unit_seconds)
            assert 0 < apart <= seconds if expected else apart == 0
            times = result.times
            assert sum(observer.waits) == pytest.approx(times.waiting_seconds)
            parts = times.forward_seconds + times.backward_seconds + times.waiting_seconds
            assert 0 < times.forward_seconds < times.total_seconds
            assert 0 < times.backward_seconds < times.total_seconds
            assert parts <= times.total_seconds
        kinds = Counter((one.stage, one.kind) for one in chain.passes)
        assert set(kinds.values()) == {2}


def test_most_micro_batches_and_bytes_are_reported_after_each_mini_batch(tiny: TinyModel) -> None:
    stash = {}
    for recompute in (False, True):
        for window in (1, 3):
            stages = range(2) if recompute else ()
            chain = tiny.chain(HALVES, [window, 1], recompute=stages)
            chain.train(0, [tiny.make_batch(0)] * 4)
            (in_flight, stash[recompute, window]), (of_head, _) = (
                observer.steps[0] for observer in chain.observers
            )
            assert 1 <= in_flight <= window
            assert of_head == 1
            assert stash[recompute, window] % in_flight == 0
            stash[recompute, window] //= in_flight
    assert stash[False, 1] == stash[False, 3] > 3 * 4 * 16 * 4
    assert stash[True, 1] == stash[True, 3] == 0  # the inputs of an embedding are side tensors


def test_updates_and_evaluations_are_reported(tiny: TinyModel) -> None:
    chain = tiny.chain(HALVES)
    chain.evaluate(tiny.batches(2))
    chain.train(0, tiny.batches(1))
    chain.run_in_parallel(lambda stage: stage.apply_update(1.0))
    chain.run_in_parallel(lambda stage: stage.apply_update(1.0))  # no update is pending
    for observer in chain.observers:
        assert len(observer.seconds["evaluation"]) == 2
        assert len(observer.seconds["update"]) == 1
        assert min(observer.seconds["evaluation"] + observer.seconds["update"]) > 0


# --- an emulated processor


class Device(EmulatedProcessor):
    """Needs 5 ms for every action, and records the actions."""

    def __init__(self) -> None:
        super().__init__(EmulationFile(None), "device-0-0")
        self.asked: list[tuple[Work, float]] = []

    def seconds(self, work: Work, overhead_share: float) -> float:
        self.asked.append((work, overhead_share))
        return 0.005


def test_emulation_changes_no_bit_and_its_seconds_are_reported(tiny: TinyModel) -> None:
    chain = tiny.chain(HALVES, processor=Device())
    tiny.assert_equals_a_plain_loop(chain, num_steps=1, size=2)
    for observer in chain.observers:
        assert {name: len(seconds) for name, seconds in observer.seconds.items()} == {
            "FORWARD": 2,
            "BACKWARD": 2,
            "update": 1,
        }
        assert all(min(seconds) >= 0.005 for seconds in observer.seconds.values())


def test_emulated_processor_gets_the_work_of_the_units(tiny: TinyModel) -> None:
    device = Device()
    chain = tiny.chain(WHOLE, processor=device)
    (batch,) = tiny.batches(1)
    chain.evaluate([batch])
    results = chain.train(0, [batch])
    work = StageWork([unit.module for unit in chain.units], 16)
    assert device.asked == [
        (work.forward(batch), FORWARD_SHARE),
        (work.forward(batch), FORWARD_SHARE),
        (work.backward(batch), 1 - FORWARD_SHARE),
    ]
    assert results[0].times.forward_seconds >= 0.005
    assert results[0].times.backward_seconds >= 0.005


def test_stage_without_units_is_not_slowed(tiny: TinyModel) -> None:
    device = Device()
    tiny.chain([0, 0, 5], [1, 1], processor=device).train(0, tiny.batches(1))
    assert len(device.asked) == 2


# --- metrics


def value(name: str, stage: int) -> float:
    labels = {"cluster": "90", "stage": str(stage)}
    return REGISTRY.get_sample_value(f"collapipe_stage_{name}", labels) or 0.0


def energy() -> float:
    return REGISTRY.get_sample_value("collapipe_energy_joules_total", {"sensor": "model"}) or 0.0


def test_metrics_count_the_actions_of_the_stage() -> None:
    before = energy()
    stage = StageMetrics(90, 3, 0.0)
    stage.acted(FrameKind.BACKWARD, 0, 0.25, 0.125)
    stage.worked(num_blocks=4, num_samples=6, activation_bytes=700)
    stage.worked(num_blocks=4, num_samples=6, activation_bytes=700)
    stage.updated(0.125)
    stage.waited(1.0)
    stage.waited(0.5)
    stage.stepped(in_flight=2, stash_bytes=900)
    expected = {
        "backward_seconds_sum": 0.25,
        "block_samples_total": 48,
        "end_unit_seconds_total": 0.125,
        "samples_total": 12,
        "activation_bytes_total": 1400,
        "update_seconds_total": 0.125,
        "steps_total": 1,
        "waiting_seconds_total": 1.5,
        "in_flight": 2,
        "stash_bytes": 900,
    }
    assert {name: value(name, 3) for name in expected} == expected
    assert energy() == before, "a device of unknown power counts no energy"


def test_energy_is_watts_times_busy_seconds() -> None:
    before = energy()
    stage = StageMetrics(90, 4, 8.0)
    stage.acted(FrameKind.FORWARD, 0, 0.25, 0.0)
    stage.acted(FrameKind.BACKWARD, 0, 0.5, 0.0)
    stage.updated(0.125)
    stage.evaluated(0.125)
    stage.waited(100.0)
    stage.stepped(in_flight=1, stash_bytes=0)
    assert energy() - before == pytest.approx(8.0)
