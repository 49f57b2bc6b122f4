"""The page of metrics answers only who may read it, and slow readers keep nobody else from it."""

import http.client
import queue
import socket
import ssl
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from unit.rpc.authorities import Authority, serial_number, serial_number_on_disk

from collapipe import metrics_page
from collapipe.certificates.identity import OF_OPERATORS
from collapipe.errors import InvalidInputError
from collapipe.metrics_page import MOST_CONNECTIONS, MOST_OF_AN_ADDRESS, serve_metrics
from collapipe.rpc import Security

PLAIN = Security.insecure()
LIMIT_SECONDS = 120.0
READERS = ("admin", "prometheus")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def service(ours: Authority) -> Security:
    return ours.security("device-agent:service")


@pytest.fixture
def address(service: Security) -> str:
    return serve_metrics("127.0.0.1:0", service)


def read(
    address: str, context: ssl.SSLContext | None, source: str = "127.0.0.1"
) -> tuple[int, str]:
    """Asks for the page from an address of this machine. Returns the status and the body of the answer."""
    connection = http.client.HTTPConnection(address, timeout=LIMIT_SECONDS)
    connection.sock = open_idle(address, source)
    try:
        if context is not None:
            connection.sock = context.wrap_socket(connection.sock, server_hostname="127.0.0.1")
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def open_idle(address: str, source: str = "127.0.0.1") -> socket.socket:
    """Opens a connection that sends nothing."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), LIMIT_SECONDS, (source, 0))


# --- who may read


@pytest.mark.parametrize("role", [role.value for role in OF_OPERATORS])
def test_role_decides_who_gets_the_page(ours: Authority, address: str, role: str) -> None:
    status, page = read(address, ours.security(f"{role}:reader-{role}").client_context())
    if role in READERS:
        assert status == 200
        assert "collapipe_round_seconds" in page
    else:
        assert status == 403
        assert f"{role}:reader-{role}" in page
        assert "collapipe_" not in page


def test_reader_without_a_certificate_is_refused_and_told_once(
    ours: Authority,
    address: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: queue.SimpleQueue[None] = queue.SimpleQueue()
    close = metrics_page._PageServer.close_request

    def close_and_note(server: metrics_page._PageServer, request: Any) -> None:
        close(server, request)
        closed.put(None)

    monkeypatch.setattr(metrics_page._PageServer, "close_request", close_and_note)
    context = ssl.create_default_context(cafile=str(ours.path))
    for _ in range(3):
        with pytest.raises(OSError):
            read(address, context)
    assert read(address, ours.security("client:last").client_context(), "127.0.0.2")[0] == 403
    for _ in range(4):
        closed.get(timeout=LIMIT_SECONDS)
    lines = [one.getMessage() for one in caplog.records if "/metrics" in one.getMessage()]
    (line,) = [line for line in lines if "127.0.0.2" not in line]
    assert "127.0.0.1" in line and "certificate" in line
    assert len(lines) == 2


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1")
def test_reader_without_the_tls_of_our_authority_is_refused(
    ours: Authority, address: str, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path).security("prometheus:reader")
    strange = ssl.create_default_context(cafile=str(ours.path))
    strange.load_cert_chain(str(stranger.certificate), stranger.key)
    old = ours.security("prometheus:reader").client_context()
    assert old is not None
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    for context in (None, strange, old):
        with pytest.raises((OSError, http.client.BadStatusLine)):
            read(address, context)


def test_reader_with_a_revoked_key_or_issuing_authority_is_refused(
    ours: Authority, service: Security, address: str
) -> None:
    stolen, old = ours.security("prometheus:stolen"), ours.security("prometheus:old")
    assert read(address, stolen.client_context())[0] == 200
    service.learn_revoked(ours.revoke("prometheus:stolen"))
    status, page = read(address, stolen.client_context())
    assert (status, "revoked" in page) == (403, True)
    assert read(address, old.client_context())[0] == 200
    service.learn_revoked(ours.renew_issuer(revoke=True))
    status, page = read(address, old.client_context())
    assert (status, "issuing authority" in page) == (403, True)
    assert read(address, ours.security("prometheus:new").client_context())[0] == 200


def test_renewed_certificates_are_used_without_a_restart(
    ours: Authority, service: Security, address: str
) -> None:
    reader = ours.security("prometheus:renewing")
    before = serial_number(address, reader)
    # Another host makes a new certificate.
    ours.security("device-agent:service", "127.0.0.9")
    ours.security("prometheus:renewing", "127.0.0.9")
    assert before != serial_number(address, reader) == serial_number_on_disk(service)
    assert read(address, reader.client_context())[0] == 200


def test_page_ends_with_the_end_of_tls_so_that_a_reader_notices_a_cut(
    ours: Authority, address: str
) -> None:
    context = ours.security("prometheus:whole").client_context()
    assert context is not None
    with (
        open_idle(address) as connection,
        context.wrap_socket(
            connection, server_hostname="127.0.0.1", suppress_ragged_eofs=False
        ) as secured,
    ):
        secured.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        while secured.recv(1 << 16):  # An end without a message of TLS raises an SSLEOFError.
            pass


def test_everybody_may_read_the_page_in_plain_text() -> None:
    address = serve_metrics("127.0.0.1:0", PLAIN)
    assert not address.endswith(":0")
    status, page = read(address, None)
    assert (status, "collapipe_round_seconds" in page) == (200, True)


# --- limits


@pytest.fixture(params=["TLS", "plain text"])
def reader(
    request: pytest.FixtureRequest, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ssl.SSLContext | None]:
    """Serves a page, and provides its address and the TLS of a reader. Idle connections outlast every test."""
    monkeypatch.setattr(metrics_page, "CONNECTION_SECONDS", 10 * LIMIT_SECONDS)
    if request.param == "plain text":
        return serve_metrics("127.0.0.1:0", PLAIN), None
    served = serve_metrics("127.0.0.1:0", ours.security("scheduler:slow"))
    return served, ours.security("prometheus:quick").client_context()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_idle_connections_of_an_address_are_limited_and_delay_no_reader(
    reader: tuple[str, ssl.SSLContext | None],
) -> None:
    address, context = reader
    with ExitStack() as stack:
        for _ in range(MOST_OF_AN_ADDRESS - 1):
            stack.enter_context(open_idle(address))
        assert read(address, context)[0] == 200
        for _ in range(MOST_OF_AN_ADDRESS):
            stack.enter_context(open_idle(address, "127.0.0.2"))
        assert is_closed(stack.enter_context(open_idle(address, "127.0.0.2")))
        assert read(address, context, "127.0.0.3")[0] == 200


def test_number_of_connections_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "CONNECTION_SECONDS", 10 * LIMIT_SECONDS)
    address = serve_metrics("127.0.0.1:0", PLAIN)
    with ExitStack() as stack:
        for number in range(MOST_CONNECTIONS):
            stack.enter_context(open_idle(address, f"127.0.1.{number // MOST_OF_AN_ADDRESS + 1}"))
        assert is_closed(stack.enter_context(open_idle(address, "127.0.2.1")))


def test_connection_that_sends_nothing_or_byte_by_byte_ends(
    reader: tuple[str, ssl.SSLContext | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of single bytes ends in time, but all reads together do not."""
    address, context = reader
    monkeypatch.setattr(metrics_page, "CONNECTION_SECONDS", 0.1)
    with open_idle(address) as idle:
        assert is_closed(idle)
    with open_idle(address) as connection, pytest.raises((ConnectionError, ssl.SSLError)):
        if context is not None:
            connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
        connection.sendall(b"GET /metrics HTTP/1.0\r\nX: ")
        connection.settimeout(0.02)
        while True:
            connection.sendall(b"x")
            with suppress(TimeoutError):
                if connection.recv(1) == b"":
                    raise ConnectionResetError
    monkeypatch.setattr(metrics_page, "CONNECTION_SECONDS", LIMIT_SECONDS)
    assert read(address, context)[0] == 200


# --- the address


def test_empty_address_serves_nothing() -> None:
    assert serve_metrics("", PLAIN) == ""


@pytest.mark.parametrize(
    "listen", ["nowhere", "127.0.0.1:x", "127.0.0.1:70000", "1.2.3.4:5", "in use"]
)
def test_invalid_address_or_port_in_use_is_refused(listen: str) -> None:
    with socket.socket() as other:
        if listen == "in use":
            other.bind(("127.0.0.1", 0))
            other.listen()
            listen = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InvalidInputError, match=f"{listen} .*--metrics-listen"):
            serve_metrics(listen, PLAIN)
