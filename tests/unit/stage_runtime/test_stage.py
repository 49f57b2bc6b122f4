import itertools
import json
from collections.abc import Collection
from typing import Any

import pytest
import torch

from collapipe.errors import PeerLostError, WrongStateError
from collapipe.models import Head, ModelAdapter, adapter_for, initial_model, split_state
from collapipe.stage_runtime.activation_stash import ActivationStash
from collapipe.tensors import Frame, FrameKind

from .chains import (
    EACH,
    HALVES,
    THIRDS,
    TRAINING,
    WHOLE,
    Chain,
    MakeBatch,
    States,
    assert_identical,
    make_chain,
    steps_of,
    train_chain,
    train_plainly,
)

# --- results equal those of a single process


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [(), (1,), range(5)], ids=["none", "one", "all"])
@pytest.mark.parametrize("cuts", [WHOLE, HALVES, THIRDS, EACH], ids=str)
def test_chain_equals_a_plain_loop_bit_for_bit(
    bert: ModelAdapter,
    bert_states: States,
    make_batch: MakeBatch,
    cuts: list[int],
    recompute: Collection[int],
    split: bool,
) -> None:
    training = TRAINING.model_copy(update={"split_backward": split})
    steps = steps_of(make_batch, num_steps=3, size=4)
    num_stages = len(cuts) - 1
    windows = list(range(num_stages, 0, -1))
    chain = make_chain(bert, bert_states, training, cuts, windows, recompute=recompute)
    assert_identical(
        train_chain(chain, training, steps), train_plainly(bert, bert_states, training, steps)
    )


@pytest.mark.parametrize("windows", [[1, 1, 1], [2, 1, 1], [4, 4, 4], [9, 2, 3]], ids=str)
def test_window_changes_no_bit(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch, windows: list[int]
) -> None:
    steps = steps_of(make_batch, num_steps=2, size=4)
    chain = make_chain(bert, bert_states, TRAINING, THIRDS, windows)
    assert_identical(
        train_chain(chain, TRAINING, steps), train_plainly(bert, bert_states, TRAINING, steps)
    )


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
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch, changes: dict[str, object]
) -> None:
    training = TRAINING.model_copy(update=changes)
    steps = steps_of(make_batch, num_steps=3, size=2)
    chain = make_chain(bert, bert_states, training, HALVES, [2, 1])
    assert_identical(
        train_chain(chain, training, steps), train_plainly(bert, bert_states, training, steps)
    )


def test_training_reduces_the_loss(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    training = TRAINING.model_copy(update={"decay": "constant", "warm_up_steps": 0})
    steps = [[make_batch(1), make_batch(2)]] * 15
    losses = train_chain(
        make_chain(bert, bert_states, training, THIRDS, [3, 2, 1]), training, steps
    ).losses
    assert losses[-1] < losses[0] / 2


def test_stage_without_units_passes_everything_on(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    steps = steps_of(make_batch, num_steps=2, size=3)
    chain = make_chain(bert, bert_states, TRAINING, [0, 0, 2, 2, 5], [4, 3, 2, 1])
    assert_identical(
        train_chain(chain, TRAINING, steps), train_plainly(bert, bert_states, TRAINING, steps)
    )


def test_recomputing_stage_keeps_only_inputs(
    bert: ModelAdapter,
    bert_states: States,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs: list[bool] = []
    kept: list[tuple[Any, Any]] = []
    run_forward = ActivationStash.run_forward

    def run(stash: ActivationStash, *parts: Any) -> Any:
        outputs, entry = run_forward(stash, *parts)
        kept.append((entry.inputs, entry.outputs))  # the backward pass adds outputs
        return outputs, entry

    chain = make_chain(bert, bert_states, TRAINING, THIRDS, [3, 2, 1], recompute=range(3))
    chain.units[1].module.register_forward_hook(
        lambda module, inputs, outputs: graphs.append(outputs.grad_fn is not None)
    )
    monkeypatch.setattr(ActivationStash, "run_forward", run)
    chain.train(0, [make_batch(0)], 0.0)
    assert graphs == [False, True]
    embedding, (inputs, outputs), (_, outputs_of_head) = kept
    assert (embedding, outputs) == ((None, None), None)
    assert inputs is not None
    assert outputs_of_head is not None  # the head does not recompute


# --- order of passes and in-flight windows


def check_passes(chain: Chain, windows: list[int], size: int) -> None:
    """Checks that passes run once, in order, and that no stage holds more micro-batches than its window."""
    for index, window in enumerate(windows):
        passes = [one for one in chain.passes if one.stage == index]
        for kind in (FrameKind.FORWARD, FrameKind.BACKWARD):
            order = [one.micro_batch for one in passes if one.kind is kind]
            assert order == list(range(size))
        held = itertools.accumulate(1 if one.kind is FrameKind.FORWARD else -1 for one in passes)
        assert max(held) <= window
    assert len({(one.stage, one.kind) for one in chain.passes}) == 2 * len(windows)


@pytest.mark.parametrize("windows", [[1, 1, 1], [2, 2, 1], [3, 2, 1], [5, 4, 1]], ids=str)
def test_window_is_never_exceeded_and_order_is_kept(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch, windows: list[int]
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, THIRDS, windows)
    chain.train(0, [make_batch(number) for number in range(6)], 0.0)
    check_passes(chain, windows, 6)


def test_whole_window_is_used_before_the_first_gradient(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, HALVES, [3, 1])
    sent: list[Frame] = []

    def keep_until_three(frame: Frame) -> None:
        sent.append(frame)
        if len(sent) == 3:
            for held in sent:
                chain.mailboxes[1].put(held)
        elif len(sent) > 3:
            chain.mailboxes[1].put(frame)

    chain.stages[0]._send_forward = keep_until_three
    chain.train(0, [make_batch(number) for number in range(5)], 0.0)
    first = [str(one) for one in chain.passes if one.stage == 0]
    assert first[:4] == ["0F0", "0F1", "0F2", "0B0"]


def test_passes_alternate_where_several_gradients_have_arrived(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, HALVES, [3, 1])
    gradients: list[Frame] = []

    def deliver_three_at_once(frame: Frame) -> None:
        gradients.append(frame)
        if len(gradients) == 3 or frame.micro_batch == 4:
            for held in gradients:
                chain.mailboxes[0].put(held)
            gradients.clear()

    chain.stages[1]._send_backward = deliver_three_at_once
    chain.train(0, [make_batch(number) for number in range(5)], 0.0)
    first = "".join(f"{one.kind.name[0]}{one.micro_batch}" for one in chain.passes if not one.stage)
    assert first == "F0F1F2B0F3B1F4B2B3B4"


def split_chain(
    adapter: ModelAdapter, states: States, windows: list[int], recompute: Collection[int] = ()
) -> tuple[Chain, list[str]]:
    """Returns a chain with a split backward pass, and what its second stage did, which grows as the stage runs.

    In this list, `F` is a forward pass, `B` is a gradient that was sent, and `W` are gradients of weights.
    """
    changed = TRAINING.model_copy(update={"split_backward": True})
    chain = make_chain(adapter, states, changed, THIRDS, windows, recompute=recompute)
    stage, observer, did = chain.stages[1], chain.observers[1], []
    forward, backward = stage._send_forward, stage._send_backward
    computed = observer.computed_weight_gradients
    stage._send_forward = lambda frame: (did.append(f"F{frame.micro_batch}"), forward(frame))[1]
    stage._send_backward = lambda frame: (did.append(f"B{frame.micro_batch}"), backward(frame))[1]
    numbers = itertools.count()
    observer.computed_weight_gradients = lambda seconds: (  # type: ignore[method-assign]
        did.append(f"W{next(numbers)}"),
        computed(seconds),
    )[1]
    return chain, did


@pytest.mark.parametrize("recompute", [(), range(3)], ids=["keeps", "recomputes"])
def test_gradient_of_the_input_leaves_before_those_of_the_weights(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch, recompute: Collection[int]
) -> None:
    chain, did = split_chain(bert, bert_states, [4, 3, 1], recompute=recompute)
    stage = chain.stages[1]
    grads: list[bool] = []
    send = stage._send_backward

    def check(frame: Frame) -> None:
        weights = dict(chain.units[1].module.named_parameters())
        linear = [p.grad is None for name, p in weights.items() if "query.weight" in name]
        grads.extend(linear if frame.micro_batch == 0 else [])
        send(frame)

    stage._send_backward = check
    chain.train(0, [make_batch(number) for number in range(4)], 0.0)
    assert grads == [True], "gradients of weights were there before the gradient of the input left"
    for kind in "FBW":
        assert [one for one in did if one[0] == kind] == [f"{kind}{n}" for n in range(4)]
    for number in range(4):
        assert did.index(f"B{number}") < did.index(f"W{number}")
        if recompute:
            assert did.index(f"W{number}") == did.index(f"B{number}") + 1


def test_gradients_of_weights_wait_while_there_are_frames(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain, did = split_chain(bert, bert_states, [4, 4, 1])
    stage, deliver, held = chain.stages[2], chain.stages[2]._send_backward, []

    def deliver_all_at_once(frame: Frame) -> None:
        held.append(frame)
        if len(held) == 4:
            for one in held:
                deliver(one)

    stage._send_backward = deliver_all_at_once
    chain.train(0, [make_batch(number) for number in range(4)], 0.0)
    assert did == [f"{kind}{number}" for kind in "FBW" for number in range(4)]


@pytest.mark.parametrize("windows", [[1, 1, 1], [6, 1, 1], [6, 2, 1], [6, 4, 2]], ids=str)
def test_deferred_gradients_count_in_the_window(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch, windows: list[int]
) -> None:
    chain, did = split_chain(bert, bert_states, windows)
    chain.train(0, [make_batch(number) for number in range(6)], 0.0)
    held = list(itertools.accumulate({"F": 1, "B": 0, "W": -1}[one[0]] for one in did))
    assert max(held) <= windows[1]
    for observer, window in zip(chain.observers, windows, strict=True):
        assert observer.steps[0][0] <= window


def test_stage_with_the_embedding_defers_nothing(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain, _ = split_chain(bert, bert_states, [3, 2, 1])
    chain.train(0, [make_batch(0)], 0.0)
    embedding, blocks, head = (observer.seconds for observer in chain.observers)
    assert "weight gradients" not in embedding
    assert len(blocks["weight gradients"]) == len(head["weight gradients"]) == 1


def test_full_mailbox_of_the_next_stage_causes_no_deadlock(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    steps = steps_of(make_batch, num_steps=1, size=5)
    chain = make_chain(bert, bert_states, TRAINING, THIRDS, [3, 3, 1], capacity=3)
    assert_identical(
        train_chain(chain, TRAINING, steps), train_plainly(bert, bert_states, TRAINING, steps)
    )


# --- content of frames


def test_frames_after_the_embedding_have_only_the_tensors_that_later_units_need(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, HALVES, [2, 1])
    forward, backward = chain.mailboxes[1].put, chain.mailboxes[0].put
    seen: list[Frame] = []
    chain.stages[0]._send_forward = lambda frame: (seen.append(frame), forward(frame))[1]
    chain.stages[1]._send_backward = lambda frame: (seen.append(frame), backward(frame))[1]
    chain.train(0, [make_batch(0)], 0.0)
    onward, back = seen
    assert onward.tensors.keys() == {"activation", "attention_mask"}
    assert onward.tensors["activation"].grad_fn is None
    assert back.kind is FrameKind.BACKWARD
    assert back.tensors.keys() == {"activation"}
    assert back.tensors["activation"].shape == onward.tensors["activation"].shape


def test_frames_from_the_first_stage_backward_have_no_tensor(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, HALVES, [2, 1])
    chain.train(0, [make_batch(0), make_batch(1)], 0.0)
    assert [(frame.micro_batch, frame.tensors) for frame in chain.arrived] == [(0, {}), (1, {})]


def test_no_gradient_goes_below_the_first_trained_unit(
    bert: ModelAdapter, make_batch: MakeBatch
) -> None:
    values = {
        **bert.config.to_dict(),
        "lora": {"target_modules": r".*layer\.[12]\.attention\.self\.query"},
    }
    adapter = adapter_for("bert", "classification", json.dumps(values))
    states = split_state(adapter, initial_model(adapter, None, seed=3))
    assert adapter.first_trained_unit == 2
    chain = make_chain(adapter, states, TRAINING, EACH, [5, 4, 3, 2, 1])
    sent: dict[int, set[str]] = {}
    for index in range(1, 5):
        onward = chain.stages[index]._send_backward

        def send(frame: Frame, index: int = index, onward: Any = onward) -> None:
            sent.setdefault(index, set()).update(frame.tensors)
            onward(frame)

        chain.stages[index]._send_backward = send
    results = chain.train(0, [make_batch(number) for number in range(4)], 0.0)
    assert sent == {1: set(), 2: set(), 3: {"activation"}, 4: {"activation"}}
    assert [len(result.squared_norms) for result in results] == [0, 0, 2, 2, 4]
    kept = [steps[0][1] for steps in (observer.steps for observer in chain.observers)]
    assert kept[0] == kept[1] == 0 < min(kept[2:])
    before = [{n: t.clone() for n, t in s.items()} for s in states]
    chain.run_in_parallel(lambda stage: stage.apply_update(1.0))
    for unit, state in zip(chain.units, before, strict=True):
        changed = {n for n, t in unit.module.state_dict().items() if not torch.equal(t, state[n])}
        frozen = set(adapter.frozen_names(unit.unit_index).values())
        assert changed == state.keys() - frozen
        assert unit.seal().weights


def test_predictions_equal_those_of_the_whole_model(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    batches = [make_batch(number) for number in range(5)]
    units = [bert.build_unit(index) for index in range(bert.num_units)]
    for unit, state in zip(units, bert_states, strict=True):
        unit.load_state_dict(state)
        unit.eval()
    expected = []
    with torch.no_grad():
        for batch in batches:
            activation = None
            for unit in units[:-1]:
                activation = unit(activation, batch)
            head = units[-1]
            assert isinstance(head, Head)
            assert activation is not None
            expected.append(head.predict(activation, batch))
    for cuts in (WHOLE, THIRDS):
        windows = [2] * (len(cuts) - 1)
        predictions = make_chain(bert, bert_states, TRAINING, cuts, windows).evaluate(batches)
        assert len(predictions) == 5
        assert all(map(torch.equal, predictions, expected))


def test_evaluation_between_steps_changes_no_bit(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    steps = steps_of(make_batch, num_steps=1, size=2)
    chain = make_chain(bert, bert_states, TRAINING, HALVES, [2, 1])
    chain.evaluate([make_batch(9), make_batch(8)])
    assert_identical(
        train_chain(chain, TRAINING, steps), train_plainly(bert, bert_states, TRAINING, steps)
    )


# --- failures


@pytest.mark.parametrize(
    ("kind", "step", "micro_batch"),
    [
        (FrameKind.FORWARD, 1, 0),
        (FrameKind.FORWARD, 0, 1),
        (FrameKind.EVALUATE, 0, 0),
    ],
)
def test_frame_of_another_step_kind_or_micro_batch_is_refused(
    bert: ModelAdapter,
    bert_states: States,
    make_batch: MakeBatch,
    kind: FrameKind,
    step: int,
    micro_batch: int,
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, WHOLE, [1])
    chain.mailboxes[0].put(Frame(kind, step, micro_batch, make_batch(0)))
    with pytest.raises(
        WrongStateError, match=f"got {kind.name} of step {step}, micro-batch {micro_batch}, while"
    ):
        chain.stages[0].run_step(0, 2, 3, 0.0)


def test_failure_ends_every_stage_without_an_update(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, THIRDS, [3, 2, 1])
    loss = PeerLostError("device-1", "device-1 was lost")
    chain.stages[1]._send_forward = lambda frame: chain.mailboxes[2].fail(loss)
    with pytest.raises(PeerLostError) as raised:
        chain.train(0, [make_batch(0), make_batch(1)], 0.0)
    assert raised.value is loss
    for unit, state in zip(chain.units, bert_states, strict=True):
        for name, tensor in unit.module.state_dict().items():
            assert torch.equal(tensor, state[name])


def test_pending_update_is_applied_once(
    bert: ModelAdapter, bert_states: States, make_batch: MakeBatch
) -> None:
    chain = make_chain(bert, bert_states, TRAINING, WHOLE, [1])
    stage, unit = chain.stages[0], chain.units[0]
    before = unit.seal()
    stage.apply_update(1.0)
    assert unit.digests == before, "an update without a step changed the unit"
    chain.train(0, [make_batch(0)], 0.0)
    stage.apply_update(1.0)
    after = unit.seal()
    assert after != before
    stage.apply_update(1.0)
    assert unit.digests == after


def test_stage_says_what_it_waits_for(bert: ModelAdapter, bert_states: States) -> None:
    chain = make_chain(bert, bert_states, TRAINING, HALVES, [2, 1])
    chain.mailboxes[0].fail(PeerLostError("", "over"))
    with pytest.raises(PeerLostError):
        chain.stages[0].run_step(3, 2, 3, 0.0)
    assert chain.stages[0].waiting_for == "get the forward frame of micro-batch 0 in step 3"
