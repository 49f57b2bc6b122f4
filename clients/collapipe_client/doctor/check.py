"""The results of checks."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: What was checked.
        result: "ok", "warn" (works with a limitation) or "fail" (does not work).
        found: The facts, in words.
        remedy: Advice to the user, as a command where possible; empty if the result is "ok".
    """

    name: str
    result: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""

    @classmethod
    def ok(cls, name: str, found: str) -> "Check":
        """Makes a result without a problem."""
        return cls(name, "ok", found)

    @classmethod
    def warn(cls, name: str, found: str, remedy: str) -> "Check":
        """Makes a result with a limitation."""
        return cls(name, "warn", found, remedy)

    @classmethod
    def fail(cls, name: str, found: str, remedy: str) -> "Check":
        """Makes a result with a fault."""
        return cls(name, "fail", found, remedy)
