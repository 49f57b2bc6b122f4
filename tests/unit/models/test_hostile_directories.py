"""Pretrained directories that somebody made to attack hosts: they read nothing else, run nothing, and are refused by name."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from collapipe.errors import InvalidInputError, NotFoundError
from collapipe.models import ModelAdapter, adapter_for, initial_model, read_frozen
from collapipe.pretrained_directories import read_text

MakeConfig = Callable[..., str]


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.fixture
def model(make_adapter: Callable[..., ModelAdapter]) -> PreTrainedModel:
    return initial_model(make_adapter("llama", "causal_lm"), None, seed=1)


@pytest.fixture
def directory(model: PreTrainedModel, save: Callable[..., str]) -> Path:
    return Path(save(model))


@pytest.fixture
def shards(model: PreTrainedModel, save: Callable[..., str]) -> Path:
    """A directory whose weights are in several files."""
    return Path(save(model, max_shard_size="8KB"))


def load(make_config_json: MakeConfig, directory: Path) -> ModelAdapter:
    config_json = make_config_json("llama", "causal_lm", str(directory))
    adapter = adapter_for("llama", "causal_lm", config_json)
    initial_model(adapter, str(directory), seed=1)
    return adapter


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    "name", ["../secret/{}", "{}", "weights.bin", "a/b.safetensors", "a\0.safetensors", ".."]
)
def test_index_that_names_a_file_elsewhere_or_a_pickle_is_refused(
    make_config_json: MakeConfig, shards: Path, tmp_path: Path, name: str
) -> None:
    index = shards / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    secret = tmp_path / "secret"
    secret.mkdir()
    for file in set(files.values()):
        (shards / file).rename(secret / file)
    (shards / "weights.bin").write_bytes(pickle.dumps(Touch(tmp_path / "unpickled")))
    absolute = "{}" if ".." in name else f"{secret}/{{}}"
    named = {key: (absolute if name == "{}" else name).format(file) for key, file in files.items()}
    change(index, weight_map=named)
    with pytest.raises(InvalidInputError, match=rf"{index}: .*directory"):
        load(make_config_json, shards)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '"a"',
        "[" * 100_000,
        '{"weight_map": {}}',
        '{"metadata": {}, "weight_map": ["a"]}',
        '{"metadata": {}, "weight_map": {"a": 1}}',
        f'{{"metadata": {{}}, "a": "{"a" * (17 << 20)}"}}',
    ],
    ids=range(8),
)
def test_damaged_index_is_named(
    make_config_json: MakeConfig,
    make_adapter: Callable[..., ModelAdapter],
    shards: Path,
    text: str,
) -> None:
    index = shards / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(InvalidInputError, match=f"{index}: "):
        load(make_config_json, shards)
    with pytest.raises(NotFoundError, match=f"{index}: "):  # The weights are fetched then.
        read_frozen(make_adapter("llama", "causal_lm"), 0, shards)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["[]", "[" * 100_000, '"a"', " " * (17 << 20)], ids=range(4))
def test_damaged_settings_are_named(
    make_config_json: MakeConfig, directory: Path, name: str, text: str
) -> None:
    (directory / name).write_text(text)
    with pytest.raises(InvalidInputError, match=f"{directory / name}: "):
        load(make_config_json, directory)


def test_code_and_pickles_of_a_directory_do_not_run(
    make_config_json: MakeConfig, directory: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    (directory / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')")
    for name in ("pytorch_model.bin", "adapter_model.bin"):
        (directory / name).write_bytes(pickle.dumps(Touch(ran)))
    own = {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    for name in ("config.json", "generation_config.json"):
        change(
            directory / name,
            auto_map=own,
            trust_remote_code=True,
            custom_generate="modeling_own",
            attn_implementation="somebody/kernel",
            _attn_implementation="somebody/kernel",
            transformers_weights="pytorch_model.bin",
        )
    adapter = load(make_config_json, directory)
    assert not ran.exists() and adapter.config._attn_implementation == "sdpa"


def test_directory_with_an_adapter_is_refused(
    make_config_json: MakeConfig, directory: Path
) -> None:
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(InvalidInputError, match=rf"{directory}: .*adapter_config\.json"):
        load(make_config_json, directory)


@pytest.mark.parametrize(
    "values",
    [
        {"quantization_config": [1]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"num_labels": 10**9},
        {"num_labels": -1},
        {"id2label": [1]},
        {"num_attention_heads": 0},
        {"dtype": "somebody"},
    ],
    ids=str,
)
def test_configuration_that_no_model_has_is_refused(
    make_config_json: MakeConfig, directory: Path, values: dict[str, Any]
) -> None:
    change(directory / "config.json", **values)
    with pytest.raises(InvalidInputError, match=r"config\.json|model\.config"):
        load(make_config_json, directory)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{",
        b'[{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}]',
    ],
    ids=["empty", "huge header", "short header", "no header"],
)
def test_file_that_is_no_safetensors_file_is_refused(
    make_config_json: MakeConfig, directory: Path, content: bytes
) -> None:
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidInputError, match=f"{directory}: "):
        load(make_config_json, directory)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**62]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
    ],
    ids=str,
)
def test_header_that_lies_is_refused(
    make_config_json: MakeConfig, directory: Path, tensor: dict[str, Any]
) -> None:
    header = json.dumps({"model.norm.weight": tensor}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidInputError, match=f"{directory}: "):
        load(make_config_json, directory)


def test_tensor_of_another_shape_is_named(
    make_config_json: MakeConfig, model: PreTrainedModel, save: Callable[..., str]
) -> None:
    untyped: Any = model
    untyped.model.norm.weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(InvalidInputError, match=r"model\.norm\.weight .*\(1,\).*\(16,\)"):
        load(make_config_json, Path(save(model)))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_file_that_is_replaced_after_it_was_checked_is_not_used(
    make_adapter: Callable[..., ModelAdapter],
    make_config_json: MakeConfig,
    model: PreTrainedModel,
    save: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    is_sharded: bool,
) -> None:
    directory = Path(save(model, max_shard_size="8KB" if is_sharded else "1GB"))
    other = directory.with_name("other")
    initial_model(make_adapter("llama", "causal_lm"), None, seed=2).save_pretrained(other)
    load = type(model).from_pretrained

    def replace_and_load(*args: Any, **kwargs: Any) -> Any:
        for file in directory.glob("model*"):
            file.unlink()
        (other / "model.safetensors").rename(directory / "model.safetensors")
        (directory / "adapter_config.json").write_text("{}")
        return load(*args, **kwargs)

    adapter = adapter_for(
        "llama", "causal_lm", make_config_json("llama", "causal_lm", str(directory))
    )
    monkeypatch.setattr(type(model), "from_pretrained", replace_and_load)
    loaded = initial_model(adapter, str(directory), seed=1).state_dict()
    assert not list(directory.glob("*.index.json"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_file_that_is_larger_than_it_says_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.symlink_to("/proc/self/maps")
    assert path.stat().st_size == 0
    with pytest.raises(InvalidInputError, match=f"{path}: .* 100 bytes"):
        read_text(path, max_bytes=100)
