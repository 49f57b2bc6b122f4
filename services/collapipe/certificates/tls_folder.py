"""A folder with the TLS files of one process: `ca.pem`, `cert.pem` and `key.pem`."""

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.certificates import pki
from collapipe.certificates.private_files import OWNER_ONLY, read_if_valid, write_file


@dataclass(frozen=True)
class TlsFolder:
    """Reads and writes the three files; each method may raise `InvalidInputError` for errors of the file system."""

    path: Path

    @property
    def certificate_file(self) -> Path:
        """The certificate of the process."""
        return self.path / "cert.pem"

    def authority(self) -> x509.Certificate | None:
        """Returns the certificate of the authority; `None` if it is missing or damaged."""
        return read_if_valid(self.path / "ca.pem", pki.read_certificate)

    def key(self) -> ec.EllipticCurvePrivateKey | None:
        """Returns the private key; `None` if it is missing or damaged."""
        return read_if_valid(self.path / "key.pem", pki.read_key)

    def certificate(self, authority: x509.Certificate) -> x509.Certificate | None:
        """Returns the certificate if it belongs to the key in the folder and the authority signed it."""
        key = self.key()
        certificate = read_if_valid(self.certificate_file, pki.read_certificate)
        if (
            key is None
            or certificate is None
            or not pki.is_of_key(certificate, key.public_key())
            or not pki.is_signed_by(certificate, authority)
        ):
            return None
        return certificate

    def write_authority(self, authority: x509.Certificate) -> None:
        """Replaces the certificate of the authority."""
        write_file(self.path / "ca.pem", pki.pem(authority))

    def write_key(self, key: ec.EllipticCurvePrivateKey) -> None:
        """Replaces the key; only the owner may read it."""
        write_file(self.path / "key.pem", pki.key_pem(key), OWNER_ONLY)

    def write_certificate(self, certificate: x509.Certificate) -> None:
        """Replaces the certificate."""
        write_file(self.certificate_file, pki.pem(certificate))
