"""Reads the weights of a pretrained directory through `transformers`, offline and without its reports."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from collapipe.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_pretrained(
    model_class: type["PreTrainedModel"],
    directory: Path,
    config: "PreTrainedConfig",
    may_lack: str | None = None,
) -> dict[str, Tensor]:
    """Loads a model and returns its tensors by name, tied tensors under each of their names.

    Args:
        directory: A directory that `pretrained_directory` returned.
        may_lack: Prefix of the names of tensors that the directory may lack. Such tensors are left out.

    Raises:
        InvalidInputError: The weights do not fit the configuration.
    """
    load: Any = model_class.from_pretrained
    with _no_output(), torch.random.fork_rng(devices=[]):
        try:
            model, report = load(
                directory,
                config=copy.deepcopy(config),
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidInputError(
                f"{directory}: the weights do not fit the configuration: {error}; remove the "
                "entries of model.config that change shapes"
            ) from error
    missing = set(report["missing_keys"])
    needed = sorted(name for name in missing if may_lack is None or not name.startswith(may_lack))
    if needed:
        raise InvalidInputError(
            f"{directory}: {len(needed)} tensors are missing from the weights, for example "
            f"{needed[0]!r}; remove the entries of model.config that add layers, or use a "
            "complete export"
        )
    return {name: tensor for name, tensor in model.state_dict().items() if name not in missing}


@contextmanager
def _no_output() -> Iterator[None]:
    """Silences reports on missing and unused tensors, because `load_pretrained` checks them itself."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
