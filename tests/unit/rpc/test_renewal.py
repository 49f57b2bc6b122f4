"""A process uses its renewed certificate without a restart, and no call breaks."""

import datetime
import logging
import os
import queue
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from collapipe.certificates import Role, pki
from collapipe.errors import PeerLostError
from collapipe.rpc import ChannelPool, Security, call, why_unreachable, within_silence

from .authorities import Authority, serial_number, serial_number_on_disk
from .serving import ECHO, SERVICE, serving

HOUR, SECOND = datetime.timedelta(hours=1), datetime.timedelta(seconds=1)
LIMIT_SECONDS = 60.0
UNARY, STREAM = f"/{SERVICE}/unary_unary", f"/{SERVICE}/stream_stream"


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def others(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "others")


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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


def ask(pool: ChannelPool, address: str) -> bytes:
    return call(pool.channel(address).unary_unary(UNARY), b"hello", "the server", 20)


def test_new_connections_get_the_renewed_certificate_and_a_stream_goes_on(ours: Authority) -> None:
    server = ours.security("scheduler:server", lifetime=HOUR)
    client = ours.security("client:me", lifetime=HOUR)
    with serving(ECHO, server) as served, pool_of(client) as pool:
        address = served.server.address
        stream = Stream(pool.channel(address))
        assert stream.echo(b"before") == b"before"
        before = serial_number(address, client)
        for _ in range(3):  # The pool forgets the channel of the stream at the second renewal.
            ours.security("scheduler:server", lifetime=HOUR)
            ours.security("client:me", lifetime=HOUR)
            assert ask(pool, address) == b"hello"
        assert before != serial_number(address, client) == serial_number_on_disk(server)
        assert stream.echo(b"after") == b"after"
        stream.end()


def test_client_connects_again_after_its_first_certificate_has_expired(ours: Authority) -> None:
    server, client = (
        ours.security("scheduler:server"),
        ours.security("client:me", lifetime=4 * SECOND),
    )
    with serving(ECHO, server, client) as served, pool_of(client) as pool:
        address = served.server.address
        old = pool.channel(address)
        presented = client.presented()
        assert presented is not None
        wait_until(lambda: pki.utc_now() > presented.expires + SECOND)
        ours.security("client:me")
        # Neither channel was connected before, like one whose connection was lost.
        with pytest.raises(
            PeerLostError, match="doctor` on both machines examines their certificates"
        ):
            call(old.unary_unary(UNARY), b"hello", "the server", 5)
        assert ask(pool, address) == b"hello"
        renewed = client.presented()
        assert renewed is not None and renewed.expires > presented.expires + HOUR


def test_server_is_reached_after_its_first_certificate_has_expired(ours: Authority) -> None:
    server = ours.security("scheduler:server", lifetime=4 * SECOND)
    with serving(ECHO, server) as served, pool_of(ours.security("client:me")) as pool:
        presented = server.presented()
        assert presented is not None
        wait_until(lambda: pki.utc_now() > presented.expires + SECOND)
        with pytest.raises(PeerLostError, match="its certificate has expired"):
            ask(pool, served.server.address)
        # A call that waits until the server is ready gets no error of the connection.
        channel = pool.channel(served.server.address)
        waiting = channel.stream_stream(STREAM)(iter([b"hello"]), wait_for_ready=True)
        answers = within_silence(
            waiting, 0.5, "device-1", lambda: "work", lambda: why_unreachable(channel, "device-1")
        )
        with pytest.raises(PeerLostError, match="device-1 .* its certificate has expired") as lost:
            next(answers)
        assert lost.value.host_id == "device-1"
        ours.security("scheduler:server")
        wait_until(lambda: _is_reached(pool, served.server.address))


def _is_reached(pool: ChannelPool, address: str) -> bool:
    try:
        return ask(pool, address) == b"hello"
    except PeerLostError:  # gRPC waits a moment before it connects again.
        return False


def test_closing_the_pool_ends_calls_of_the_former_certificate(ours: Authority) -> None:
    client = ours.security("client:me", lifetime=HOUR)
    with serving(ECHO, ours.security("scheduler:server")) as served, pool_of(client) as pool:
        stream = Stream(pool.channel(served.server.address))
        assert stream.echo(b"before") == b"before"
        ours.security("client:me")
        assert ask(pool, served.server.address) == b"hello"
        pool.close()
        with pytest.raises(grpc.RpcError) as raised:
            stream.echo(b"after")
    assert raised.value.code() is grpc.StatusCode.CANCELLED


def test_connections_of_former_certificates_are_closed(ours: Authority) -> None:
    client = ours.security("client:me", lifetime=HOUR)
    with serving(ECHO, ours.security("scheduler:server")) as served, pool_of(client) as pool:
        address = served.server.address
        port = int(address.rpartition(":")[2])

        def num_connections() -> int:
            open_ones = psutil.Process().net_connections("tcp")
            return sum(one.status == "ESTABLISHED" and one.laddr.port == port for one in open_ones)

        for _ in range(5):
            assert ask(pool, address) == b"hello"
            ours.security("client:me", lifetime=HOUR)
        wait_until(lambda: num_connections() == 2)


@pytest.mark.parametrize("asks_callers", [True, False])
def test_renewal_changes_nobody_who_may_call(ours: Authority, asks_callers: bool) -> None:
    own = ours.security("scheduler:server", lifetime=HOUR)
    server = Security(own.ca, own.certificate, own.key, asks_callers=asks_callers)
    everybody = {SERVICE: {"unary_unary": frozenset(Role)}}
    stranger = grpc.ssl_channel_credentials(ours.path.read_bytes())
    with serving(ECHO, server, permissions=everybody) as served:
        ours.security("scheduler:server")
        address = served.server.address
        assert serial_number(address, ours.security("client:me")) == serial_number_on_disk(own)
        with grpc.secure_channel(address, stranger) as channel:
            method = channel.unary_unary(UNARY)
            if asks_callers:
                with pytest.raises(PeerLostError):
                    call(method, b"hello", "the server", 5)
            else:
                assert call(method, b"hello", "the server", 20) == b"hello"


def _replace(target: Path | None, data: bytes) -> None:
    assert target is not None
    incoming = target.with_suffix(".incoming")
    incoming.write_bytes(data)
    os.replace(incoming, target)


def _key_of_another(own: Security, ours: Authority, others: Authority) -> None:
    key = ours.security("scheduler:another").key
    assert key is not None
    _replace(own.key, key.read_bytes())


def _half_a_certificate(own: Security, ours: Authority, others: Authority) -> None:
    assert own.certificate is not None
    data = own.certificate.read_bytes()
    own.certificate.write_bytes(data[: len(data) // 2])


def _no_files(own: Security, ours: Authority, others: Authority) -> None:
    for path in (own.ca, own.certificate, own.key):
        assert path is not None
        path.unlink()


def _files_of(own: Security, other: Security) -> None:
    assert other.ca and other.certificate and other.key
    _replace(own.ca, other.ca.read_bytes())
    _replace(own.certificate, other.certificate.read_bytes())
    _replace(own.key, other.key.read_bytes())


def _expired(own: Security, ours: Authority, others: Authority) -> None:
    _files_of(own, ours.expired("scheduler:server"))


def _another_holder(own: Security, ours: Authority, others: Authority) -> None:
    _files_of(own, ours.security("scheduler:another"))


def _another_authority(own: Security, ours: Authority, others: Authority) -> None:
    _files_of(own, others.security("scheduler:server"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_key_of_another, "they are no certificate with its unencrypted key"),
        (_half_a_certificate, "they are no certificate with its unencrypted key"),
        (_no_files, "the file has no certificate in PEM"),
        (_expired, "certificate has expired): renew it"),
        (_another_holder, "is of scheduler:another now: restart this process"),
        (_another_authority, "is of another authority now: restart this process"),
    ],
)
def test_unusable_files_change_nothing_until_they_are_mended(
    ours: Authority,
    others: Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Security, Authority, Authority], None],
    reason: str,
) -> None:
    own = ours.security("scheduler:server", lifetime=HOUR)
    client = ours.security("client:me")
    assert own.key is not None
    good = shutil.copytree(own.key.parent, tmp_path / "good")
    before = serial_number_on_disk(own)
    with caplog.at_level(logging.INFO), serving(ECHO, own) as served, pool_of(own) as pool:
        address = served.server.address
        spoil(own, ours, others)
        for _ in range(3):
            assert serial_number(address, client) == before
            assert (
                call(
                    pool.channel(address, Role.SCHEDULER).unary_unary(UNARY), b"", "the server", 20
                )
                == b""
            )
        (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
        assert (
            "the renewed certificate is not used, and scheduler:server until "
            in warning.getMessage()
        )
        assert reason in warning.getMessage()
        for path in good.iterdir():
            _replace(own.key.parent / path.name, path.read_bytes())
        ours.security("scheduler:server")
        assert before != serial_number(address, client) == serial_number_on_disk(own)
    assert caplog.messages.count(f"the certificate was renewed: known as {own.presented()}") == 1
