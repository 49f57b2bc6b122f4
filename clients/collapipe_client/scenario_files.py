"""Reads scenario files, whose key `base` names another file that they change."""

from pathlib import Path
from typing import Any

from collapipe.errors import InvalidInputError
from collapipe_client.job_files import read_toml

_REMEDY = "give a scenario file; clients/experiments/scenarios has examples"
_BASE = "give the name of a file in the same folder, without .toml"


def read_scenario_file(path: Path) -> dict[str, Any]:
    """Reads a scenario file with its bases. Without a `name`, a scenario has that of its file.

    `base = "NAME"` stands for NAME.toml in the same folder, which may have a base, too. Values of the file replace
    those of its base. Tables are merged key by key, and lists are replaced.

    Raises:
        InvalidInputError: A file cannot be read, is not TOML, or is a base of itself.
    """
    document = _with_bases(path, ())
    return {**document, "name": document.get("name", path.stem)}


def _with_bases(path: Path, users: tuple[Path, ...]) -> dict[str, Any]:
    """Merges a file with its bases. `users` are the files from the first one to the one that has it as base."""
    if path in users:
        chain = " -> ".join(user.stem for user in (*users, path))
        raise InvalidInputError(
            f"{users[0]}: {path.stem!r} is a base of itself ({chain}): remove one key base"
        )
    document = read_toml(path, f"{users[-1]} has it as base; {_BASE}" if users else _REMEDY)
    base = document.pop("base", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise InvalidInputError(f"{path}: base = {base!r}: {_BASE}")
    inherited = _with_bases(path.with_name(f"{base}.toml"), (*users, path))
    inherited.pop("name", None)
    return _merged(inherited, document)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merged(old, value)
        merged[key] = value
    return merged
