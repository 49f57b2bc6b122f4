import pytest

from collapipe.rpc import is_address_here


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("127.0.0.1", True),
        ("192.0.2.1", False),  # of a network that exists in documents only
        ("pi-1.local", None),
        ("", None),
    ],
)
def test_machine_knows_which_addresses_are_its_own(address: str, is_here: bool | None) -> None:
    assert is_address_here(address) is is_here
