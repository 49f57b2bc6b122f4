"""What a person should know about the data or the pretrained weights of a job."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

MOST_LINES = 10
"""Most findings that a person gets before a training starts."""


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do."""

    severity: Literal["warning", "note"]
    """A warning says that the result may be wrong. A note says how something was read or is used."""
    place: str
    """What it is about: a file, a line of a file, a directory, a setting, or a part of the job such as "held-out data"."""
    what: str
    remedy: str = ""

    @property
    def is_warning(self) -> bool:
        return self.severity == "warning"

    @property
    def text(self) -> str:
        """The finding in words, without its severity."""
        return f"{self.place}: {self.what}{f': {self.remedy}' if self.remedy else ''}"

    def __str__(self) -> str:
        return f"warning: {self.text}" if self.is_warning else self.text


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Returns each finding once, warnings first."""
    return sorted(dict.fromkeys(findings), key=lambda finding: not finding.is_warning)


def shortened(
    findings: Sequence[Finding],
    all_of_them: str = "`collapipe train --dry-run` without --strict prints all",
) -> list[Finding]:
    """Returns at most `MOST_LINES` findings. The last one says how many are left out, and what prints `all_of_them`."""
    if len(findings) <= MOST_LINES:
        return list(findings)
    left = len(findings) - MOST_LINES + 1
    rest = f"{left} more findings: {all_of_them}"
    return [*findings[: MOST_LINES - 1], Finding("note", "data", rest)]
