"""Tests of models with LoRA. Exactness against `peft` is tested in tests/integration/test_exact.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.models import (
    ModelAdapter,
    changes_embeddings,
    divide_state,
    initial_model,
    join_model,
    split_state,
)
from collapipe.stage_runtime import CPU
from collapipe.stage_runtime.block_profile import profile_block
from collapipe.tensors import ACTIVATION, Frame, FrameKind, encode_frame

MakeAdapter = Callable[..., ModelAdapter]


def trained_units(adapter: ModelAdapter) -> list[int]:
    return [
        index
        for index in range(adapter.num_units)
        if any(p.requires_grad for p in adapter.build_unit(index).parameters())
    ]


@pytest.fixture
def llama(make_adapter: MakeAdapter) -> ModelAdapter:
    return make_adapter("llama", "causal_lm")


def test_frozen_weights_have_the_names_of_a_model_without_lora(
    adapter: ModelAdapter, with_lora: MakeAdapter
) -> None:
    changed = with_lora(adapter, target_modules="all-linear")
    plain = split_state(adapter, initial_model(adapter, None, seed=3))
    states = split_state(changed, initial_model(changed, None, seed=3))
    for index, (state, before) in enumerate(zip(states, plain, strict=True)):
        trained, frozen = divide_state(state, changed.frozen_names(index))
        assert all("lora_" in name or "modules_to_save" in name for name in trained)
        assert frozen.keys() == before.keys()
        for name, tensor in frozen.items():
            assert torch.equal(tensor, before[name])
        parameters = dict(changed.build_unit(index).named_parameters())
        assert all(parameters[name].requires_grad for name in trained)


@pytest.mark.parametrize(
    ("lora", "units", "changes"),
    [
        ({}, [1, 2, 3], False),
        ({"target_modules": ["up_proj"]}, [1, 2, 3], False),
        ({"target_modules": ["layers.2.mlp.up_proj"]}, [3], False),
        ({"target_modules": "all-linear"}, [1, 2, 3], False),
        ({"target_modules": ["q_proj", "embed_tokens"]}, [0, 1, 2, 3], True),
        ({"target_modules": ["lm_head"]}, [4], True),
        ({"modules_to_save": ["lm_head"]}, [1, 2, 3, 4], True),
        ({"modules_to_save": ["norm"]}, [1, 2, 3, 4], False),
    ],
    ids=str,
)
def test_units_with_targets_are_trained_and_changes_of_embeddings_are_noticed(
    llama: ModelAdapter,
    with_lora: MakeAdapter,
    lora: dict[str, Any],
    units: list[int],
    changes: bool,
) -> None:
    changed = with_lora(llama, **lora)
    assert trained_units(changed) == units
    assert changed.first_trained_unit == units[0]
    assert llama.first_trained_unit == 0
    assert changes_embeddings(changed.build_on_meta()[0]) == changes


def test_labelling_layers_are_always_trained(
    make_adapter: MakeAdapter, with_lora: MakeAdapter
) -> None:
    bert = with_lora(make_adapter("bert", "classification"))
    assert trained_units(bert) == [1, 2, 3, 4]
    distilbert = with_lora(make_adapter("distilbert", "classification"), target_modules=["q_lin"])
    trained = [n for n, p in distilbert.build_unit(4).named_parameters() if p.requires_grad]
    assert {name.partition(".")[0] for name in trained} == {"pre_classifier", "classifier"}
    head = [n for n, p in bert.build_unit(4).named_parameters() if p.requires_grad]
    assert {name.partition(".modules")[0] for name in head} == {"bert.pooler", "classifier"}


def test_only_the_zero_factor_is_trained_when_products_are_averaged(
    llama: ModelAdapter, with_lora: MakeAdapter
) -> None:
    targets = ["q_proj", "embed_tokens"]
    exact = with_lora(llama, averaging="product", target_modules=targets)
    model: Any = initial_model(exact, None, seed=3)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(not parameter.any() for parameter in trained.values())
    both = initial_model(with_lora(llama, target_modules=targets), None, seed=3)
    assert sum(p.requires_grad for p in both.parameters()) == 2 * len(trained)


def test_merged_model_computes_what_the_adapter_computes(
    adapter: ModelAdapter, with_lora: MakeAdapter, make_batch: Any, tmp_path: Path
) -> None:
    changed = with_lora(adapter, target_modules="all-linear", r=2, lora_alpha=16)
    model: Any = initial_model(changed, None, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    merged: Any = join_model(changed, split_state(changed, model))
    assert not any("lora" in name for name in merged.state_dict())
    assert type(merged) is type(model)
    batch = make_batch(adapter.task, padded=True)
    expected, found = model.eval()(**batch).logits, merged(**batch).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path)
    loaded, info = type(merged).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(loaded.eval()(**batch).logits, found)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert any(tensor.any() for name, tensor in state.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("family", "kind", "settings", "message"),
    [
        ("llama", "causal_lm", {"target_modules": ["nothing"]}, "'nothing'.* embed_tokens"),
        ("llama", "causal_lm", {"target_modules": ["input_layernorm"]}, "LlamaRMSNorm"),
        ("llama", "causal_lm", {"modules_to_save": ["score"]}, "modules_to_save.*'score'"),
        ("bart", "translation", {"target_modules": ["embed_tokens"]}, "embed_tokens.*bart model"),
        ("bart", "translation", {"modules_to_save": ["lm_head"]}, "lm_head.*bart model"),
        ("distilbert", "ner", {}, "target_modules.*q_lin"),
        (
            "llama",
            "causal_lm",
            {"dtype": "bfloat16", "modules_to_save": ["norm"]},
            "bfloat16.* norm .*llama",
        ),
        ("bert", "classification", {"dtype": "bfloat16"}, "bfloat16.* classifier, pooler "),
        (
            "distilbert",
            "ner",
            {"dtype": "bfloat16", "target_modules": ["q_lin"]},
            "bfloat16.* classifier ",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_are_refused(
    make_adapter: MakeAdapter,
    with_lora: MakeAdapter,
    family: str,
    kind: str,
    settings: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        with_lora(make_adapter(family, kind), **settings)


@pytest.mark.parametrize(
    ("dtype", "half_blocks"), [(torch.bfloat16, False), (torch.float16, True)], ids=str
)
def test_base_and_activations_have_the_type_and_all_else_is_fp32(
    make_adapter: MakeAdapter,
    with_lora: MakeAdapter,
    make_batch: Any,
    dtype: torch.dtype,
    half_blocks: bool,
) -> None:
    plain = make_adapter("llama", "causal_lm", half_blocks=half_blocks)
    lora: dict[str, Any] = {"target_modules": "all-linear", "lora_dropout": 0.1}
    changed = with_lora(plain, dtype=str(dtype).removeprefix("torch."), **lora)
    states = split_state(changed, initial_model(changed, None, seed=3))
    before = split_state(plain, initial_model(plain, None, seed=3))
    batch = make_batch("causal_lm", padded=False)
    activation: Any = None
    for index, state in enumerate(states):
        trained, frozen = divide_state(state, changed.frozen_names(index))
        for name, tensor in frozen.items():
            assert torch.equal(tensor, before[index][name].to(dtype))
            assert tensor.nbytes * 2 == before[index][name].nbytes
        assert {tensor.dtype for tensor in trained.values()} <= {torch.float32}
        unit: Any = changed.build_unit(index)
        unit.load_state_dict(state)
        kept = {name: tensor.dtype for name, tensor in unit.state_dict().items()}
        assert kept == {name: tensor.dtype for name, tensor in state.items()}
        if index < changed.num_units - 1:
            activation = unit(activation, batch)
            assert activation.dtype is dtype
            header, _ = encode_frame(Frame(FrameKind.FORWARD, 0, 0, {ACTIVATION: activation}))
            assert header.tensors[0].byte_length == activation.numel() * 2
    loss = unit.loss_sum(activation, batch, 0.0)
    assert loss.dtype is torch.float32
    assert unit.eval().predict(activation, batch).dtype is torch.float32
    loss.backward()


def test_block_of_a_16_bit_base_is_profiled_with_its_activations(
    llama: ModelAdapter, with_lora: MakeAdapter
) -> None:
    half, whole = (
        profile_block(with_lora(llama, dtype=dtype, target_modules=["q_proj"]), CPU, (2,), 8)
        for dtype in ("bfloat16", "float32")
    )
    assert half.state_bytes == whole.state_bytes == 16 * half.num_parameters
    assert half.stash_bytes_per_sample < 0.9 * whole.stash_bytes_per_sample


@pytest.mark.parametrize(
    ("model", "schedule", "message"),
    [
        ({"base_dtype": "float16"}, {}, "without LoRA"),
        ({"base_dtype": "float16", "lora": {}}, {"codecs": ["int8"]}, "lossy codecs.*fp32"),
        ({"base_quantisation": "nf4"}, {}, r"without LoRA.*model\.lora\.r"),
    ],
    ids=str,
)
def test_job_that_contradicts_its_base_is_refused(
    model: dict[str, Any], schedule: dict[str, Any], message: str
) -> None:
    document: dict[str, Any] = {
        "task": {"kind": "causal_lm"},
        "model": {"family": "llama", **model},
        "schedule": schedule,
    }
    with pytest.raises(InvalidInputError, match=message):
        JobConfig.from_dict(document, "a job")
    document |= {"model": {**document["model"], "lora": {}}, "schedule": {}}
    assert JobConfig.from_dict(document, "a job").model.lora is not None
