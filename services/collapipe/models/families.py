"""Which families there are."""

import importlib

from collapipe.errors import InvalidInputError
from collapipe.models.adapter import ModelAdapter

FAMILIES = {
    "bert": "BertAdapter",
    "distilbert": "DistilBertAdapter",
    "roberta": "RobertaAdapter",
    "marian": "MarianAdapter",
    "bart": "BartAdapter",
}
"""The adapter's class, by family; it is in the module of the family's name."""


def adapter_for(family: str, task: str, config_json: str) -> ModelAdapter:
    """Makes the adapter of a model.

    Args:
        family: A key of `FAMILIES`.
        task: "classification", "ner" or "translation".
        config_json: What `create_config_json` wrote.

    Raises:
        InvalidInputError: The family is not known, cannot do the task, or the configuration is not
            usable.
    """
    return adapter_class(family, task)(task, config_json)


def adapter_class(family: str, task: str) -> type[ModelAdapter]:
    """Finds the adapter of a family that can do a task; raises `InvalidInputError`."""
    if family not in FAMILIES:
        raise InvalidInputError(
            f"model.family is {family!r}, which is not known: use one of {', '.join(FAMILIES)}"
        )
    module = importlib.import_module(f"collapipe.models.{family}")
    found: type[ModelAdapter] = getattr(module, FAMILIES[family])
    if task not in found.model_classes:
        tasks = " or ".join(repr(name) for name in found.model_classes)
        remedy = "marian or bart" if task == "translation" else "bert, distilbert or roberta"
        raise InvalidInputError(
            f"model.family is {family!r}, which does {tasks}, but task.kind is {task!r}: "
            f"use {remedy}"
        )
    return found
