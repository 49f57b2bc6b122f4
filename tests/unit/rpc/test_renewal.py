"""A process uses its renewed certificate without a restart, and no call breaks."""

import datetime
import gc
import logging
import os
import queue
import shutil
import ssl
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from collapipe.certificates import Role, pki
from collapipe.errors import PeerLostError, WrongStateError
from collapipe.rpc import ChannelPool, Security, call, why_unreachable, within_silence
from collapipe.rpc import channel as channel_module
from collapipe.rpc.options import COMMON_OPTIONS

from .authorities import Authority, serial_number, serial_number_on_disk
from .serving import ECHO, SECONDS, SERVICE, serving

HOUR = datetime.timedelta(hours=1)
UNARY, STREAM = f"/{SERVICE}/unary_unary", f"/{SERVICE}/stream_stream"


class Aged(Security):
    """The security of a process whose certificate has expired since it was first used."""

    def _shake_hands(self) -> tuple[ssl.SSLContext, ssl.SSLContext, dict[str, Any]]:
        try:
            return super()._shake_hands()
        except WrongStateError:
            assert self.certificate is not None
            certificate = pki.read_chain(self.certificate.read_bytes()).certificate
            identity, context = pki.identity_of(certificate), ssl.create_default_context()
            shown = {
                "notAfter": f"{certificate.not_valid_after_utc:%b %d %H:%M:%S %Y GMT}",
                "subjectAltName": (("URI", identity.uri),),
            }
            return context, context, shown


class Stream:
    """A call that stays open, and echoes what is sent."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers = channel.stream_stream(STREAM)(iter(self._sent.get, None))

    def echo(self, message: bytes) -> bytes:
        self._sent.put(message)
        return next(self._answers)

    def end(self) -> None:
        self._sent.put(None)
        assert list(self._answers) == []


@contextmanager
def pool_of(security: Security) -> Iterator[ChannelPool]:
    pool = ChannelPool(security)
    try:
        yield pool
    finally:
        pool.close()


def ask(pool: ChannelPool, address: str, role: Role | None = None) -> bytes:
    return call(pool.channel(address, role).unary_unary(UNARY), b"hello", "the server", SECONDS)


def replace_files(own: Security, other: Security) -> None:
    """Gives a process the files of another one."""
    files = zip(
        (own.ca, own.certificate, own.key), (other.ca, other.certificate, other.key), strict=True
    )
    for target, source in files:
        assert target is not None and source is not None
        incoming = target.with_suffix(".incoming")
        shutil.copy(source, incoming)
        os.replace(incoming, target)


@pytest.fixture
def server(fresh: Authority) -> Security:
    return fresh.security("scheduler:server", lifetime=HOUR)


@pytest.fixture
def client(fresh: Authority) -> Security:
    return fresh.security("client:me", lifetime=HOUR)


def test_new_connections_get_the_renewed_certificate_and_a_stream_goes_on(
    fresh: Authority, server: Security, client: Security
) -> None:
    with serving(ECHO, server) as served, pool_of(client) as pool:
        address = served.server.address
        stream = Stream(pool.channel(address))
        assert stream.echo(b"before") == b"before"
        before = serial_number(address, client)
        for _ in range(3):  # The pool forgets the channel of the stream at the second renewal.
            fresh.security("scheduler:server", lifetime=HOUR)
            fresh.security("client:me", lifetime=HOUR)
            assert ask(pool, address) == b"hello"
        assert before != serial_number(address, client) == serial_number_on_disk(server)
        assert stream.echo(b"after") == b"after"
        stream.end()


def aged(authority: Authority, holder: str) -> Security:
    own = authority.expired(holder)
    ca = shutil.copy(authority.path, authority.path.with_name(f"{holder}.pem"))
    return Aged(ca, own.certificate, own.key)


def test_client_connects_again_after_its_first_certificate_has_expired(fresh: Authority) -> None:
    client = aged(fresh, "client:me")
    with serving(ECHO, fresh.security("scheduler:server")) as served, pool_of(client) as pool:
        old = pool.channel(served.server.address)
        replace_files(client, fresh.security("client:me"))
        with pytest.raises(PeerLostError, match="doctor"):
            call(old.unary_unary(UNARY), b"hello", "the server", SECONDS)
        assert ask(pool, served.server.address) == b"hello"
        renewed = client.presented()
        assert renewed is not None and renewed.expires > pki.utc_now() + HOUR


def test_server_is_reached_after_its_first_certificate_has_expired(
    fresh: Authority, client: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "_REASON_SECONDS", SECONDS)
    server = aged(fresh, "scheduler:server")
    with serving(ECHO, server) as served, pool_of(client) as pool:
        channel = pool.channel(served.server.address)
        with pytest.raises(PeerLostError, match="certificate has expired"):
            ask(pool, served.server.address)
        # A call that waits until the server is ready gets no error of the connection.
        waiting = channel.stream_stream(STREAM)(iter([b"hello"]), wait_for_ready=True)
        answers = within_silence(
            waiting, 0.05, "device-1", lambda: "work", lambda: why_unreachable(channel, "device-1")
        )
        with pytest.raises(PeerLostError, match="device-1 .* has expired") as lost:
            next(answers)
        assert lost.value.host_id == "device-1"
        replace_files(server, fresh.security("scheduler:server"))
        method = pool.channel(served.server.address).unary_unary(UNARY)
        assert method(b"hello", timeout=SECONDS, wait_for_ready=True) == b"hello"


def test_closing_the_pool_ends_calls_of_the_former_certificate(
    fresh: Authority, server: Security, client: Security
) -> None:
    with serving(ECHO, server) as served, pool_of(client) as pool:
        stream = Stream(pool.channel(served.server.address))
        assert stream.echo(b"before") == b"before"
        fresh.security("client:me")
        assert ask(pool, served.server.address) == b"hello"
        pool.close()
        with pytest.raises(grpc.RpcError) as raised:
            stream.echo(b"after")
    assert raised.value.code() is grpc.StatusCode.CANCELLED


def test_channels_of_former_certificates_are_forgotten_but_the_last(
    fresh: Authority, client: Security
) -> None:
    with pool_of(client) as pool:
        channels = []
        for _ in range(4):
            channels.append(weakref.ref(pool.channel("127.0.0.1:1")))
            fresh.security("client:me", lifetime=HOUR)
        gc.collect()
        assert [channel() is None for channel in channels] == [True, True, False, False]


@pytest.mark.parametrize("asks_callers", [True, False])
def test_renewal_changes_nobody_who_may_call(
    fresh: Authority, server: Security, client: Security, asks_callers: bool
) -> None:
    public = Security(server.ca, server.certificate, server.key, asks_callers=asks_callers)
    everybody = {SERVICE: {"unary_unary": frozenset(Role)}}
    stranger = grpc.ssl_channel_credentials(fresh.path.read_bytes())
    with serving(ECHO, public, permissions=everybody) as served:
        fresh.security("scheduler:server")
        address = served.server.address
        assert serial_number(address, client) == serial_number_on_disk(server)
        with grpc.secure_channel(address, stranger, COMMON_OPTIONS) as channel:
            method = channel.unary_unary(UNARY)
            if asks_callers:
                with pytest.raises(PeerLostError):
                    call(method, b"hello", "the server", SECONDS)
            else:
                assert call(method, b"hello", "the server", SECONDS) == b"hello"


def spoil(kind: str, own: Security, fresh: Authority, others: Authority) -> None:
    """Gives a process files that it cannot use instead of its own."""
    assert own.ca and own.certificate and own.key
    another = fresh.security("scheduler:another")
    if kind == "no files":
        for path in (own.ca, own.certificate, own.key):
            path.unlink()
    elif kind == "half a certificate":
        data = own.certificate.read_bytes()
        own.certificate.write_bytes(data[: len(data) // 2])
    elif kind == "expired":
        replace_files(own, fresh.expired("scheduler:server"))
    elif kind == "key of another":
        replace_files(own, Security(own.ca, own.certificate, another.key))
    elif kind == "another holder":
        replace_files(own, another)
    else:
        replace_files(own, others.security("scheduler:server"))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("key of another", "--tls-key"),
        ("half a certificate", "--tls-key"),
        ("no files", "--tls-ca"),
        ("expired", "expired"),
        ("another holder", "is of scheduler:another now"),
        ("another authority", "of another authority"),
    ],
)
def test_unusable_files_change_nothing_until_they_are_mended(
    fresh: Authority,
    others: Authority,
    tmp_path: Path,
    server: Security,
    client: Security,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    reason: str,
) -> None:
    assert server.key is not None
    good = shutil.copytree(server.key.parent, tmp_path / "good")
    before = serial_number_on_disk(server)
    with caplog.at_level(logging.INFO), serving(ECHO, server) as served, pool_of(server) as pool:
        address = served.server.address
        spoil(kind, server, fresh, others)
        for _ in range(2):
            assert serial_number(address, client) == before
            assert ask(pool, address, Role.SCHEDULER) == b"hello"
        (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
        assert "scheduler:server until" in warning.getMessage()
        assert reason in warning.getMessage()
        replace_files(server, Security(good / "ca.pem", good / "cert.pem", good / "key.pem"))
        fresh.security("scheduler:server")
        assert before != serial_number(address, client) == serial_number_on_disk(server)
    renewals = [text for text in caplog.messages if text.endswith(str(server.presented()))]
    assert len(renewals) == 1
