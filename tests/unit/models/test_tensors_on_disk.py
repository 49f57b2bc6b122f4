"""Tests of tensors that lie in files."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collapipe.models import (
    ModelAdapter,
    TensorsOnDisk,
    initial_model,
    join_model,
    split_state,
    tensors_on_disk,
)

MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_on_disk, "_LARGE_BYTES", 1)
    monkeypatch.setattr(tensors_on_disk, "_RESIDENT_BYTES", 4096)
    monkeypatch.setattr(tensors_on_disk, "_FILE_BYTES", 1 << 16)


@pytest.mark.usefixtures("everything_is_large")
def test_model_on_disk_has_the_same_bits(adapter: ModelAdapter, tmp_path: Path) -> None:
    expected = initial_model(adapter, None, seed=3)
    with TensorsOnDisk(tmp_path) as disk:
        model = initial_model(adapter, None, seed=3)
        disk.release()
        joined = join_model(adapter, split_state(adapter, model))
    for found in (model, joined):
        state: dict[str, Any] = found.state_dict()
        for name, tensor in expected.state_dict().items():
            assert torch.equal(state[name], tensor), name
            assert state[name].stride() == tensor.stride()
    joined.save_pretrained(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.usefixtures("everything_is_large")
def test_pretrained_weights_on_disk_have_the_same_bits(
    make_adapter: Callable[..., ModelAdapter], save: Callable[..., str], tmp_path: Path
) -> None:
    llama = make_adapter("llama", "causal_lm")
    directory = save(initial_model(llama, None, seed=3).to(torch.bfloat16))
    expected = initial_model(llama, directory, seed=4).state_dict()
    with TensorsOnDisk(tmp_path):
        found = initial_model(llama, directory, seed=4).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(tensor.dtype == torch.float32 for tensor in found.values())


def test_large_tensors_need_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_on_disk, "_RESIDENT_BYTES", 16 * MIB)
    before = resident_bytes()
    most = 0
    with TensorsOnDisk(tmp_path) as disk:
        layers, copies = [], []
        for number in range(32):
            layers.append(nn.Linear(2048, 1024, bias=False))  # 8 MiB
            with torch.no_grad():
                layers[-1].weight.fill_(number)
            most = max(most, resident_bytes())
        for layer in layers:
            with torch.no_grad():
                layer.weight.add_(0.0)
            most = max(most, resident_bytes())
            if len(copies) < 8:
                copies.append(layer.weight.detach().clone())
        disk.release()
    assert most - before < 120 * MIB < 32 * 8 * MIB
    assert [int(layer.weight[7, 9]) for layer in layers] == list(range(32))
    assert [int(copy.sum()) for copy in copies] == [n * 1024 * 2048 for n in range(8)]
    assert list(tmp_path.iterdir()) == []


def results_of_operations() -> list[torch.Tensor]:
    source = torch.arange(24.0).reshape(4, 6).t()
    return [
        source.clone(),
        source.to(torch.float64),
        source.contiguous(),
        torch.zeros(3, 2),
        torch.zeros_like(source, dtype=torch.int64),
        source.new_zeros(5),
    ]


@pytest.mark.usefixtures("everything_is_large")
def test_operations_give_what_they_give_in_memory(tmp_path: Path) -> None:
    with TensorsOnDisk(tmp_path):
        results = results_of_operations()
        assert torch.zeros(2, 3, device="meta").is_meta
    for found, wanted in zip(results, results_of_operations(), strict=True):
        assert torch.equal(found, wanted)
        assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())
