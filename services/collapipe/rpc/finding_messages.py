"""Findings as messages between services."""

from collapipe.finding import Finding
from collapipe.printable import printable
from collapipe.rpc.told_values import MOST_CHARACTERS
from collapipe.v1 import job_pb2


def to_message(finding: Finding) -> job_pb2.Finding:
    """Returns the message of a finding."""
    return job_pb2.Finding(
        is_warning=finding.is_warning,
        place=finding.place,
        what=finding.what,
        remedy=finding.remedy,
    )


def from_message(message: job_pb2.Finding) -> Finding:
    """Returns the finding of a message, whose texts are made harmless."""
    return Finding(
        "warning" if message.is_warning else "note",
        harmless(message.place),
        harmless(message.what),
        harmless(message.remedy),
    )


def harmless(text: str) -> str:
    """Cuts a text of another host, and escapes what a terminal would obey, such as line breaks and control sequences."""
    return printable(text[:MOST_CHARACTERS])
