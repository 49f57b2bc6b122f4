"""Says what is wrong in a document that a person has written, and what may have been meant."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

MOST_NAMED = 8
"""Most names that a message lists."""
_MOST_QUOTED = 200
"""Most characters of a value, a key or a name that a message quotes."""

_ELSEWHERE = {
    "batch_size": "mini_batch",
    "dataset": "train",
    "epochs": "rounds",
    "eval_steps": "evaluate_every",
    "lora_r": "r",
    "lr": "learning_rate",
    "lr_scheduler_type": "decay",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "max_steps": "rounds",
    "model_name_or_path": "pretrained",
    "num_epochs": "rounds",
    "num_train_epochs": "rounds",
    "per_device_train_batch_size": "mini_batch",
    "rank": "r",
    "steps": "local_steps",
    "validation": "held_out",
    "test": "held_out",
    "validation_file": "held_out",
    "train_file": "train",
    "warmup": "warm_up_steps",
    "warmup_steps": "warm_up_steps",
}
"""Names of other projects for the last part of a key, and the one here."""


def explain_mistakes(error: ValidationError, origin: str, schema: type[BaseModel]) -> str:
    """Describes the first mistakes, each in one line. For an unknown key, the line suggests the most similar key.

    Args:
        origin: Name of the document.
    """
    lines = []
    for mistake in error.errors()[:MOST_NAMED]:
        where = ".".join(f"{part:.{_MOST_QUOTED}}" for part in map(str, mistake["loc"]))
        if mistake["type"] == "extra_forbidden":
            known = _known_keys(schema, mistake["loc"][:-1])
            hint = suggest_key(str(mistake["loc"][-1]), sorted(known))
            lines.append(f"{origin}: unknown key {where!r}; {hint}")
        elif mistake["type"] == "missing":
            lines.append(f"{origin}: {where!r} is missing")
        elif mistake["type"] == "value_error":
            lines.append(f"{origin}: {mistake['msg'].removeprefix('Value error, ')}")
        else:
            near = ""
            if mistake["type"] == "literal_error":
                choices = re.findall(r"'([^']*)'", mistake["ctx"]["expected"])
                near = did_you_mean(str(mistake["input"]), choices)
            value = f"{mistake['input']!r:.{_MOST_QUOTED}}"
            lines.append(f"{origin}: {where} = {value}: {near}{mistake['msg']}")
    if (more := error.error_count() - MOST_NAMED) > 0:
        lines.append(f"{origin}: {more} more mistakes")
    return "\n".join(lines)


def first_mistake(error: ValidationError) -> str:
    """Describes the first mistake in one line, for a document that no person has written."""
    mistake = error.errors()[0]
    where = ".".join(str(part) for part in mistake["loc"])
    return f"{where}: {mistake['msg']}" if where else str(mistake["msg"])


def suggest_key(key: str, known: Sequence[str]) -> str:
    """Suggests the known key that is most similar to an unknown one, or lists all."""
    last = key.rpartition(".")[2]
    meant = (key, _ELSEWHERE.get(last, last))
    same_end = [each for each in known if each.rpartition(".")[2] in meant]
    near = did_you_mean(key, known, *same_end[:1])
    return near.strip() or f"known keys: {', '.join(known)}"


def did_you_mean(text: str, known: Sequence[str], *first: str) -> str:
    """Returns "did you mean 'x'? " with `first`, or with the known text that is most similar; else ""."""
    near = [*first, *difflib.get_close_matches(text, known, n=1)]
    return f"did you mean {near[0]!r}? " if near else ""


def say_some(names: Sequence[str]) -> str:
    """Writes a list of names. Long names and a long list are cut."""
    named = [
        name if len(name) <= _MOST_QUOTED else f"{name[:_MOST_QUOTED]}..."
        for name in names[:MOST_NAMED]
    ]
    return ", ".join(named) + (", ..." if len(names) > MOST_NAMED else "")


def _known_keys(schema: type[BaseModel], location: Iterable[int | str]) -> set[str]:
    """Returns the keys of the section at a location. List indices and names of union members are skipped."""
    sections = [schema]
    for part in location:
        fields = [
            section.model_fields[str(part)] for section in sections if part in section.model_fields
        ]
        if fields:
            sections = [section for field in fields for section in _sections_in(field.annotation)]
    return {key for section in sections for key in section.model_fields}


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections_in(part)]
