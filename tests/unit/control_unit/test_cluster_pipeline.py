"""How a pipeline tells what its stages wait for."""

import pytest

from collapipe.control_unit.cluster_pipeline import hosts_do


@pytest.mark.parametrize(
    ("hosts", "words"),
    [("a", "a waits"), ("ab", "a and b wait"), ("abc", "a, b and c wait")],
)
def test_hosts_are_named_with_the_right_verb(hosts: str, words: str) -> None:
    assert hosts_do(list(hosts), "wait") == words
