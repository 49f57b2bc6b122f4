"""Tests that the units compute the same as the whole model of `transformers`, bit for bit."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collapipe.models import (
    Head,
    KeyValues,
    ModelAdapter,
    Unit,
    initial_model,
    split_state,
)
from collapipe.stage_runtime.activation_stash import count_kept_bytes
from collapipe.stage_runtime.weight_gradients import deferred_gradients, use_split_backward

MakeAdapter = Callable[..., ModelAdapter]
MakeBatch = Callable[..., dict[str, Tensor]]

FIRST_OF_HEAD = {
    ("bert", "classification"): "bert.pooler",
    ("distilbert", "classification"): "pre_classifier",
    ("roberta", "classification"): "classifier",
    **{(family, "ner"): "dropout" for family in ("bert", "distilbert", "roberta")},
    **{(family, "translation"): "model.decoder" for family in ("marian", "bart")},
    ("gpt2", "causal_lm"): "transformer.ln_f",
    **{(family, "causal_lm"): "model.norm" for family in ("llama", "mistral", "qwen2", "qwen3")},
}
"""The first module of each head."""

FIRST_OF_FEED_FORWARD = {
    "bert": "intermediate",
    "distilbert": "ffn",
    "roberta": "intermediate",
    "marian": "fc1",
    "bart": "fc1",
    "gpt2": "ln_2",
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "post_attention_layernorm"),
}
"""The first module of a layer's feed-forward half."""


def seed_unit(unit_index: int) -> None:
    torch.manual_seed(1000 + 7 * unit_index)


def build_units(adapter: ModelAdapter, model: Any) -> tuple[list[Unit], Head]:
    units: list[Any] = []
    for index, state in enumerate(split_state(adapter, model)):
        unit = adapter.build_unit(index)
        unit.load_state_dict(state)
        units.append(unit.train(model.training))
    *body, head = units
    return body, head


def run_whole(
    adapter: ModelAdapter, model: Any, batch: dict[str, Tensor], smoothing: float
) -> Tensor:
    """Runs the whole model forward and backward, and seeds torch where each unit begins."""
    starts = [adapter.embedding_path]
    for index in range(adapter.num_blocks // adapter.period):
        starts.append(f"{adapter.blocks_path}.{index}")
        if adapter.period == 2:
            starts.append(f"{starts[-1]}.{FIRST_OF_FEED_FORWARD[adapter.family]}")
    starts.append(FIRST_OF_HEAD[adapter.family, adapter.task])

    def seed_before(index: int) -> Callable[[nn.Module, object], None]:
        return lambda module, inputs: seed_unit(index)

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(seed_before(index))
        for index, path in enumerate(starts)
    ]
    # A translator needs labels, because it makes the decoder's inputs from them.
    given: dict[str, Any] = batch if adapter.task == "translation" else without_labels(batch)
    if adapter.task == "causal_lm":
        # A cache copies keys and values, and other strides may round otherwise.
        given["use_cache"] = False
    logits = model(**given).logits
    loss: Any = nn.functional.cross_entropy(
        logits.view(-1, logits.shape[-1]),
        batch["labels"].view(-1),
        reduction="sum",
        label_smoothing=smoothing,
    )
    (loss / 11).backward()
    for hook in hooks:
        hook.remove()
    return torch.as_tensor(loss.detach())


def run_units(body: list[Unit], head: Head, batch: dict[str, Tensor], smoothing: float) -> Tensor:
    """Runs the units forward and backward, with a separate graph for each unit, as on different hosts."""
    outputs: list[Any] = []
    inputs: list[Tensor] = []
    activation = None
    for index, unit in enumerate(body):
        seed_unit(index)
        outputs.append(unit(activation, batch))
        activation = outputs[-1].detach().requires_grad_()
        inputs.append(activation)
    seed_unit(len(body))
    loss: Any = head.loss_sum(inputs[-1], batch, smoothing)
    (loss / 11).backward()
    for given, output in zip(reversed(inputs), reversed(outputs), strict=True):
        output.backward(given.grad)
    return torch.as_tensor(loss.detach())


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


@pytest.mark.parametrize(
    ("half_blocks", "split"),
    [(False, False), (False, True), (True, True)],
    ids=["whole", "split", "half-split"],
)
def test_units_equal_whole_model_in_training(
    adapter: ModelAdapter, make_batch: MakeBatch, split: bool
) -> None:
    model: Any = initial_model(adapter, None, seed=3).train()
    body, head = build_units(adapter, model)
    smoothing = 0.1 if adapter.task == "translation" else 0.0
    layers = [layer for unit in (*body, head) for layer in use_split_backward(unit) if split]

    for seed, padded in ((0, False), (1, True)):  # twice, so that gradients accumulate
        batch = make_batch(adapter.task, padded=padded, seed=seed)
        expected_loss = run_whole(adapter, model, batch, smoothing)
        with deferred_gradients(layers) as deferred, count_kept_bytes((*body, head)) as kept:
            assert torch.equal(run_units(body, head, batch, smoothing), expected_loss)
        assert deferred.kept_bytes <= sum(kept.values())
        deferred.compute()

    gradients = {
        name: parameter.grad
        for unit in (*body, head)
        for name, parameter in unit.named_parameters()
    }
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        found = gradients[name]
        assert found is not None and gradient is not None
        assert torch.equal(found, gradient), name


@pytest.mark.parametrize("family", FIRST_OF_FEED_FORWARD)
def test_two_halves_equal_the_passes_of_their_layer(
    make_adapter: MakeAdapter, make_batch: MakeBatch, family: str
) -> None:
    task, dropout = "ner", {}
    if family in ("marian", "bart"):
        task, dropout = "translation", {"attention_dropout": 0.1, "activation_dropout": 0.2}
    elif (family, "causal_lm") in FIRST_OF_HEAD:
        task = "causal_lm"
    whole = make_adapter(family, task, **dropout)
    halves = make_adapter(family, task, half_blocks=True, **dropout)
    model = initial_model(whole, None, seed=3).train()
    block = build_units(whole, model)[0][1]
    attention, feed_forward = build_units(halves, model)[0][1:3]
    batch = make_batch(task, padded=True)
    given = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(1))
    results = []
    for units in ((block,), (attention, feed_forward)):
        activation = given.clone().requires_grad_()
        output = activation
        seed_unit(1)  # once, so the second half goes on with the random numbers of the first
        for unit in units:
            output = unit(output, batch)
        output.square().sum().backward()
        assert activation.grad is not None
        gradients = {
            name: p.grad
            for unit in units
            for name, p in unit.named_parameters()
            if p.grad is not None
        }
        results.append({"output": output, "activation": activation.grad, **gradients})
    expected, found = results
    assert found.keys() == expected.keys()
    assert len(found) == 2 + len(list(block.parameters()))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_dropout_is_on_in_training(adapter: ModelAdapter, make_batch: MakeBatch) -> None:
    model: Any = initial_model(adapter, None, seed=3)
    batch = make_batch(adapter.task, padded=True)
    losses = [
        run_units(*build_units(adapter, model.train(is_on)), batch, 0.0) for is_on in (True, False)
    ]
    assert not torch.equal(*losses)


def test_units_predict_what_whole_model_predicts(
    adapter: ModelAdapter, make_batch: MakeBatch
) -> None:
    model: Any = initial_model(adapter, None, seed=3)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter.mul_(20)  # so that predictions differ between rows
    body, head = build_units(adapter, model)
    batch = make_batch(adapter.task, padded=True)
    inputs = without_labels(batch)
    activation = None
    with torch.no_grad():
        for unit in body:
            activation = unit(activation, inputs)
        assert activation is not None
        if adapter.task == "causal_lm":
            check_measured_losses(head.predict(activation, batch), model(**inputs).logits, batch)
            return
        predicted = head.predict(activation, inputs)
        if adapter.task == "translation":
            generate = model.generate
            expected = generate(**inputs, max_new_tokens=6, do_sample=False, num_beams=1)[:, 1:]
        else:
            expected = model(**inputs).logits.argmax(dim=-1)
    assert predicted.dtype == torch.int64
    assert predicted.ndim == batch["labels"].ndim
    assert torch.equal(predicted, expected)
    if adapter.task == "translation":
        assert len(set(map(str, predicted.tolist()))) > 1


def check_measured_losses(predicted: Tensor, logits: Tensor, batch: dict[str, Tensor]) -> None:
    """Compares the losses and the numbers of right tokens of a language model with a loop over all tokens."""
    expected = torch.zeros(3, 2)
    for row, label_row in enumerate(batch["labels"]):
        for position, label in enumerate(label_row):
            if label != -100:
                scores = logits[row, position]
                expected[row, 0] += scores.logsumexp(0) - scores[label]
                expected[row, 1] += scores.argmax() == label
    torch.testing.assert_close(predicted, expected)


def test_translation_stops_at_max_new_tokens(
    make_adapter: MakeAdapter, make_batch: MakeBatch
) -> None:
    adapter = make_adapter("marian", "translation")
    head = build_units(adapter, initial_model(adapter, None, seed=3).train(False))[1]
    head.get_buffer("final_logits_bias")[0, 2] = -1e9  # so that no row ends before the limit
    batch = make_batch("translation", padded=True)
    assert head.predict(torch.zeros(3, 9, 16), batch).shape == (3, 6)


def test_head_keeps_tied_weights_tied_when_it_moves(
    make_adapter: MakeAdapter, make_batch: MakeBatch
) -> None:
    for family in ("marian", "bart"):
        adapter = make_adapter(family, "translation")
        head: Any = adapter.build_unit(adapter.num_units - 1).double().train(False)
        assert head.get_parameter("lm_head.weight") is head.get_parameter(
            "model.decoder.embed_tokens.weight"
        )
        loss = head.loss_sum(
            torch.zeros(3, 9, 16, dtype=torch.float64), make_batch("translation", padded=True), 0.0
        )
        assert loss.dtype == torch.float64


@pytest.mark.parametrize("half_blocks", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
@torch.no_grad()
def test_passes_over_parts_of_rows_equal_one_pass_over_whole_rows(
    make_adapter: MakeAdapter, make_batch: MakeBatch, family: str, half_blocks: bool
) -> None:
    adapter = make_adapter(family, "causal_lm", half_blocks=half_blocks)
    units = build_units(adapter, initial_model(adapter, None, seed=1).eval())[0]

    def run(side: dict[str, Tensor], earlier: list[KeyValues | None]) -> Tensor:
        activation: Any = None
        for unit, stage in zip(units, earlier, strict=True):
            activation = unit(activation, side, stage)
        return torch.as_tensor(activation)

    for padded, lengths in itertools.product((False, True), [(4, 5), (1, 7, 1)]):
        batch = make_batch("causal_lm", padded=padded)
        expected = run(batch, [None] * len(units))
        first, second = KeyValues(), KeyValues()  # two stages
        earlier = [first if index < len(units) // 2 else second for index in range(len(units))]
        parts = []
        for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
            stop = start + length
            side = {
                "input_ids": batch["input_ids"][:, start:stop],
                "attention_mask": batch["attention_mask"][:, :stop].clone(),
            }
            parts.append(run(side, list(earlier)))
        valid = batch["attention_mask"].bool()
        torch.testing.assert_close(torch.cat(parts, dim=1)[valid], expected[valid])


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("bert", "classification"),
        ("distilbert", "classification"),
        ("roberta", "classification"),
        ("marian", "translation"),
        ("bart", "translation"),
        ("gpt2", "causal_lm"),
        ("qwen2", "causal_lm"),
    ],
)
@torch.no_grad()
def test_blocks_of_a_stage_share_the_mask_of_a_micro_batch_and_never_that_of_another(
    make_adapter: MakeAdapter, make_batch: MakeBatch, family: str, kind: str
) -> None:
    adapter = make_adapter(family, kind)
    blocks = [adapter.build_unit(index).eval() for index in (1, 2)]
    for block in blocks:
        torch.nn.init.normal_(next(block.parameters()))
    padded, whole = (make_batch(kind, padded=padded) for padded in (True, False))
    activation = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(1))
    results = []
    for is_forgotten in (False, True):
        for side in (padded, whole, padded):
            if is_forgotten:
                adapter._last_shared = None
            results += [block(activation, side) for block in blocks]
    assert all(map(torch.equal, results[:6], results[6:]))
    assert adapter._last_shared is not None
    assert adapter._last_shared[0] is padded["attention_mask"]
