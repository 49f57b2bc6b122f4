"""Named deployments: each context has the address of a scheduler and the certificate with which to call it.

They are in `collapipe/contexts.json` in the user's folder of configurations, without the key itself.
"""

import os
import shlex
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from collapipe.documents import read_document, write_document
from collapipe.errors import CorruptDataError, NotFoundError, WrongStateError
from collapipe.mistakes import did_you_mean, first_mistake


@dataclass(frozen=True)
class Context:
    """How to call the scheduler of a deployment. The paths are absolute."""

    scheduler: str
    insecure: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def missing_file(self) -> Path | None:
        """Returns a file that no longer exists; `None` if all do."""
        files = (self.tls_ca, self.tls_cert, self.tls_key)
        return next((file for file in files if file and not file.exists()), None)


@dataclass
class Contexts:
    """All contexts of a user.

    Args:
        used: Name of the context that commands use by default; "" for the local testbed.
    """

    used: str = ""
    by_name: dict[str, Context] = Field(default_factory=dict)

    def find(self, name: str) -> Context:
        """Returns a context; raises `NotFoundError` if there is no such context."""
        if name not in self.by_name:
            known = sorted(self.by_name)
            hint = did_you_mean(name, known)
            choice = f"choose one of {', '.join(known)}, or " if known else ""
            raise NotFoundError(
                f"there is no context {name!r}: {hint}{choice}make it with `collapipe context add {shlex.quote(name)}`"
            )
        return self.by_name[name]


_CONTEXTS = TypeAdapter(Contexts)


def contexts_file() -> Path:
    """Returns the path of the file with the contexts of this user."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "collapipe" / "contexts.json"


def read_contexts() -> Contexts:
    """Reads the contexts; raises `CorruptDataError` if the file is damaged, or cannot be read."""
    file = contexts_file()
    try:
        return _CONTEXTS.validate_python(
            read_document(file, "delete it, and add your contexts again, or join again") or {}
        )
    except (ValidationError, OSError) as error:
        reason = first_mistake(error) if isinstance(error, ValidationError) else error.strerror
        raise CorruptDataError(
            f"the contexts in {file} cannot be read ({reason}): mend the file, or delete it and add your contexts again"
        ) from error


def contexts_document(contexts: Contexts) -> dict[str, Any]:
    """Returns the contexts as a JSON object."""
    document: dict[str, Any] = _CONTEXTS.dump_python(contexts, mode="json")
    return document


def write_contexts(contexts: Contexts) -> None:
    """Replaces the contexts of this user; raises `WrongStateError` if their folder cannot be written."""
    file = contexts_file()
    if not file.is_absolute():  # A user without a home folder has no contexts.
        raise WrongStateError(
            f"{file} is no place for contexts: set HOME, or XDG_CONFIG_HOME to the path of a folder from / on"
        )
    try:
        write_document(file, contexts_document(contexts))
    except OSError as error:
        raise WrongStateError(
            f"{file} cannot be written ({error.strerror}): make its folder writable, or set XDG_CONFIG_HOME to another one"
        ) from error
