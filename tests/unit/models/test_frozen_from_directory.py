"""Tests of the frozen weights that a host reads from a pretrained directory of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from collapipe.errors import NotFoundError
from collapipe.models import (
    ModelAdapter,
    adapter_for,
    divide_state,
    initial_model,
    read_frozen,
    split_state,
)
from collapipe.weights.tensor_blob import TensorBlob

MakeAdapter = Callable[..., ModelAdapter]
SIZES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20},
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


@pytest.fixture
def make_directory(
    make_tokenizer: Callable[[str], Tokenizer], tmp_path: Path
) -> Callable[..., Path]:
    """Writes a tiny pretrained model in several files: (family, whether embeddings are tied, without its head)."""

    def make(family: str, *, is_tied: bool = False, is_headless: bool = False) -> Path:
        tokenizer, untyped = make_tokenizer(family), SIZES[family]
        sizes: dict[str, Any] = {**untyped, "vocab_size": tokenizer.get_vocab_size()}
        model: Any
        if family == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=is_tied))
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=is_tied))
        if is_headless:
            model = model.base_model
        model.save_pretrained(tmp_path / "model", max_shard_size="6KB")
        assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
        tokenizer.save(str(tmp_path / "model/tokenizer.json"))
        return tmp_path / "model"

    return make


def with_lora(make_adapter: MakeAdapter, family: str, directory: Path, dtype: str) -> ModelAdapter:
    plain = make_adapter(family, "causal_lm", str(directory))
    document = {**plain.config.to_dict(), "dtype": dtype, "lora": {"target_modules": "all-linear"}}
    return adapter_for(family, "causal_lm", json.dumps(document))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"is_tied": True}),
        ("gpt2", {"is_tied": True}),
        ("gpt2", {"is_tied": True, "is_headless": True}),
    ],
    ids=str,
)
def test_frozen_weights_of_a_unit_are_those_of_the_edge_server(
    make_adapter: MakeAdapter,
    make_directory: Callable[..., Path],
    family: str,
    options: dict[str, bool],
    dtype: str,
) -> None:
    directory = make_directory(family, **options)
    adapter = with_lora(make_adapter, family, directory, dtype)
    states = split_state(adapter, initial_model(adapter, str(directory), seed=5))
    for index, state in enumerate(states):
        frozen = divide_state(state, adapter.frozen_names(index))[1]
        assert frozen
        found = read_frozen(adapter, index, directory)
        assert TensorBlob(found).digest == TensorBlob(frozen).digest


def test_unit_is_read_without_the_files_of_the_others(
    make_adapter: MakeAdapter, make_directory: Callable[..., Path]
) -> None:
    directory = make_directory("llama")
    adapter = with_lora(make_adapter, "llama", directory, "float32")
    expected = read_frozen(adapter, 1, directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text("utf-8"))
    needed = {index["weight_map"][name] for name in expected}
    others = [path for path in directory.glob("model-*.safetensors") if path.name not in needed]
    assert others
    for path in others:
        path.unlink()
    found = read_frozen(adapter, 1, directory)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(NotFoundError, match="cannot be read"):
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


def garble_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{")


def remove_map(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{}")


def remove_all(directory: Path) -> None:
    for path in directory.glob("model*"):
        path.unlink()


def damage_files(directory: Path) -> None:
    for path in directory.glob("model-*.safetensors"):
        path.write_bytes(b"{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_tensor, "cannot be read"),
        (drop_from_index, "no tensor 'model.layers.0.mlp.up_proj.weight'"),
        (garble_index, "cannot be read"),
        (remove_map, "cannot be read"),
        (remove_all, "cannot be read"),
        (damage_files, "cannot be read"),
    ],
)
def test_directory_that_cannot_give_a_unit_is_named(
    make_adapter: MakeAdapter,
    make_directory: Callable[..., Path],
    damage: Callable[[Path], None],
    message: str,
) -> None:
    directory = make_directory("llama")
    adapter = with_lora(make_adapter, "llama", directory, "float32")
    damage(directory)
    with pytest.raises(NotFoundError, match=f"{directory}.*{message}"):
        read_frozen(adapter, 1, directory)
