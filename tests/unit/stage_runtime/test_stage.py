import itertools
import json
import re
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from collapipe.errors import PeerLostError
from collapipe.models import IGNORED, Head, adapter_for
from collapipe.stage_runtime.activation_stash import ActivationStash
from collapipe.tensors import Frame, FrameKind

from .chains import (
    EACH,
    HALVES,
    THIRDS,
    TRAINING,
    WHOLE,
    Chain,
    TinyModel,
    assert_identical,
    states_of,
    train_chain,
    train_plainly,
)

# --- results equal those of a single process


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [(), (1,), range(5)], ids=["none", "one", "all"])
@pytest.mark.parametrize("cuts", [WHOLE, HALVES, THIRDS, EACH], ids=str)
def test_chain_equals_a_plain_loop_bit_for_bit(
    tiny: TinyModel, cuts: list[int], recompute: Collection[int], split: bool
) -> None:
    training = TRAINING.model_copy(update={"split_backward": split})
    chain = tiny.chain(cuts, training=training, recompute=recompute)
    tiny.assert_equals_a_plain_loop(chain, num_steps=2, size=4)


@pytest.mark.parametrize(
    ("cuts", "windows", "capacity"),
    [
        (THIRDS, [1, 1, 1], None),
        (THIRDS, [2, 1, 1], None),
        (THIRDS, [4, 4, 4], None),
        (THIRDS, [9, 2, 3], None),
        (THIRDS, [3, 3, 1], 3),  # A full mailbox of the next stage causes no deadlock.
        ([0, 0, 2, 2, 5], [4, 3, 2, 1], None),  # Stages without units pass everything on.
    ],
    ids=str,
)
def test_windows_mailboxes_and_empty_stages_change_no_bit(
    tiny: TinyModel, cuts: list[int], windows: list[int], capacity: int | None
) -> None:
    chain = tiny.chain(cuts, windows, capacity=capacity)
    tiny.assert_equals_a_plain_loop(chain, num_steps=1, size=5)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "sgd"},
        {"clip_norm": 0.0},
        {"label_smoothing": 0.1},
        {"decay": "inverse_sqrt"},
        {"split_backward": True, "optimizer": "sgd", "momentum": 0.9},
        {"split_backward": True, "clip_norm": 0.0},
    ],
    ids=str,
)
def test_every_way_of_training_equals_a_plain_loop(
    tiny: TinyModel, changes: dict[str, object]
) -> None:
    chain = tiny.chain(HALVES, training=TRAINING.model_copy(update=changes))
    tiny.assert_equals_a_plain_loop(chain, num_steps=3, size=2)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_step_without_targets_has_no_gradient_and_changes_no_other_step(
    tiny: TinyModel, clip_norm: float
) -> None:
    first, second, third = tiny.batches(3)
    ignored = second | {"labels": torch.full_like(second["labels"], IGNORED)}
    training = TRAINING.model_copy(update={"clip_norm": clip_norm, "label_smoothing": 0.1})
    steps = [[first], [ignored], [third]]
    trained = train_chain(tiny.chain(THIRDS, training=training), steps)
    assert trained.losses[1] == 0 and set(trained.norms[1]) == {0.0}
    assert_identical(trained, train_plainly(tiny.adapter, tiny.states, training, steps))


def test_recomputing_stage_keeps_only_inputs(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[bool] = []
    kept: list[tuple[Any, Any]] = []
    run_forward = ActivationStash.run_forward

    def run(stash: ActivationStash, *parts: Any) -> Any:
        outputs, entry = run_forward(stash, *parts)
        kept.append((entry.inputs, entry.outputs))  # the backward pass adds outputs
        return outputs, entry

    chain = tiny.chain(THIRDS, recompute=range(3))
    chain.units[1].module.register_forward_hook(
        lambda module, inputs, outputs: graphs.append(outputs.grad_fn is not None)
    )
    monkeypatch.setattr(ActivationStash, "run_forward", run)
    (batch,) = tiny.batches(1)
    chain.train(0, [batch])
    assert graphs == [False, True]
    embedding, (inputs, outputs), (_, outputs_of_head) = kept
    assert (embedding, outputs) == ((None, None), None)
    assert inputs is not None
    assert outputs_of_head is not None  # the head does not recompute
    assert chain.observers[1].steps[0][1] == batch["input_ids"].numel() * 16 * 4


# --- order of passes and in-flight windows


@pytest.mark.parametrize("windows", [[1, 1, 1], [2, 2, 1], [3, 2, 1], [5, 4, 1]], ids=str)
def test_window_is_never_exceeded_and_order_is_kept(tiny: TinyModel, windows: list[int]) -> None:
    chain = tiny.chain(THIRDS, windows)
    chain.train(0, tiny.batches(6))
    for index, window in enumerate(windows):
        passes = [one for one in chain.passes if one.stage == index]
        for kind in (FrameKind.FORWARD, FrameKind.BACKWARD):
            assert [one.micro_batch for one in passes if one.kind is kind] == list(range(6))
        held = itertools.accumulate(1 if one.kind is FrameKind.FORWARD else -1 for one in passes)
        assert max(held) <= window


def hold_first(count: int, put: Callable[[Frame], None]) -> Callable[[Frame], None]:
    """Returns a function that puts frames, the first ones together as soon as there are `count`."""
    frames: list[Frame] = []

    def hold(frame: Frame) -> None:
        frames.append(frame)
        if len(frames) >= count:
            for one in frames if len(frames) == count else [frame]:
                put(one)

    return hold


def test_whole_window_is_used_and_passes_alternate_where_gradients_have_arrived(
    tiny: TinyModel,
) -> None:
    chain = tiny.chain(HALVES, [3, 1])
    chain.stages[1]._send_backward = hold_first(3, chain.mailboxes[0].put)
    chain.train(0, tiny.batches(5))
    first = [str(one)[1:] for one in chain.passes if one.stage == 0]
    assert first == ["F0", "F1", "F2", "B0", "F3", "B1", "F4", "B2", "B3", "B4"]


def split_chain(
    tiny: TinyModel, windows: list[int], recompute: Collection[int] = ()
) -> tuple[Chain, list[str]]:
    """Returns a chain with a split backward pass, and what its second stage did, which grows as the stage runs.

    In this list, `F` is a forward pass, `B` is a gradient that was sent, and `W` are gradients of weights.
    """
    training = TRAINING.model_copy(update={"split_backward": True})
    chain = tiny.chain(THIRDS, windows, training, recompute=recompute)
    stage, observer, did = chain.stages[1], chain.observers[1], list[str]()
    numbers = itertools.count()

    def note(send: Callable[[Frame], None]) -> Callable[[Frame], None]:
        def noting(frame: Frame) -> None:
            did.append(f"{frame.kind.name[0]}{frame.micro_batch}")
            send(frame)

        return noting

    def computed(seconds: float, before: Any = observer.computed_weight_gradients) -> None:
        did.append(f"W{next(numbers)}")
        before(seconds)

    stage._send_forward, stage._send_backward = map(
        note, (stage._send_forward, stage._send_backward)
    )
    observer.computed_weight_gradients = computed  # type: ignore[method-assign]
    return chain, did


@pytest.mark.parametrize("recompute", [(), range(3)], ids=["keeps", "recomputes"])
def test_gradient_of_the_input_leaves_before_those_of_the_weights(
    tiny: TinyModel, recompute: Collection[int]
) -> None:
    chain, did = split_chain(tiny, [4, 3, 1], recompute=recompute)
    stage = chain.stages[1]
    grads: list[bool] = []
    send = stage._send_backward

    def check(frame: Frame) -> None:
        weights = dict(chain.units[1].module.named_parameters())
        linear = [p.grad is None for name, p in weights.items() if "query.weight" in name]
        grads.extend(linear if frame.micro_batch == 0 else [])
        send(frame)

    stage._send_backward = check
    chain.train(0, tiny.batches(4))
    assert grads == [True], "gradients of weights were there before the gradient of the input left"
    for kind in "FBW":
        assert [one for one in did if one[0] == kind] == [f"{kind}{n}" for n in range(4)]
    for number in range(4):
        assert did.index(f"B{number}") < did.index(f"W{number}")
        if recompute:
            assert did.index(f"W{number}") == did.index(f"B{number}") + 1
    embedding, _, head = (observer.seconds for observer in chain.observers)
    assert "weight gradients" not in embedding
    assert len(head["weight gradients"]) == 4


def test_gradients_of_weights_wait_while_there_are_frames(tiny: TinyModel) -> None:
    chain, did = split_chain(tiny, [4, 4, 1])
    chain.stages[2]._send_backward = hold_first(4, chain.stages[2]._send_backward)
    chain.train(0, tiny.batches(4))
    assert did == [f"{kind}{number}" for kind in "FBW" for number in range(4)]


@pytest.mark.parametrize("windows", [[1, 1, 1], [6, 1, 1], [6, 2, 1], [6, 4, 2]], ids=str)
def test_deferred_gradients_count_in_the_window(tiny: TinyModel, windows: list[int]) -> None:
    chain, did = split_chain(tiny, windows)
    chain.train(0, tiny.batches(6))
    held = list(itertools.accumulate({"F": 1, "B": 0, "W": -1}[one[0]] for one in did))
    assert max(held) <= windows[1]
    for observer, window in zip(chain.observers, windows, strict=True):
        assert observer.steps[0][0] <= window


# --- content of frames


def test_frames_have_only_the_tensors_that_later_units_need(tiny: TinyModel) -> None:
    chain = tiny.chain(HALVES)
    of_first, of_last = chain.record_sent(0), chain.record_sent(1)
    chain.train(0, tiny.batches(1))
    onward, back = of_first[0], of_last[0]
    assert onward.tensors.keys() == {"activation", "attention_mask"}
    assert onward.tensors["activation"].grad_fn is None
    assert back.kind is FrameKind.BACKWARD
    assert back.tensors.keys() == {"activation"}
    assert back.tensors["activation"].shape == onward.tensors["activation"].shape
    assert [(frame.micro_batch, frame.tensors) for frame in chain.arrived] == [(0, {})]


def test_no_gradient_goes_below_the_first_trained_unit(tiny: TinyModel) -> None:
    values = {
        **tiny.adapter.config.to_dict(),
        "lora": {"target_modules": [f"layer.{n}.attention.self.query" for n in (1, 2)]},
    }
    adapter = adapter_for("bert", "classification", json.dumps(values))
    lora = TinyModel(adapter, states_of(adapter), tiny.make_batch)
    assert adapter.first_trained_unit == 2
    chain = lora.chain(EACH)
    sent = [chain.record_sent(index) for index in range(5)]
    results = chain.train(0, lora.batches(4))
    back = [
        {name for frame in frames if frame.kind is FrameKind.BACKWARD for name in frame.tensors}
        for frames in sent
    ]
    assert back == [set(), set(), set(), {"activation"}, {"activation"}]
    assert [len(result.squared_norms) for result in results] == [0, 0, 2, 2, 4]
    kept = [observer.steps[0][1] for observer in chain.observers]
    assert kept[0] == kept[1] == 0 < min(kept[2:])
    chain.run_in_parallel(lambda stage: stage.apply_update(1.0))
    for unit, state in zip(chain.units, lora.states, strict=True):
        changed = {n for n, t in unit.module.state_dict().items() if not torch.equal(t, state[n])}
        frozen = set(adapter.frozen_names(unit.unit_index).values())
        assert changed == state.keys() - frozen
        assert unit.seal().weights


def test_predictions_equal_those_of_the_whole_model(tiny: TinyModel) -> None:
    batches = tiny.batches(5)
    units = [tiny.adapter.build_unit(index).eval() for index in range(tiny.adapter.num_units)]
    for unit, state in zip(units, tiny.states, strict=True):
        unit.load_state_dict(state)
    head = units[-1]
    assert isinstance(head, Head)
    expected = []
    with torch.no_grad():
        for batch in batches:
            activation = None
            for unit in units[:-1]:
                activation = unit(activation, batch)
            assert activation is not None
            expected.append(head.predict(activation, batch))
    for cuts in (WHOLE, THIRDS):
        chain = tiny.chain(cuts, [2] * (len(cuts) - 1))
        predictions = chain.evaluate(batches)
        assert len(predictions) == 5
        assert all(map(torch.equal, predictions, expected))
        # An evaluation changes no bit of the training after it.
        tiny.assert_equals_a_plain_loop(chain, num_steps=2, size=4)


# --- failures


@pytest.mark.parametrize(
    ("kind", "step", "micro_batch"),
    [(FrameKind.FORWARD, 1, 0), (FrameKind.FORWARD, 0, 1), (FrameKind.EVALUATE, 0, 0)],
)
def test_frame_of_another_step_kind_or_micro_batch_is_refused(
    tiny: TinyModel, kind: FrameKind, step: int, micro_batch: int
) -> None:
    chain = tiny.chain(WHOLE)
    chain.mailboxes[0].put(Frame(kind, step, micro_batch, tiny.make_batch(0)))
    expected = f"{kind.name}.* {step}.* {micro_batch}"
    with pytest.raises(PeerLostError, match=expected):
        chain.stages[0].run_step(0, 2, 3, 0.0)


@pytest.mark.parametrize("shape", [(), (2, 3, 4), None], ids=str)
def test_gradient_of_another_shape_than_the_activation_is_refused(
    tiny: TinyModel, shape: tuple[int, ...] | None
) -> None:
    chain = tiny.chain(HALVES)
    tensors = {} if shape is None else {"activation": torch.ones(shape)}
    send = chain.stages[1]._send_backward
    chain.stages[1]._send_backward = lambda frame: send(frame.with_tensors(tensors))
    found = None if shape is None else list(shape)
    with pytest.raises(PeerLostError, match=re.escape(f"gradient of shape {found} for")) as raised:
        chain.train(0, tiny.batches(1))
    assert raised.value.host_id == "host-1"


@pytest.mark.parametrize("found", [torch.tensor([0, 1]), torch.tensor([[0], [1], [2]])], ids=str)
def test_predictions_of_other_rows_blame_the_stage_that_sent_them(
    tiny: TinyModel, found: torch.Tensor
) -> None:
    chain = tiny.chain(THIRDS)
    send = chain.stages[1]._send_backward
    chain.stages[1]._send_backward = lambda frame: send(frame.with_tensors({"predictions": found}))
    with pytest.raises(
        PeerLostError, match=re.escape(f"predictions of shape {list(found.shape)}")
    ) as raised:
        chain.evaluate(tiny.batches(1))
    assert raised.value.host_id == "host-1"


def test_failure_ends_every_stage_without_an_update(tiny: TinyModel) -> None:
    chain = tiny.chain(THIRDS)
    loss = PeerLostError("device-1", "device-1 was lost")
    chain.stages[1]._send_forward = lambda frame: chain.mailboxes[2].fail(loss)
    with pytest.raises(PeerLostError) as raised:
        chain.train(0, tiny.batches(2))
    assert raised.value is loss
    for unit, state in zip(chain.units, tiny.states, strict=True):
        for name, tensor in unit.module.state_dict().items():
            assert torch.equal(tensor, state[name])


def test_pending_update_is_applied_once(tiny: TinyModel) -> None:
    chain = tiny.chain(WHOLE)
    stage, unit = chain.stages[0], chain.units[0]
    before = unit.seal()
    stage.apply_update(1.0)
    assert unit.digests == before, "an update without a step changed the unit"
    chain.train(0, tiny.batches(1))
    stage.apply_update(1.0)
    after = unit.seal()
    assert after != before
    stage.apply_update(1.0)
    assert unit.digests == after


def test_stage_says_what_it_waits_for(tiny: TinyModel) -> None:
    chain = tiny.chain(HALVES)
    chain.mailboxes[0].fail(PeerLostError("", "over"))
    assert chain.stages[0].is_idle
    with pytest.raises(PeerLostError):
        chain.stages[0].run_step(3, 2, 3, 0.0)
    assert not chain.stages[0].is_idle
    assert "forward frame of micro-batch 0 in step 3" in chain.stages[0].waiting_for
