"""Tests that models are split into units and joined again, and that `transformers` loads exports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from collapipe.errors import CorruptDataError, InvalidInputError
from collapipe.models import ModelAdapter, initial_model, join_model, split_state

AUTO = {
    "classification": AutoModelForSequenceClassification,
    "ner": AutoModelForTokenClassification,
    "translation": AutoModelForSeq2SeqLM,
    "causal_lm": AutoModelForCausalLM,
}


def trained_states(adapter: ModelAdapter) -> list[dict[str, Tensor]]:
    """Returns states in which every tensor differs from its initial value."""
    states = split_state(adapter, initial_model(adapter, None, seed=3))
    return [{name: tensor + 0.125 for name, tensor in state.items()} for state in states]


@pytest.mark.parametrize("half_blocks", [False, True])
def test_units_divide_the_tensors_of_the_model(adapter: ModelAdapter) -> None:
    whole = adapter.build_model()
    states = split_state(adapter, whole)
    names = [name for state in states for name in state]
    assert len(names) == len(set(names))
    trainable = {name for name, p in whole.named_parameters() if p.requires_grad}
    assert set(names) == trainable | ({"final_logits_bias"} & set(whole.state_dict()))
    for index, state in enumerate(states):
        unit = adapter.build_unit(index)
        assert unit.state_dict().keys() == state.keys()
        assert {name for name, _ in unit.named_parameters()} <= state.keys()
        assert all(parameter.requires_grad for parameter in unit.parameters())
        tensors = [*unit.parameters(), *unit.buffers()]
        assert all(tensor.device.type == "cpu" for tensor in tensors)
        state.popitem()
        with pytest.raises(RuntimeError, match="Missing key"):
            unit.load_state_dict(state)


def test_built_unit_has_the_constant_tables_of_the_whole_model(adapter: ModelAdapter) -> None:
    whole = adapter.build_model()
    blank, _ = adapter.build_blank_model()
    for name, tensor in whole.named_parameters():
        if not tensor.requires_grad:
            assert torch.equal(blank.get_parameter(name), tensor), name
    constants = dict(whole.named_parameters()) | dict(whole.named_buffers())
    found = 0
    for index in range(adapter.num_units):
        for name, buffer in adapter.build_unit(index).named_buffers():
            assert torch.equal(buffer, constants[name]), name
            found += 1
    # Tables of rotary positions belong to no unit, and GPT-2 has no constant table.
    assert found >= 1 or adapter.task == "causal_lm"


@pytest.mark.parametrize("half_blocks", [False, True])
def test_joined_model_splits_into_the_same_states_without_random_numbers(
    adapter: ModelAdapter,
) -> None:
    states = trained_states(adapter)
    before = torch.get_rng_state()
    for index in range(adapter.num_units):
        adapter.build_unit(index)
    joined = join_model(adapter, states)
    assert torch.equal(torch.get_rng_state(), before)
    for state, expected in zip(split_state(adapter, joined), states, strict=True):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_export_loads_with_the_same_weights_and_predictions(
    adapter: ModelAdapter,
    make_batch: Callable[..., dict[str, Tensor]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    states = trained_states(adapter)
    model = join_model(adapter, states)
    model.save_pretrained(tmp_path)
    loaded = AUTO[adapter.task].from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    if adapter.task == "translation":
        assert loaded.generation_config.max_new_tokens == 6
        assert loaded.generation_config.num_beams == 1
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
    batch = make_batch(adapter.task, padded=True)
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    said = "".join(capfd.readouterr())
    assert not any(word in said for word in ("MISSING", "UNEXPECTED", "tied")), said


def test_units_of_another_model_are_refused(make_adapter: Callable[..., ModelAdapter]) -> None:
    adapter = make_adapter("bert", "ner")
    states = split_state(adapter, adapter.build_model())
    with pytest.raises(CorruptDataError, match="4 .* 5 units"):
        join_model(adapter, states[:-1])
    with pytest.raises(CorruptDataError, match="unit 1 "):
        join_model(adapter, [states[0], states[2], *states[2:]])
    wider = make_adapter("bert", "ner", hidden_size=32)
    with pytest.raises(CorruptDataError, match="size mismatch"):
        join_model(adapter, split_state(wider, wider.build_model()))
    with pytest.raises(InvalidInputError, match="unit 5 .* 0 to 4"):
        adapter.build_unit(5)


@pytest.mark.parametrize(
    ("family", "kind"), [("bert", "classification"), ("marian", "translation")]
)
@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": "all-linear"}])
def test_units_are_copies_that_leave_the_shared_model_as_it_was(
    make_adapter: Callable[..., ModelAdapter],
    with_lora: Callable[..., ModelAdapter],
    family: str,
    kind: str,
    lora: Any,
) -> None:
    adapter = make_adapter(family, kind)
    if lora is not None:
        adapter = with_lora(adapter, **lora)
    before = {
        name: id(tensor) for name, tensor in adapter.meta_model.state_dict(keep_vars=True).items()
    }
    for _ in range(2):
        units = [adapter.build_unit(index) for index in range(adapter.num_units)]
        assert not any(parameter.is_meta for unit in units for parameter in unit.parameters())
    after = adapter.meta_model.state_dict(keep_vars=True)
    assert {name: id(tensor) for name, tensor in after.items()} == before
    assert all(tensor.is_meta for tensor in after.values())
