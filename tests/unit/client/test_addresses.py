"""Tests of the addresses that people write."""

import pytest

from collapipe.errors import InvalidInputError
from collapipe_client.addresses import read_address


@pytest.mark.parametrize(
    ("text", "read"),
    [("pi.lan:7100", ("pi.lan", 7100)), ("[fd77::11]:7100", ("fd77::11", 7100))],
)
def test_address_is_a_host_and_a_port(text: str, read: tuple[str, int]) -> None:
    assert read_address("--scheduler", text) == read


@pytest.mark.parametrize(
    "text", ["fd77::11:7100", "pi.lan", "pi.lan:0", "pi.lan:65536", "[fd77::11:7100", "a b:1"]
)
def test_other_text_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--scheduler .*HOST:PORT"):
        read_address("--scheduler", text)
