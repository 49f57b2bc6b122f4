"""Tests of the versions of the protocol."""

import pytest

from collapipe.protocol import why_not_understood
from collapipe.v1.enrollment_pb2 import ProtocolVersions

OURS = ProtocolVersions(oldest=2, newest=4)


@pytest.mark.parametrize("theirs", [(1, 2), (2, 4), (3, 3), (4, 9)])
def test_processes_with_a_version_in_common_fit(theirs: tuple[int, int]) -> None:
    versions = ProtocolVersions(oldest=theirs[0], newest=theirs[1])
    assert why_not_understood("pi", versions, "the scheduler", OURS) == ""


@pytest.mark.parametrize(
    ("theirs", "older"), [((0, 0), "pi"), ((0, 1), "pi"), ((5, 9), "the scheduler")]
)
def test_older_one_of_two_processes_that_do_not_fit_is_to_be_updated(
    theirs: tuple[int, int], older: str
) -> None:
    versions = ProtocolVersions(oldest=theirs[0], newest=theirs[1])
    why = why_not_understood("pi", versions, "the scheduler", OURS)
    assert why.endswith(f"on the machine of {older}")
    assert "versions 2 to 4" in why and f"{theirs[1]}" in why
