"""Tests of the frozen weights that a host reads from a pretrained directory of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapipe.errors import NotFoundError
from collapipe.models import (
    ModelAdapter,
    divide_state,
    initial_model,
    read_frozen,
    split_state,
)
from collapipe.weights.tensor_blob import TensorBlob

MakeAdapter = Callable[..., ModelAdapter]
MakeModel = Callable[..., tuple[Path, ModelAdapter]]


@pytest.fixture
def make(
    make_foreign: Callable[..., Any],
    make_adapter: MakeAdapter,
    with_lora: MakeAdapter,
    save: Callable[..., str],
) -> MakeModel:
    """Writes a tiny pretrained model in several files, and makes its adapter with LoRA."""

    def make_both(
        family: str, *, dtype: str = "float32", is_tied: bool = False, is_headless: bool = False
    ) -> tuple[Path, ModelAdapter]:
        model = make_foreign(family, tie_word_embeddings=is_tied)
        directory = Path(save(model.base_model if is_headless else model, max_shard_size="6KB"))
        assert len(list(directory.glob("model-*.safetensors"))) > 1
        plain = make_adapter(family, "causal_lm", str(directory))
        return directory, with_lora(plain, dtype=dtype, target_modules="all-linear")

    return make_both


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"is_tied": True, "dtype": "bfloat16"}),
        ("gpt2", {"is_tied": True, "dtype": "bfloat16"}),
        ("gpt2", {"is_tied": True, "is_headless": True}),
    ],
    ids=str,
)
def test_frozen_weights_of_a_unit_are_those_of_the_edge_server(
    make: MakeModel, family: str, options: dict[str, Any]
) -> None:
    directory, adapter = make(family, **options)
    states = split_state(adapter, initial_model(adapter, str(directory), seed=5))
    for index, state in enumerate(states):
        frozen = divide_state(state, adapter.frozen_names(index))[1]
        assert frozen
        found = read_frozen(adapter, index, directory)
        assert TensorBlob(found).digest == TensorBlob(frozen).digest


def test_unit_is_read_without_the_files_of_the_others(make: MakeModel) -> None:
    directory, adapter = make("llama")
    expected = read_frozen(adapter, 1, directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text("utf-8"))
    needed = {index["weight_map"][name] for name in expected}
    others = [path for path in directory.glob("model-*.safetensors") if path.name not in needed]
    assert others
    for path in others:
        path.unlink()
    found = read_frozen(adapter, 1, directory)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(NotFoundError, match=f"{directory}"):
        for unit_index in range(adapter.num_units):
            read_frozen(adapter, unit_index, directory)


def drop_tensor(directory: Path) -> None:
    for path in directory.glob("model-*.safetensors"):
        tensors = load_file(path)
        save_file({k: v for k, v in tensors.items() if "layers.0.mlp" not in k}, path)


def drop_from_index(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text("utf-8"))
    index["weight_map"].pop("model.layers.0.mlp.up_proj.weight")
    path.write_text(json.dumps(index))


def overwrite(pattern: str, content: bytes) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for path in directory.glob(pattern):
            path.write_bytes(content)

    return write


def remove_all(directory: Path) -> None:
    for path in directory.glob("model*"):
        path.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        drop_tensor,
        drop_from_index,
        overwrite("model.safetensors.index.json", b"{"),
        overwrite("model.safetensors.index.json", b"{}"),
        overwrite("model-*.safetensors", b"{"),
        remove_all,
    ],
)
def test_directory_that_cannot_give_a_unit_is_named(
    make: MakeModel, damage: Callable[[Path], None]
) -> None:
    directory, adapter = make("llama")
    damage(directory)
    named = "'model.layers.0.mlp.up_proj" if damage is drop_from_index else ""
    with pytest.raises(NotFoundError, match=f"{directory}.*{named}"):
        read_frozen(adapter, 1, directory)
