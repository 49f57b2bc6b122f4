"""Tables with names in TOML files, such as profiles and traces."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from collapipe.errors import InvalidInputError
from collapipe.mistakes import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Table = TypeVar("_Table")


class StrictModel(BaseModel):
    """A part of a file. It is immutable and refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def read_toml(file: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises `OSError`, or `ValueError` if the file is not TOML."""
    try:
        document: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("its values are nested too deeply: use at most 100 levels") from None
    return document


def find_table(kind: str, name: str, tables: Mapping[str, _Table]) -> _Table:
    """Returns the table with a name; raises `InvalidInputError`, which calls the tables `kind`."""
    if name not in tables:
        hint = did_you_mean(name, list(tables)).strip()
        raise InvalidInputError(
            f"there is no {kind} {name!r}: use one of {', '.join(tables)}{'; ' * bool(hint)}{hint}"
        )
    return tables[name]
