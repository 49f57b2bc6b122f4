"""Tests of a host that has pretrained directories of its own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from collapipe.job import LoraConfig, ModelConfig, TaskConfig
from collapipe.models import (
    adapter_for,
    create_config_json,
    divide_state,
    initial_model,
    split_state,
)
from collapipe.weights.tensor_blob import TensorBlob

from .stage_hosts import StageHost, stage_host

StartHost = Callable[[str], AbstractContextManager[tuple[StageHost, int, int]]]
"""Given the name of the job's directory, gives a host, and the bytes of its trained and frozen weights."""


@pytest.fixture
def start_host(make_tokenizer: Callable[[str], Tokenizer], tmp_path: Path) -> StartHost:
    """Starts a host whose job has LoRA on a pretrained Llama. The host has a copy, in the folder `own`."""
    tokenizer = make_tokenizer("llama")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    for directory in (tmp_path / "job/model", tmp_path / "own/model"):
        model.save_pretrained(directory)
        tokenizer.save(str(directory / "tokenizer.json"))
    settings = ModelConfig(
        family="llama",
        pretrained=str(tmp_path / "job/model"),
        base_dtype="bfloat16",
        lora=LoraConfig(target_modules=["q_proj", "embed_tokens", "lm_head"]),
    )
    task = TaskConfig(kind="causal_lm", max_length=8)
    config_json = create_config_json(settings, task, [], tokenizer)
    adapter = adapter_for("llama", "causal_lm", config_json)
    states = split_state(adapter, initial_model(adapter, settings.pretrained, seed=0))
    divided = [divide_state(state, adapter.frozen_names(i)) for i, state in enumerate(states)]
    trained, frozen = ([each[part] for each in divided] for part in (0, 1))

    @contextmanager
    def start(name: str) -> Iterator[tuple[StageHost, int, int]]:
        with stage_host(adapter, config_json, trained, frozen, tmp_path / "own") as host:
            host.configuration.model.pretrained = name
            trained_bytes = sum(TensorBlob(tensors).total_bytes for tensors in trained[1:])
            yield host, trained_bytes, sum(TensorBlob(t).total_bytes for t in frozen[1:])

    return start


def configure(host: StageHost) -> int:
    """Configures the host's stage, and returns the bytes that it fetched."""
    done = host.open(host.configure()).expect("configured").configured
    for state in host.configuration.units:
        assert state.frozen_digest in host.resources.frozen
    return done.fetched_bytes


@pytest.mark.parametrize(
    ("name", "is_fetched", "logged"),
    [
        ("model", False, None),
        ("another", True, "'another'"),
        ("..", True, "'..'"),
        ("../own/model", True, "'../own/model'"),
        ("", True, None),  # The weights are random.
    ],
    ids=["present", "absent", "parent", "path", "no directory"],
)
def test_frozen_weights_are_fetched_if_the_host_lacks_the_directory(
    start_host: StartHost,
    caplog: pytest.LogCaptureFixture,
    name: str,
    is_fetched: bool,
    logged: str | None,
) -> None:
    with start_host(name) as (host, trained_bytes, frozen_bytes):
        assert configure(host) == trained_bytes + is_fetched * frozen_bytes
    assert logged in caplog.text if logged else not caplog.records


def test_only_units_with_other_weights_are_fetched(
    start_host: StartHost, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "own/model/model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] += torch.ones(())
    save_file(tensors, path, metadata={"format": "pt"})
    with start_host("model") as (host, trained_bytes, frozen_bytes):
        fetched = configure(host)
    assert trained_bytes < fetched < trained_bytes + frozen_bytes
    (record,) = caplog.records
    assert "unit 2" in record.getMessage()
    assert "own/model has other weights" in record.getMessage()
