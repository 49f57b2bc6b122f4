import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.certificates import Identity, Role
from collapipe.certificates.identity import is_host_name, read_host
from collapipe.errors import InvalidInputError


@pytest.mark.parametrize("name", ["device-0-1", "pi", "pi-3.lan", "3rd", "a" * 63])
def test_host_id_that_is_a_dns_name_is_accepted(name: str) -> None:
    assert Identity.parse(f"device-agent:{name}") == Identity(Role.DEVICE_AGENT, name)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/b", "/etc", "a\\b", "a\0", "a\n", "pi\n", "a b", "a..b"),
        *("-a", "a-", "Pi", "a_b", "ä", "²", "a" * 64, "*.lan", "localhost", "10.0.0.1", "127.1"),
        *("scheduler.role.collapipe.internal", "role.collapipe.internal", "collapipe.internal"),
        *("::1", "a:b", "$(id)", "%2e%2e"),
    ],
)
def test_host_id_that_is_no_dns_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError):
        Identity.parse(f"device-agent:{name}")
    assert Identity.from_uris([f"spiffe://collapipe/device-agent/{name}"]) is None


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("device-agent:pi-3", "device-agent/pi-3/cluster/0"),
        ("device-agent:pi-3@12", "device-agent/pi-3/cluster/12"),
        ("control-unit:cu@1000000", "control-unit/cu/cluster/1000000"),
        ("scheduler:hub", "scheduler/hub"),
        ("client:me@0", "client/me"),
    ],
)
def test_certificate_names_the_cluster_of_control_units_and_devices(text: str, uri: str) -> None:
    identity = Identity.parse(text)
    assert identity.uri == f"spiffe://collapipe/{uri}"
    assert Identity.from_uris([identity.uri]) == identity
    assert Identity.parse(str(identity)) == identity


@pytest.mark.parametrize(
    "text",
    [
        *("device-agent:pi@", "device-agent:pi@one", "device-agent:pi@-1", "device-agent:pi@1@2"),
        *("device-agent:pi@1000001", "device-agent:pi@1.0", "device-agent:pi@²", "client:me@1"),
    ],
)
def test_invalid_cluster_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="cluster"):
        Identity.parse(text)


@pytest.mark.parametrize(
    "holder",
    [
        *("device-agent/pi", "device-agent/pi/", "device-agent/pi/cluster/", "client/me/cluster/0"),
        *(f"device-agent/pi/cluster/{cluster}" for cluster in ("01", "1/", "+1", "²", "9999999")),
    ],
)
def test_other_spelling_of_an_identity_is_none(holder: str) -> None:
    assert Identity.from_uris([f"spiffe://collapipe/{holder}"]) is None


@pytest.mark.parametrize("text", ["pi", "root:pi", "authority:ca", "Client:me", ":pi", "client:"])
def test_role_that_operators_cannot_use_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        Identity.parse(text)


@given(st.lists(st.sampled_from("aZ9-._/\\:é²\0\n "), max_size=20).map("".join))
def test_any_host_name_is_one_plain_path_component(text: str) -> None:
    if is_host_name(text):
        assert text not in ("", ".", "..")
        assert all(character.isalnum() or character in "-." for character in text)


@pytest.mark.parametrize(
    ("text", "host"),
    [("192.168.1.7", "192.168.1.7"), ("[FD00::1]", "fd00::1"), ("Pi-3.LAN.", "pi-3.lan")],
)
def test_host_is_returned_in_the_form_of_certificates(text: str, host: str) -> None:
    assert read_host(text) == host


@pytest.mark.parametrize(
    "text", ["", "pi:7100", "fe80::1%eth0", "10.0.0.0/8", "scheduler.role.collapipe.internal"]
)
def test_invalid_host_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="DNS name"):
        read_host(text)
