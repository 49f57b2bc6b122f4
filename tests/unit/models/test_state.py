"""Tests that models are split into units and joined again, and that `transformers` loads exports."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    pipeline,
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
def test_unit_states_are_disjoint_and_complete(adapter: ModelAdapter) -> None:
    states = split_state(adapter, adapter.build_model())
    names = [name for state in states for name in state]
    assert len(names) == len(set(names))
    whole = adapter.build_model()
    trainable = {name for name, p in whole.named_parameters() if p.requires_grad}
    assert set(names) == trainable | ({"final_logits_bias"} & set(whole.state_dict()))


@pytest.mark.parametrize("half_blocks", [False, True])
def test_unit_holds_only_its_own_tensors(adapter: ModelAdapter) -> None:
    for index, state in enumerate(split_state(adapter, adapter.build_model())):
        unit = adapter.build_unit(index)
        assert unit.state_dict().keys() == state.keys()
        assert {name for name, _ in unit.named_parameters()} <= state.keys()
        assert all(parameter.requires_grad for parameter in unit.parameters())
        tensors = [*unit.parameters(), *unit.buffers()]
        assert all(tensor.device.type == "cpu" for tensor in tensors)


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
def test_building_units_draws_no_random_numbers(adapter: ModelAdapter) -> None:
    states = split_state(adapter, initial_model(adapter, None, seed=3))
    before = torch.get_rng_state()
    for index in range(adapter.num_units):
        adapter.build_unit(index)
    join_model(adapter, states)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("half_blocks", [False, True])
def test_joined_model_splits_into_the_same_states(adapter: ModelAdapter) -> None:
    states = trained_states(adapter)
    again = split_state(adapter, join_model(adapter, states))
    for state, expected in zip(again, states, strict=True):
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
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
    batch = make_batch(adapter.task, padded=True)
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    said = "".join(capfd.readouterr())
    assert not any(word in said for word in ("MISSING", "UNEXPECTED", "tied")), said


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
@pytest.mark.parametrize("kind", ["classification", "ner"])
def test_export_runs_in_a_pipeline(
    make_adapter: Callable[..., ModelAdapter],
    tokenizer: Tokenizer,
    tmp_path: Path,
    family: str,
    kind: str,
) -> None:
    adapter = make_adapter(family, kind)
    join_model(adapter, trained_states(adapter)).save_pretrained(tmp_path)
    _save_tokenizer(tokenizer, tmp_path)
    if kind == "ner":
        label = pipeline("token-classification", model=os.fspath(tmp_path), ignore_labels=[])
        found = {answer["entity"] for answer in label("w1 w2 w3")}
    else:
        found = {
            answer["label"]
            for answer in pipeline("text-classification", os.fspath(tmp_path))("w1 w2")
        }
    assert found and found <= {"O", "B-person", "I-person"}


@pytest.mark.parametrize("family", ["marian", "bart"])
def test_exported_translator_generates_as_the_head_predicts(
    make_adapter: Callable[..., ModelAdapter],
    make_batch: Callable[..., dict[str, Tensor]],
    tmp_path: Path,
    family: str,
) -> None:
    adapter = make_adapter(family, "translation")
    states = split_state(adapter, initial_model(adapter, None, seed=3))
    join_model(adapter, states).save_pretrained(tmp_path)
    batch = make_batch("translation", padded=True)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    generated = loaded.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    )
    activation = None
    with torch.no_grad():
        for index in range(adapter.num_units):
            unit: Any = adapter.build_unit(index).train(False)
            unit.load_state_dict(states[index])
            if index < adapter.num_units - 1:
                activation = unit(activation, batch)
        assert torch.equal(unit.predict(activation, batch), generated[:, 1:])


def test_states_of_another_model_are_not_joined(
    make_adapter: Callable[..., ModelAdapter],
) -> None:
    adapter = make_adapter("bert", "ner")
    states = split_state(adapter, adapter.build_model())
    with pytest.raises(CorruptDataError, match="4 states were given for the 5 units"):
        join_model(adapter, states[:-1])
    with pytest.raises(CorruptDataError, match="unit 1 has other tensors"):
        join_model(adapter, [states[0], states[2], *states[2:]])
    wider = make_adapter("bert", "ner", hidden_size=32)
    with pytest.raises(CorruptDataError, match="size mismatch"):
        join_model(adapter, split_state(wider, wider.build_model()))


def test_incomplete_state_is_not_loaded(adapter: ModelAdapter) -> None:
    states = split_state(adapter, adapter.build_model())
    for index, state in enumerate(states):
        state.popitem()
        with pytest.raises(RuntimeError, match="Missing key"):
            adapter.build_unit(index).load_state_dict(state)


def test_unit_beyond_the_head_is_not_built(make_adapter: Callable[..., ModelAdapter]) -> None:
    adapter = make_adapter("bert", "ner")
    with pytest.raises(InvalidInputError, match="unit 5 does not exist.* units 0 to 4"):
        adapter.build_unit(5)


def _save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    wrap: Any = PreTrainedTokenizerFast
    wrap(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=12
    ).save_pretrained(directory)
