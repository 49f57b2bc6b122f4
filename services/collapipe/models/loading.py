"""Weights of pretrained directories, read through `transformers`, quietly and without a network."""

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
    """Loads a model and returns its tensors by name, tied ones under each of their names.

    Args:
        model_class: What to load.
        directory: A directory that `pretrained_directory` approved.
        config: The configuration to load with.
        may_lack: Tensors whose names start so may be missing; they are left out.

    Raises:
        InvalidInputError: The weights do not fit the configuration.
    """
    load: Any = model_class.from_pretrained
    with _quiet(), torch.random.fork_rng(devices=[]):
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
    unexcused = sorted(
        name for name in missing if may_lack is None or not name.startswith(may_lack)
    )
    if unexcused:
        raise InvalidInputError(
            f"{directory}: {len(unexcused)} tensors are missing from the weights, for example "
            f"{unexcused[0]!r}; remove the entries of model.config that add layers, or use a "
            "complete export"
        )
    return {name: tensor for name, tensor in model.state_dict().items() if name not in missing}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences reports on tensors that are not used; those that are missing are checked above."""
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
