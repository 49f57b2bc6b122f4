"""Adds LoRA to a model with the library `peft`, and takes it out again: Hu et al. 2021, arXiv 2106.09685.

The weights of the model are frozen. They travel under the names that they have without LoRA, so that jobs with different
settings share them. Only factors that a job does not train have names of their own.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from collapipe.errors import InvalidInputError
from collapipe.job import LANGUAGE_TASKS, LoraConfig

if TYPE_CHECKING:
    from peft.tuners.lora import LoraModel
    from transformers import PreTrainedModel

_TASK_TYPES = {
    "classification": "SEQ_CLS",
    "ner": "TOKEN_CLS",
    "translation": "SEQ_2_SEQ_LM",
    **dict.fromkeys(LANGUAGE_TASKS, "CAUSAL_LM"),
}
"""The kinds of tasks, as `peft` calls them."""

ALL_LINEAR = "all-linear"
"""The value of `target_modules` that stands for all linear layers of the blocks."""
_NAME = "default"
"""The name of the adapter, which `peft` puts into the names of its parameters."""


def add_lora(
    model: "PreTrainedModel", settings: LoraConfig, always_trained: Sequence[str]
) -> "LoraModel":
    """Adds LoRA to a model in place, and freezes its other weights. One factor is random, and the other one is zero.

    Args:
        always_trained: Ends of the names of modules that are trained as a whole if the model has them.

    Raises:
        InvalidInputError: The settings do not fit the model.
    """
    pattern = settings.target_modules
    if isinstance(pattern, str) and pattern != ALL_LINEAR:  # A job of an earlier version stores it.
        settings = settings.model_copy(update={"target_modules": matching_modules(model, pattern)})
    # The import is slow, and only jobs with LoRA need it.
    from peft import LoraConfig as PeftConfig
    from peft.tuners.lora import LoraModel

    names = [name for name, _ in model.named_modules()]
    for ending in settings.modules_to_save:
        if not any(name.endswith(ending) for name in names):
            raise InvalidInputError(
                f"model.lora.modules_to_save has {ending!r}, but no module of the {model.config.model_type} model ends "
                f"so; {_some(names)}"
            )
    always = {name.rpartition(".")[2] for name in names if name.endswith(tuple(always_trained))}
    modules_to_save = sorted({*settings.modules_to_save, *always})
    if modules_to_save and model.dtype != torch.float32:
        raise InvalidInputError(
            f"model.base_dtype is {str(model.dtype).removeprefix('torch.')}, but {', '.join(modules_to_save)} of the "
            f"{model.config.model_type} model would be trained as a whole, which needs fp32: use float32, or leave them "
            "out of model.lora.modules_to_save; the families for classification and ner always train such modules"
        )
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    config = PeftConfig(
        **settings.model_dump(exclude={"averaging", "modules_to_save"}),
        modules_to_save=modules_to_save or None,
    )
    try:
        tuner = LoraModel(model, config, _NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise InvalidInputError(
            f"model.lora does not fit the {model.config.model_type} model: {error}; {_some(names)}"
        ) from error
    # What is trained is fp32 whatever the base is, as in `get_peft_model`.
    tuner._cast_adapter_dtype(_NAME)
    for name, layer in _changed_modules(model):
        if any(owners[id(parameter)] > 1 for parameter in layer.parameters()):
            raise InvalidInputError(
                f"model.lora changes {name}, but another layer of the {model.config.model_type} model has the same "
                "weights: leave it out of target_modules and modules_to_save"
            )
    if settings.averaging == "product":
        for name, parameter in model.named_parameters():
            # The factor that is random at the beginning: A, but B for an embedding.
            if ".lora_A." in name or ".lora_embedding_B." in name:
                parameter.requires_grad_(False)
    return tuner


def matching_modules(model: nn.Module, pattern: str) -> list[str]:
    """Returns the names of the modules of a model that a regular expression matches as a whole.

    `re2` needs a time that is linear in the length of a name, whatever the pattern is. Python's `re`, which `peft` would use, may need
    years, and lets no other thread run meanwhile.

    Raises:
        InvalidInputError: `re2` cannot read the pattern, or no module matches.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    names = [name for name, _ in model.named_modules() if name]
    try:
        matches = re2.compile(pattern, options).fullmatch
    except re2.error as error:
        reason = error.args[0]
        raise InvalidInputError(
            f"model.lora.target_modules is {pattern!r}, which RE2 cannot read: "
            f"{reason.decode(errors='replace') if isinstance(reason, bytes) else reason}; use a pattern without references and "
            "without conditions on what follows, or list the names"
        ) from error
    found = [name for name in names if matches(name)]
    if not found:
        raise InvalidInputError(
            f"model.lora.target_modules is {pattern!r}, which matches the whole name of no module, such as {names[-1]!r}; "
            f"{_some(names)}"
        )
    return found


def changes_embeddings(model: "PreTrainedModel") -> bool:
    """Returns whether LoRA changes an embedding or the output layer.

    Pretrained models may tie these two, but here they are on different hosts, and are not tied.
    """
    untyped: Any = model
    output = untyped.get_output_embeddings()
    own = {id(output), *(id(child) for child in (output.children() if output else ()))}
    replaced = [module for _, module in _changed_modules(model)]
    return any(isinstance(module, nn.Embedding) or id(module) in own for module in replaced)


def _changed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the names of the modules that LoRA has replaced in a model, and what was there before."""
    for name, module in model.named_modules():
        for kept in ("base_layer", "original_module"):
            if kept in module._modules:
                yield name, module.get_submodule(kept)


def frozen_names(unit: nn.Module) -> dict[str, str]:
    """Returns the names of the frozen tensors of a unit's state. The keys are their names in a model without LoRA.

    A unit without LoRA and without frozen embeddings has none.
    """
    trained = {name for name, parameter in unit.named_parameters() if parameter.requires_grad}
    if len(trained) == len(list(unit.parameters())):
        return {}
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): name
        for name in unit.state_dict()
        if name not in trained
    }


def is_of_lora(name: str) -> bool:
    """Returns whether a tensor of this name belongs to an adapter, whether it is trained or not."""
    return ".lora_" in name or ".modules_to_save." in name


def save_adapter(
    tuner: "LoraModel", tensors: Mapping[str, Tensor], directory: Path, base: str, task: str
) -> None:
    """Writes an adapter as `PeftModel.save_pretrained` does.

    Args:
        tuner: It says which tensors the adapter has. Its model may be on the meta device.
        tensors: The trained tensors and the frozen factors of LoRA.
        base: The directory of the model that the adapter changes.
        task: The kind of the job's task.
    """
    from peft.utils import get_peft_model_state_dict

    adapter = get_peft_model_state_dict(
        tuner.model, dict(tensors), _NAME, save_embedding_layers=False
    )
    config = tuner.peft_config[_NAME]
    config.inference_mode = True
    config.base_model_name_or_path = base
    config.task_type = _TASK_TYPES[task]
    config.save_pretrained(str(directory))
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in adapter.items()},
        directory / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def _some(names: Sequence[str]) -> str:
    """Names the kinds of modules, for an error message."""
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return "its modules are called " + ", ".join(
        name for name in leaves if name and not name.isdigit()
    )
