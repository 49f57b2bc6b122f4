import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from collapipe.certificates import Identity, Role
from collapipe.errors import CollapipeError, InvalidInputError, PeerLostError, WrongStateError
from collapipe.rpc import Security, call

from .authorities import Authority, Unchecked
from .serving import ECHO, PLAIN, SECONDS, Served, secured, serving


def ask(served: Served) -> bytes:
    answer: bytes = call(served.method(), b"hello", "the server", SECONDS)
    return answer


def refuse(of_server: Security, of_client: Security, reason: str, **options: Any) -> None:
    """Makes a call that finds no connection, for a reason that its error names."""
    with (
        serving(ECHO, of_server, of_client, **options) as served,
        pytest.raises(PeerLostError, match=f"the server .*{reason}"),
    ):
        ask(served)


@pytest.fixture
def server(authority: Authority) -> Security:
    return authority.security("scheduler:server")


@pytest.fixture
def client(authority: Authority) -> Security:
    return authority.security("client:me")


@pytest.fixture
def some(authority: Authority) -> Security:
    return authority.security("device-agent:some")


def test_peers_of_one_authority_accept_each_other(authority: Authority) -> None:
    def who(request: bytes, context: grpc.ServicerContext) -> bytes:
        return context.auth_context()["peer_uri"][0]

    with secured(authority, {"unary_unary": who}, "device-agent:device-1") as served:
        assert ask(served) == b"spiffe://collapipe/device-agent/device-1/cluster/0"


# gRPC does not tell a caller why the server refuses its certificate.
DOCTOR = "doctor"


def test_peer_of_another_authority_is_refused(
    authority: Authority, others: Authority, server: Security, client: Security
) -> None:
    stranger, impostor = others.security("client:me"), others.security("scheduler:server")
    refuse(server, Unchecked(authority.path, stranger.certificate, stranger.key), DOCTOR)
    posing = Unchecked(authority.path, impostor.certificate, impostor.key)
    refuse(posing, client, "another authority")


def test_plain_text_and_tls_do_not_connect(server: Security, client: Security) -> None:
    refuse(server, PLAIN, "")
    refuse(PLAIN, client, "")


def test_peer_whose_certificate_has_expired_is_refused(
    authority: Authority, server: Security, client: Security
) -> None:
    refuse(authority.expired("scheduler:server"), client, "certificate has expired")
    refuse(server, authority.expired("client:me"), DOCTOR)


def test_server_is_reached_only_at_an_address_that_was_issued_to_it(
    authority: Authority, some: Security, client: Security
) -> None:
    refuse(some, client, "another name or role", listen="127.0.0.2:0")
    there = authority.security("device-agent:there", "127.0.0.3")
    with serving(ECHO, there, client, "127.0.0.3:0") as served:
        assert ask(served) == b"hello"


def test_role_of_the_server_counts_and_not_its_address_where_a_caller_expects_one(
    some: Security, server: Security, client: Security
) -> None:
    refuse(some, client, "another name or role", expected=Role.SCHEDULER)
    with serving(ECHO, server, client, "127.0.0.4:0", expected=Role.SCHEDULER) as served:
        assert ask(served) == b"hello"


def test_client_cannot_serve_with_its_certificate(authority: Authority, client: Security) -> None:
    refuse(authority.security("client:posing"), client, "")


# --- options of the operator


def test_missing_or_contradicting_options_are_named(authority: Authority, some: Security) -> None:
    for options, names in (
        ((False, None, None, None), "--tls-ca, --tls-cert, --tls-key"),
        ((False, some.ca, some.certificate, None), "^--tls-key"),
        ((True, some.ca, None, None), "--insecure"),
    ):
        with pytest.raises(InvalidInputError, match=names):
            Security.of(*options)


def test_unusable_file_is_named(authority: Authority, some: Security, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    other = authority.security("device-agent:other")
    for changes, names in (
        ({"certificate": tmp_path / "absent.pem"}, "--tls-cert .*absent.pem"),
        # Looking for it fails, as in an unreadable folder.
        ({"key": Path("x" * 300)}, "--tls-key x+"),
        ({"key": other.key}, r"--tls-key .*other/key\.pem"),
        ({"ca": garbage}, r"--tls-ca .*garbage\.pem"),
    ):
        files = {"ca": some.ca, "certificate": some.certificate, "key": some.key} | changes
        with pytest.raises(InvalidInputError, match=names):
            Security.of(False, **files)


def test_security_has_the_files_of_the_options(some: Security) -> None:
    assert Security.of(False, some.ca, some.certificate, some.key) == some
    assert not some.is_insecure
    assert Security.of(True, None, None, None) == PLAIN
    assert PLAIN.is_insecure
    assert PLAIN.server_credentials() is PLAIN.channel_credentials() is PLAIN.presented() is None


# --- the own certificate


def test_identity_and_expiry_are_read_from_the_certificate(authority: Authority) -> None:
    presented = authority.security("control-unit:cu-0").presented()
    assert presented is not None
    assert presented.identity == Identity(Role.CONTROL_UNIT, "cu-0")
    year = datetime.timedelta(days=365)
    left = presented.expires - datetime.datetime.now(datetime.timezone.utc)
    assert year - datetime.timedelta(hours=1) < left <= year


def test_certificate_that_no_peer_would_accept_is_refused_at_the_start(
    authority: Authority, others: Authority
) -> None:
    stranger = others.security("device-agent:stranger")
    cases: list[tuple[Security, type[CollapipeError], str]] = [
        (authority.expired("device-agent:old"), WrongStateError, "expired.* renew .*clock"),
        (authority.future("device-agent:young"), WrongStateError, "not yet valid.*clock.*UTC"),
        (authority.without_role("nobody"), InvalidInputError, "no role.*certs issue"),
        (
            Security(authority.path, stranger.certificate, stranger.key),
            InvalidInputError,
            "authority of --tls-ca",
        ),
    ]
    for refused, kind, reason in cases:
        with pytest.raises(kind, match=reason):
            Security.of(False, refused.ca, refused.certificate, refused.key)
