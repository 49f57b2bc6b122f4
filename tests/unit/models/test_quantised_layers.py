"""Tests of frozen layers in 4 bits. Exactness against `transformers` and `peft` is tested in tests/integration/test_exact.py."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import bitsandbytes
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from collapipe.errors import CorruptDataError, InvalidInputError
from collapipe.job import TrainingConfig
from collapipe.models import (
    ModelAdapter,
    divide_state,
    initial_model,
    is_quantised,
    join_model,
    split_state,
)
from collapipe.stage_runtime import CPU
from collapipe.stage_runtime.activation_stash import count_kept_bytes
from collapipe.stage_runtime.block_profile import count_stash_bytes, make_side, profile_block
from collapipe.stage_runtime.operation_counts import StageWork
from collapipe.stage_runtime.resident_units import ResidentUnit

MakeAdapter = Callable[..., ModelAdapter]
FAMILIES = [("llama", "causal_lm"), ("gpt2", "causal_lm"), ("bert", "classification")]


@pytest.fixture(params=FAMILIES, ids=lambda value: value[0])
def adapter(
    request: pytest.FixtureRequest, make_adapter: MakeAdapter, with_lora: MakeAdapter
) -> ModelAdapter:
    lora = {"target_modules": "all-linear", "r": 2, "lora_alpha": 16}
    return with_lora(make_adapter(*request.param), base_quantisation="nf4", **lora)


@pytest.fixture
def states(adapter: ModelAdapter) -> list[dict[str, Tensor]]:
    """The states of a model whose adapter is not zero."""
    model = initial_model(adapter, None, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    return split_state(adapter, model)


def loaded(
    adapter: ModelAdapter, index: int, state: Mapping[str, Tensor], folder: Any
) -> ResidentUnit:
    """Loads a unit as a host does."""
    unit = ResidentUnit(index, adapter.build_unit(index), TrainingConfig())
    trained, frozen = divide_state(state, adapter.frozen_names(index))
    path = folder / f"{index}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in frozen.items()}, path)
    unit.load_frozen(path)
    unit.module.load_state_dict(trained, strict=False)
    return unit


def layers_in(module: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in module.named_modules() if is_quantised(layer)}


def test_only_frozen_layers_of_blocks_are_quantised_and_names_stay(adapter: ModelAdapter) -> None:
    for index in range(adapter.num_units):
        unit = adapter.build_unit(index)
        assert list(unit.state_dict()) == adapter.state_names(index)
        layers = layers_in(unit)
        if not 0 < index <= adapter.num_blocks:
            assert not layers
            continue
        linear = [n for n in adapter.state_names(index) if n.endswith("base_layer.weight")]
        assert sorted(f"{name}.weight" for name in layers) == sorted(linear)
        for layer in layers.values():
            assert not bitsandbytes.functional.dequantize_4bit(
                layer.weight.data, layer.weight.quant_state
            ).any()


def test_memory_share_is_what_a_loaded_block_takes(
    adapter: ModelAdapter, states: list[dict[str, Tensor]], tmp_path: Any
) -> None:
    unit = loaded(adapter, 1, states[1], tmp_path).module
    frozen = divide_state(states[1], adapter.frozen_names(1))[1]
    num_bytes = sum(p.nbytes for p in unit.parameters() if not p.requires_grad)
    for layer in layers_in(unit).values():
        scales = layer.weight.quant_state
        num_bytes += scales.absmax.nbytes + scales.state2.absmax.nbytes
    full = sum(tensor.nbytes for tensor in frozen.values())
    assert adapter.frozen_memory_share == pytest.approx(num_bytes / full)
    assert num_bytes < 0.3 * full


def test_merged_model_computes_what_the_units_compute(
    adapter: ModelAdapter, states: list[dict[str, Tensor]], make_batch: Any, tmp_path: Any
) -> None:
    side = make_batch(adapter.task, padded=False)
    activation: Any = None
    for index in range(1 + adapter.num_blocks):
        unit: Any = loaded(adapter, index, states[index], tmp_path).module.eval()
        activation = unit(activation, side)
    merged: Any = join_model(adapter, states)
    assert not layers_in(merged)
    outputs: list[Any] = []
    last = merged.get_submodule(f"{adapter.blocks_path}.{adapter.num_blocks - 1}")
    last.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    merged(**side)
    found = outputs[0] if isinstance(outputs[0], Tensor) else outputs[0][0]
    torch.testing.assert_close(found, activation, rtol=1e-4, atol=1e-5)


def test_damaged_file_and_missing_library_are_named(
    adapter: ModelAdapter,
    states: list[dict[str, Tensor]],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = dict(states[1])
    name = next(name for name in state if name.endswith("base_layer.weight"))
    for wrong in (state[name][:, 1:], state[name].double()):
        state[name] = wrong
        with pytest.raises(CorruptDataError, match="unit 1 .*shape"):
            loaded(adapter, 1, state, tmp_path)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(InvalidInputError, match=r"'\.\[quantisation\]'"):
        adapter.build_unit(1)


def test_counts_are_those_of_blocks_that_are_not_quantised(
    adapter: ModelAdapter, with_lora: MakeAdapter, states: list[dict[str, Tensor]], tmp_path: Any
) -> None:
    assert adapter.lora is not None
    plain = with_lora(adapter, **adapter.lora.model_dump())
    side = make_side(adapter, 2, 12)
    block: Any = loaded(adapter, 1, states[1], tmp_path).module.train()
    activation = torch.randn(2, 12, adapter.config.hidden_size, requires_grad=True)
    with count_kept_bytes([block]) as kept:
        output = block(activation, side)
    assert sum(kept.values()) == count_stash_bytes(adapter, 1, side)
    del output
    work, expected = (StageWork([unit], 16) for unit in (block, plain.build_unit(1)))
    assert work.forward(side) == expected.forward(side)
    assert work.backward(side) == expected.backward(side)
    profiles = [profile_block(each, CPU, [2], 12) for each in (adapter, plain)]
    assert profiles[0].state_bytes == profiles[1].state_bytes > 0
