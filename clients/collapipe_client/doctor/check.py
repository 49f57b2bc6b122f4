"""What an examination says of one thing."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """One finding.

    Args:
        name: What was looked at.
        result: ok; warn: works, with a limit; fail: will not work.
        found: What is there.
        remedy: What to do, a command where one does it; empty when ok.
    """

    name: str
    result: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""
