"""The result of one check."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: What was checked.
        result: "ok", "warn" (works, but with a limit) or "fail" (will not work).
        found: The facts, in words.
        remedy: What to do, as a command where possible; empty if the result is "ok".
    """

    name: str
    result: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""

    @classmethod
    def ok(cls, name: str, found: str) -> "Check":
        """A check that found no problem."""
        return cls(name, "ok", found)

    @classmethod
    def warn(cls, name: str, found: str, remedy: str) -> "Check":
        """A check that found a limit."""
        return cls(name, "warn", found, remedy)

    @classmethod
    def fail(cls, name: str, found: str, remedy: str) -> "Check":
        """A check that found a fault."""
        return cls(name, "fail", found, remedy)
