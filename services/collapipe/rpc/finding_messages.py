"""Findings as messages between services."""

from collapipe.finding import Finding
from collapipe.v1 import job_pb2

MOST_CHARACTERS = 1000
"""Length of each part of a finding that another host sent. The rest is cut."""


def to_message(finding: Finding) -> job_pb2.Finding:
    """Returns the message of a finding."""
    return job_pb2.Finding(
        is_warning=finding.is_warning,
        place=finding.place,
        what=finding.what,
        remedy=finding.remedy,
    )


def from_message(message: job_pb2.Finding) -> Finding:
    """Returns the finding of a message. Long parts are cut."""
    return Finding(
        "warning" if message.is_warning else "note",
        message.place[:MOST_CHARACTERS],
        message.what[:MOST_CHARACTERS],
        message.remedy[:MOST_CHARACTERS],
    )
