"""The page of metrics answers only who may read it, and slow readers keep nobody else from it."""

import http.client
import socket
import ssl
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_server import eventually
from unit.rpc.authorities import Authority, serial_number, serial_number_on_disk

from collapipe import metrics_page
from collapipe.certificates.identity import OF_OPERATORS
from collapipe.errors import InvalidInputError
from collapipe.metrics_page import MOST_CONNECTIONS, MOST_OF_AN_ADDRESS, serve_metrics
from collapipe.rpc import Security

PLAIN = Security.insecure()
LIMIT_SECONDS = 60.0
READERS = ("admin", "prometheus")
OTHERS = [role.value for role in OF_OPERATORS if role.value not in READERS]


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
    host, _, port = address.rpartition(":")
    connection: http.client.HTTPConnection
    if context is None:
        connection = http.client.HTTPConnection(
            host, int(port), timeout=LIMIT_SECONDS, source_address=(source, 0)
        )
    else:
        connection = http.client.HTTPSConnection(
            host, int(port), timeout=LIMIT_SECONDS, source_address=(source, 0), context=context
        )
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def open_idle(address: str, source: str = "127.0.0.1") -> socket.socket:
    """Opens a connection that sends nothing."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), LIMIT_SECONDS, (source, 0))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "refused a call" in one.getMessage()]


# --- who may read


@pytest.mark.parametrize("role", READERS)
def test_role_that_may_read_metrics_gets_the_page(ours: Authority, address: str, role: str) -> None:
    status, page = read(address, ours.security(f"{role}:reader-{role}").client_context())
    assert status == 200
    assert "collapipe_round_seconds" in page


@pytest.mark.parametrize("role", OTHERS)
def test_other_roles_are_refused_with_the_reason(ours: Authority, address: str, role: str) -> None:
    status, page = read(address, ours.security(f"{role}:other-{role}").client_context())
    assert status == 403
    assert f"{role}:other-{role} may not read metrics" in page
    assert "collapipe_" not in page


def test_reader_without_a_certificate_is_refused_and_told_once(
    ours: Authority, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=str(ours.path))
    for _ in range(3):
        with pytest.raises(OSError):
            read(address, context)
    # The thread of a connection may end after its reader has gone.
    assert read(address, ours.security("client:last").client_context(), "127.0.0.2")[0] == 403
    eventually(lambda: len(told(caplog)) == 2)
    (line,) = [line for line in told(caplog) if "127.0.0.1" in line]
    assert line.startswith("refused a call of 127.0.0.1 to /metrics: ")
    assert "peer did not return a certificate" in line


def test_reader_of_another_authority_is_refused(
    service: Security, address: str, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path).security("prometheus:reader")
    context = ssl.create_default_context(cafile=str(service.ca))
    context.load_cert_chain(str(stranger.certificate), stranger.key)
    with pytest.raises(OSError):
        read(address, context)


def test_reader_refuses_a_service_of_another_authority(address: str, tmp_path: Path) -> None:
    stranger = Authority(tmp_path).security("prometheus:reader")
    with pytest.raises(ssl.SSLCertVerificationError):
        read(address, stranger.client_context())


def test_reader_without_tls_is_refused(address: str) -> None:
    with pytest.raises((OSError, http.client.BadStatusLine)):
        read(address, None)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1")
def test_old_versions_of_tls_are_refused(ours: Authority, address: str) -> None:
    context = ours.security("prometheus:old").client_context()
    assert context is not None
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError, match="version"):
        read(address, context)


def test_reader_with_a_revoked_key_is_refused(
    ours: Authority, service: Security, address: str
) -> None:
    reader, other = ours.security("prometheus:stolen"), ours.security("prometheus:other")
    assert read(address, reader.client_context())[0] == 200
    service.learn_revoked(ours.revoke("prometheus:stolen"))
    status, page = read(address, reader.client_context())
    assert status == 403
    assert "the key of this certificate was revoked" in page
    assert read(address, other.client_context())[0] == 200


def test_reader_of_a_revoked_issuing_authority_is_refused(
    ours: Authority, service: Security, address: str
) -> None:
    reader = ours.security("prometheus:old")
    assert read(address, reader.client_context())[0] == 200
    service.learn_revoked(ours.renew_issuer(revoke=True))
    status, page = read(address, reader.client_context())
    assert status == 403
    assert "the issuing authority of this certificate was revoked" in page
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
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_SECONDS) as page:
        assert b"collapipe_round_seconds" in page.read()


# --- limits


@pytest.fixture(params=["TLS", "plain text"])
def reader(
    request: pytest.FixtureRequest, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Security]:
    """Serves a page, and provides its address and the security of a reader. Idle connections outlast every test."""
    monkeypatch.setattr(metrics_page, "CONNECTION_SECONDS", 10 * LIMIT_SECONDS)
    if request.param == "TLS":
        serving, reading = ours.security("scheduler:slow"), ours.security("prometheus:quick")
    else:
        serving = reading = PLAIN
    return serve_metrics("127.0.0.1:0", serving), reading


def test_idle_connections_do_not_delay_a_reader(reader: tuple[str, Security]) -> None:
    address, security = reader
    with ExitStack() as stack:
        for _ in range(MOST_OF_AN_ADDRESS - 1):
            stack.enter_context(open_idle(address))
        assert read(address, security.client_context())[0] == 200


def test_excess_connections_of_an_address_are_closed_and_other_addresses_are_served(
    reader: tuple[str, Security],
) -> None:
    address, security = reader
    with ExitStack() as stack:
        for _ in range(MOST_OF_AN_ADDRESS):
            stack.enter_context(open_idle(address))
        excess = stack.enter_context(open_idle(address))
        with suppress(ConnectionResetError):
            assert excess.recv(1) == b""
        assert read(address, security.client_context(), "127.0.0.2")[0] == 200


def test_number_of_connections_is_limited(reader: tuple[str, Security]) -> None:
    address, _ = reader
    with ExitStack() as stack:
        for number in range(MOST_CONNECTIONS):
            stack.enter_context(open_idle(address, f"127.0.1.{number // MOST_OF_AN_ADDRESS + 1}"))
        excess = stack.enter_context(open_idle(address, "127.0.2.1"))
        with suppress(ConnectionResetError):
            assert excess.recv(1) == b""


def test_connection_that_sends_nothing_ends(
    reader: tuple[str, Security], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, security = reader
    monkeypatch.setattr(metrics_page, "CONNECTION_SECONDS", 0.2)
    with open_idle(address) as idle, suppress(ConnectionResetError):
        assert idle.recv(1) == b""
    monkeypatch.setattr(metrics_page, "CONNECTION_SECONDS", LIMIT_SECONDS)
    assert read(address, security.client_context())[0] == 200


def test_connection_that_sends_byte_by_byte_ends(
    reader: tuple[str, Security], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read ends in time, but all reads together do not."""
    address, security = reader
    monkeypatch.setattr(metrics_page, "CONNECTION_SECONDS", 0.2)
    context = security.client_context()
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


# --- the address


def test_empty_address_serves_nothing() -> None:
    assert serve_metrics("", PLAIN) == ""


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:x", "127.0.0.1:70000", "1.2.3.4:5"])
def test_invalid_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidInputError, match=f"cannot serve metrics on {listen} .*--metrics-l"):
        serve_metrics(listen, PLAIN)


def test_port_in_use_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InvalidInputError, match=f"cannot serve metrics on {listen}"):
            serve_metrics(listen, PLAIN)
