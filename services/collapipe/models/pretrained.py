"""Makes the first model of a job, with random weights or those of a pretrained directory."""

import copy
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collapipe.documents import open_regular
from collapipe.errors import InvalidInputError, NotFoundError
from collapipe.pretrained_directories import (
    opened_weights,
    path_of_opened,
    pretrained_directory,
    sharded_weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from collapipe.models.adapter import ModelAdapter

# The loading threads of `transformers` would not be in the context of `TensorsOnDisk`.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

MAKING_MODELS = threading.RLock()
"""Whoever makes a model on the meta device, or loads one, holds this lock, and takes it before `COMPUTE_LOCK`. For a moment, `from_pretrained`
changes two things for the whole process: torch's default type, and whether new models tie their weights. So code that runs without
this lock names the type of each floating-point tensor that it makes."""
DRAWING_WEIGHTS = threading.RLock()
"""Whoever draws the weights of a model, or loads a model, holds this lock, and takes it before `MAKING_MODELS`. For that time, `transformers`
replaces the functions of `torch.nn.init` for the whole process. Models on the meta device have no weights, so they may be made meanwhile, under
`MAKING_MODELS` alone. Drawing weights may take minutes."""


class _OwnRandomNumbers(TorchDispatchMode):
    """A context whose thread draws from a generator of its own, for tensors on the CPU.

    Torch's random state belongs to the process, so other threads may change it at any moment.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            if all(argument.name != "generator" for argument in func._schema.arguments):
                func = func.overloadpacket.generator
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


def initial_model(adapter: "ModelAdapter", pretrained: str | None, seed: int) -> "PreTrainedModel":
    """Makes the first model of a job, equal for equal seeds. It neither reads nor changes torch's random state.

    Args:
        pretrained: A name for `pretrained_directory`, or `None` for random weights. Weights that the
            directory lacks, such as those of a labelling layer, are random.
        seed: Seeds the weights of the model, and separately those of LoRA.

    Raises:
        InvalidInputError: The pretrained weights cannot be used.
    """
    with _OwnRandomNumbers(seed):
        model = adapter.build_model()
    if pretrained is not None:
        _load_into(model, adapter, pretrained)
    with DRAWING_WEIGHTS, _OwnRandomNumbers(seed):  # LoRA has torch's default type.
        adapter.add_lora(model)
    return model


def _load_into(model: "PreTrainedModel", adapter: "ModelAdapter", pretrained: str) -> None:
    directory = pretrained_directory(pretrained)
    own = model.state_dict()
    read = adapter.read_pretrained(directory, own)
    weights = {name: tensor for name, tensor in read.items() if name in own}
    for name, tensor in weights.items():
        # Both are NaN if a value is. Unlike a tensor of flags, they take no memory.
        if not torch.stack(tensor.aminmax()).isfinite().all():
            raise InvalidInputError(
                f"{directory}: {name} has a value that is not finite (NaN or infinity): copy the directory again, or use "
                "another model"
            )
    model.load_state_dict(weights, strict=False)
    for name, tensor in weights.items():
        if not torch.equal(own[name], tensor):
            raise InvalidInputError(
                f"{directory}: {name} differs from the tensor that it is tied to here; use a model "
                "whose decoder embedding and output layer are equal"
            )


def load_pretrained(
    model_class: type["PreTrainedModel"],
    directory: Path,
    config: "PreTrainedConfig",
    dtype: torch.dtype,
    may_lack: str | None = None,
) -> dict[str, Tensor]:
    """Loads a model and returns its tensors by name, tied tensors under each of their names.

    Args:
        may_lack: Prefix of the names of tensors that the directory may lack. Such tensors are left out.

    Raises:
        InvalidInputError: The weights do not fit the configuration.
    """
    load: Any = model_class.from_pretrained
    # It draws weights that are missing, but these are left out below. So any seed does.
    with DRAWING_WEIGHTS, MAKING_MODELS, _no_output(), _OwnRandomNumbers(seed=0):
        try:
            with opened_weights(directory) as opened:
                model, report = load(
                    opened,
                    config=copy.deepcopy(config),
                    dtype=dtype,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )
        except (OSError, SafetensorError) as error:
            raise InvalidInputError(
                f"{directory}: the weights cannot be read: {error}; a file is missing or damaged, so copy the directory "
                "again"
            ) from error
        except (RuntimeError, ValueError) as error:
            raise InvalidInputError(
                f"{directory}: the weights do not fit the configuration: {error}; remove the "
                "entries of model.config that change shapes"
            ) from error
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise InvalidInputError(
            f"{directory}: {name} has the shape {tuple(found)}, but its configuration gives {tuple(expected)}: remove the "
            "entries of model.config that change shapes, or copy the directory again"
        )
    missing = set(report["missing_keys"])
    needed = sorted(name for name in missing if may_lack is None or not name.startswith(may_lack))
    if needed:
        raise InvalidInputError(
            f"{directory}: {len(needed)} tensors are missing from the weights, for example "
            f"{needed[0]!r}; remove the entries of model.config that add layers, or use a "
            "complete export"
        )
    return {name: tensor for name, tensor in model.state_dict().items() if name not in missing}


def read_frozen(adapter: "ModelAdapter", unit_index: int, directory: Path) -> dict[str, Tensor]:
    """Reads the frozen tensors of one unit, and no others, by their names in a model without LoRA.

    They are right only if their digest is: a directory may have weights under other names, or lack random ones.

    Raises:
        NotFoundError: The directory lacks a tensor, or cannot be read.
    """
    model: Any = adapter.meta_model
    paths = {id(module): name for name, module in model.named_modules()}
    output = f"{paths.get(id(model.get_output_embeddings()))}.weight"
    tied = f"{paths[id(model.get_input_embeddings())]}.weight"
    prefix = f"{model.base_model_prefix}."
    try:
        shards = _shards(directory)
        tensors = {}
        for name in adapter.frozen_names(unit_index):
            # A model without its head is stored without the prefix, and a tied output layer is not stored.
            names = [name, tied] if name == output else [name]
            names += [each.removeprefix(prefix) for each in names]
            found = next((each for each in names if each in shards), None)
            if found is None:
                raise NotFoundError(
                    f"{directory} has no tensor {name!r}: check that it holds the whole model"
                )
            with _safe_open(shards[found]) as file:
                tensor = file.get_tensor(found)
            tensors[name] = tensor.to(adapter.base_dtype) if tensor.is_floating_point() else tensor
    except (OSError, InvalidInputError, SafetensorError) as error:
        raise NotFoundError(
            f"{directory} cannot be read: {error}; check the path and its permissions, or copy the directory again"
        ) from error
    return tensors


def _shards(directory: Path) -> dict[str, Path]:
    """Returns the file of each tensor of a pretrained directory."""
    shards = sharded_weights(directory)
    if shards is not None:
        return shards
    single = directory / "model.safetensors"
    with _safe_open(single) as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def _safe_open(path: Path) -> Iterator[Any]:
    with open_regular(path) as file, safe_open(path_of_opened(file), "pt") as weights:
        yield weights


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
