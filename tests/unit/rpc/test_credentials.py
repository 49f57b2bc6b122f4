import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.rpc import Security, call

from .serving import ECHO, SERVICE, serving

PLAIN = Security.insecure()


@dataclass
class Authority:
    """Signs certificates; keeps them in a folder."""

    folder: Path
    name: str

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        certificate = self._sign(self._key, self._subject, is_authority=True)
        self.path = self._write("ca", certificate.public_bytes(serialization.Encoding.PEM))

    def security(self, role: str) -> Security:
        """Of a process with a certificate of this authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
        certificate = self._sign(key, subject, is_authority=False)
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Security(
            self.path,
            self._write(role, certificate.public_bytes(serialization.Encoding.PEM)),
            self._write(f"{role}-key", pem),
        )

    def _sign(
        self, key: ec.EllipticCurvePrivateKey, subject: x509.Name, *, is_authority: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        names = x509.SubjectAlternativeName([x509.IPAddress(_loopback())])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, name: str, data: bytes) -> Path:
        path = self.folder / f"{self.name}-{name}.pem"
        path.write_bytes(data)
        return path


def _loopback() -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address("127.0.0.1")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "others")


def ask(of_server: Security, of_client: Security) -> bytes:
    with serving(ECHO, of_server, of_client) as served:
        method = served.channel.unary_unary(f"/{SERVICE}/unary_unary")
        return call(method, b"hello", "the server", seconds=5)


def test_peers_of_one_authority_know_each_other(ours: Authority) -> None:
    assert ask(ours.security("server"), ours.security("client")) == b"hello"


def test_identity_of_the_caller_is_known_to_the_server(ours: Authority) -> None:
    def who(request: bytes, context: grpc.ServicerContext) -> bytes:
        return context.auth_context()["x509_common_name"][0]

    with serving(
        {"unary_unary": who}, ours.security("server"), ours.security("device-1")
    ) as served:
        assert served.call("unary_unary") == [b"device-1"]


def test_caller_of_another_authority_is_refused(ours: Authority, others: Authority) -> None:
    stranger = others.security("client")
    trusting = Security(ours.path, stranger.certificate, stranger.key)
    with pytest.raises(PeerLostError, match="the server cannot be reached"):
        ask(ours.security("server"), trusting)


def test_server_of_another_authority_is_refused(ours: Authority, others: Authority) -> None:
    impostor = others.security("server")
    trusting = Security(ours.path, impostor.certificate, impostor.key)
    with pytest.raises(PeerLostError, match="the server cannot be reached"):
        ask(trusting, ours.security("client"))


def test_caller_without_a_certificate_is_refused(ours: Authority) -> None:
    with serving(ECHO, ours.security("server")) as served:
        credentials = grpc.ssl_channel_credentials(ours.path.read_bytes())
        with grpc.secure_channel(served.server.address, credentials) as channel:
            method = channel.unary_unary(f"/{SERVICE}/unary_unary")
            with pytest.raises(PeerLostError):
                call(method, b"", "the server", seconds=5)


def test_plain_text_and_tls_do_not_meet(ours: Authority) -> None:
    for of_server, of_client in (
        (ours.security("server"), PLAIN),
        (PLAIN, ours.security("client")),
    ):
        with pytest.raises(PeerLostError, match="the server cannot be reached"):
            ask(of_server, of_client)


# --- what an operator asks for


def test_nothing_given_is_refused_and_names_both_ways(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"--tls-ca, --tls-cert, --tls-key not given.*--ins"
    ):
        Security.of(False, None, None, None)


def test_missing_flag_is_named(ours: Authority) -> None:
    security = ours.security("some")
    with pytest.raises(InvalidInputError, match="^--tls-key not given"):
        Security.of(False, security.ca, security.certificate, None)


def test_plain_text_with_certificates_is_refused(ours: Authority) -> None:
    with pytest.raises(InvalidInputError, match="contradict"):
        Security.of(True, ours.path, None, None)


def test_file_that_is_not_there_is_named(ours: Authority, tmp_path: Path) -> None:
    security = ours.security("some")
    with pytest.raises(InvalidInputError, match=r"--tls-cert .*absent.pem: there is no such file"):
        Security.of(False, security.ca, tmp_path / "absent.pem", security.key)


def test_what_was_asked_for_is_what_comes(ours: Authority) -> None:
    security = ours.security("some")
    assert Security.of(False, security.ca, security.certificate, security.key) == security
    assert not security.is_insecure
    assert Security.of(True, None, None, None) == PLAIN
    assert PLAIN.is_insecure
    assert PLAIN.server_credentials() is None
    assert PLAIN.channel_credentials() is None
