"""Finds the adapter of a model family."""

import importlib

from collapipe.errors import InvalidInputError
from collapipe.models.adapter import ModelAdapter

FAMILIES = {
    "bert": "BertAdapter",
    "distilbert": "DistilBertAdapter",
    "roberta": "RobertaAdapter",
    "marian": "MarianAdapter",
    "bart": "BartAdapter",
    "gpt2": "Gpt2Adapter",
    "llama": "LlamaAdapter",
    "mistral": "MistralAdapter",
    "qwen2": "Qwen2Adapter",
    "qwen3": "Qwen3Adapter",
}
"""The class of the adapter, by family. Its module has the name of the family."""


def adapter_for(family: str, task: str, config_json: str) -> ModelAdapter:
    """Makes the adapter of a model from what `create_config_json` returned.

    Raises:
        InvalidInputError: The family is not known, cannot do the task, or the configuration is not usable.
    """
    return adapter_class_for(family, task)(task, config_json)


def adapter_class_for(family: str, task: str) -> type[ModelAdapter]:
    """Finds the adapter of a family that can do a task; raises `InvalidInputError`."""
    found = adapter_class(family)
    if task not in found.model_classes:
        tasks = " or ".join(repr(name) for name in found.model_classes)
        able = [name for name in FAMILIES if task in adapter_class(name).model_classes]
        raise InvalidInputError(
            f"model.family is {family!r}, which does {tasks}, but task.kind is {task!r}: "
            f"use one of {', '.join(able)}"
        )
    return found


def adapter_class(family: str) -> type[ModelAdapter]:
    """Finds the adapter of a family; raises `InvalidInputError`.

    Imports the modelling code of that family only, because such imports are slow.
    """
    if family not in FAMILIES:
        raise InvalidInputError(
            f"model.family {family!r} is not known: use one of {', '.join(FAMILIES)}"
        )
    module = importlib.import_module(f"collapipe.models.{family}")
    adapter: type[ModelAdapter] = getattr(module, FAMILIES[family])
    return adapter
