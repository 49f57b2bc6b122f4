"""Authorities for tests, with valid certificates and with faulty ones that a real authority never issues."""

import datetime
import socket
import ssl
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from collapipe.certificates import Identity, pki
from collapipe.certificates.authority_folder import DEFAULT_LIFETIME, AuthorityFolder
from collapipe.certificates.revoked_keys import parse_list
from collapipe.rpc import Security
from collapipe.v1.enrollment_pb2 import SignedRevokedKeys

DAY = datetime.timedelta(days=1)


class Unchecked(Security):
    """The security of a process that uses its files even if no peer would accept them."""

    def server_credentials(self) -> grpc.ServerCredentials:
        ca, certificate, key = self._read_files()
        return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        ca, certificate, key = self._read_files()
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def _read_files(self) -> list[bytes]:
        return [path.read_bytes() for path in (self.ca, self.certificate, self.key) if path]


class Authority:
    """Makes certificates in a folder. A holder is written as "role:name"."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = AuthorityFolder.create(folder / "authority")
        self.path = self._authority.ca_file

    def security(
        self, holder: str, *hosts: str, lifetime: datetime.timedelta = DEFAULT_LIFETIME
    ) -> Security:
        """Returns the security of a process with a valid certificate.

        A certificate that lasts less than half a day is due for renewal at once: the next call for its holder renews it.
        """
        identity = Identity.parse(holder)
        folder = self._folder / identity.name
        self._authority.issue(identity, hosts, folder, lifetime)
        return Security(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")

    def revoke(self, holder: str) -> SignedRevokedKeys:
        """Revokes the key of a holder, and returns the list of all revoked keys."""
        self._authority.revoke(Identity.parse(holder))
        return parse_list(self._authority.revoked_file.read_bytes())

    def renew_issuer(self, *, revoke: bool = False) -> SignedRevokedKeys:
        """Makes a new issuing authority, and returns the list of all revoked keys."""
        self._authority.renew_issuer(self.path.parent / "root", revoke=revoke)
        return parse_list(self._authority.revoked_file.read_bytes())

    def issued_by(self, signer: Security, holder: str) -> Security:
        """Returns the security of a process whose certificate another holder signed, as if it were an authority."""
        assert signer.key is not None and signer.certificate is not None
        chain = pki.read_chain(signer.certificate.read_bytes())
        return self._made(holder, pki.read_key(signer.key.read_bytes()), chain.certificate)

    def stolen(self) -> tuple[pki.ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Returns the key and the certificate of the present issuing authority."""
        return self._signing_key, self._authority.issuer

    def forged(
        self, stolen: tuple[pki.ec.EllipticCurvePrivateKey, x509.Certificate], holder: str
    ) -> Security:
        """Returns the security of a process for which a thief made the certificate."""
        return self._made(holder, *stolen)

    def with_expired_issuer(self, holder: str) -> Security:
        """Returns the security of a process whose certificate has not expired, but its issuing authority has."""
        root = self.path.parent / "root"
        root_key = pki.read_key((root / "ca-key.pem").read_bytes())
        key, now = pki.new_key(), pki.utc_now()
        signed_by = (root_key, self._authority.root)
        young = pki.build_issuer(key.public_key(), signed_by, now, 2 * DAY)
        expired = pki.build_issuer(key.public_key(), signed_by, now - 2 * DAY, DAY)
        return self._made(holder, key, young, shown=expired)

    def expired(self, holder: str) -> Security:
        """Returns the security of a process whose certificate expired an hour ago."""
        return self._made(holder, *self.stolen(), ages=(DAY, DAY / 24))

    def future(self, holder: str) -> Security:
        """Returns the security of a process whose certificate is not valid yet."""
        return self._made(holder, *self.stolen(), ages=(-2 * DAY, -3 * DAY))

    def without_role(self, common_name: str, *names: x509.GeneralName) -> Security:
        """Returns the security of a process whose certificate has no role, as one made by hand."""
        key, now = pki.new_key(), pki.utc_now()
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name.from_rfc4514_string(f"CN={common_name}"))
            .issuer_name(self._authority.issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
            .add_extension(
                x509.SubjectAlternativeName([x509.DNSName("localhost"), *names]), critical=False
            )
        )
        certificate = builder.sign(self._signing_key, hashes.SHA256())
        chain = pki.Chain(certificate, self._authority.issuer)
        return self._written(common_name, pki.key_pem(key), chain)

    @property
    def _signing_key(self) -> pki.ec.EllipticCurvePrivateKey:
        return pki.read_key((self.path.parent / "issuing.pem").read_bytes())

    def _made(
        self,
        holder: str,
        signing_key: pki.ec.EllipticCurvePrivateKey,
        issuer: x509.Certificate,
        shown: x509.Certificate | None = None,
        ages: tuple[datetime.timedelta, datetime.timedelta] = (0 * DAY, -DAY),
    ) -> Security:
        """Returns a security with a certificate of any issuer, of which it may show another certificate.

        Args:
            ages: How long ago the certificate began and ended to be valid.
        """
        identity, key, now = Identity.parse(holder), pki.new_key(), pki.utc_now()
        valid = [now - age for age in ages]
        certificate = pki.build_certificate(
            identity, [], key.public_key(), (signing_key, issuer), *valid
        )
        chain = pki.Chain(certificate, shown or issuer)
        return self._written(f"{identity.name}-made", pki.key_pem(key), chain)

    def _written(self, name: str, key: bytes, chain: pki.Chain) -> Security:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        (folder / "key.pem").write_bytes(key)
        (folder / "cert.pem").write_bytes(chain.pem)
        return Unchecked(self.path, folder / "cert.pem", folder / "key.pem")


def serial_number(address: str, caller: Security) -> int:
    """Returns the number of the certificate that a server shows in a handshake."""
    context = ssl.create_default_context(cafile=str(caller.ca))
    context.load_cert_chain(str(caller.certificate), caller.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=20) as connection,
        context.wrap_socket(connection, server_hostname=host) as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None
    return pki.read_certificate(shown).serial_number


def serial_number_on_disk(security: Security) -> int:
    """Returns the number of the certificate in the files of a process."""
    assert security.certificate is not None
    return pki.read_certificate(security.certificate.read_bytes()).serial_number
