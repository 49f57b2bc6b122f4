"""The certificates that an authority has issued."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from cryptography import x509

from collapipe.certificates import pki
from collapipe.certificates.identity import Identity, is_host_name
from collapipe.certificates.pki import Chain, HolderCertificate
from collapipe.certificates.private_files import (
    files_in,
    make_folder,
    read_if_valid,
    read_required,
    write_file,
)
from collapipe.errors import InvalidInputError

_MAX_SERIAL_BITS = 160
"""The limit of X.509 (RFC 5280, section 4.1.2.2)."""


class IssuedCertificates:
    """A folder with every certificate of an authority. Callers must hold the lock of the authority."""

    def __init__(self, folder: Path, clock: pki.Clock) -> None:
        self._folder = folder
        self._clock = clock

    def valid(self) -> Iterator[HolderCertificate]:
        """Yields all certificates that have not expired."""
        now = self._clock()
        for chain in self._all().values():
            identity = pki.identity_of(chain.certificate)
            if identity is not None and now < chain.certificate.not_valid_after_utc:
                yield HolderCertificate(identity, chain)

    def find(self, certificate: x509.Certificate) -> HolderCertificate | None:
        """Returns the record of a certificate that has not expired and equals it byte for byte; `None` if there is none."""
        # Anybody may ask, so a foreign certificate must cost little.
        if certificate.serial_number.bit_length() > _MAX_SERIAL_BITS:
            return None
        chain = read_if_valid(self._path(certificate), pki.read_chain)
        if chain is None or chain.certificate != certificate:
            return None
        identity = pki.identity_of(certificate)
        if identity is None or certificate.not_valid_after_utc <= self._clock():
            return None
        return HolderCertificate(identity, chain)

    def add(self, chain: Chain, replaced: Chain | None = None) -> None:
        """Adds a certificate and deletes older ones of its key, except the one that it replaces.

        The holder uses the replaced certificate until it receives the new one. The others are deleted because
        repeated renewals would fill the disk. No certificate is deleted for its age, because the clock of the
        authority may be wrong.
        """
        make_folder(self._folder)
        older = self._all()
        write_file(self._path(chain.certificate), chain.pem)
        for path, other in older.items():
            is_of_key = other.certificate.public_key() == chain.certificate.public_key()
            if is_of_key and other != replaced:
                path.unlink(missing_ok=True)

    def remove(self, removed: Iterable[HolderCertificate]) -> None:
        """Deletes certificates, so that nobody can renew them, and their names are free."""
        for held in removed:
            self._path(held.certificate).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Deletes the certificates of all holders."""
        for path in files_in(self._folder, ".pem"):
            path.unlink(missing_ok=True)

    def check_names_free(self, identity: Identity, hosts: Iterable[str]) -> None:
        """Raises `InvalidInputError` if another holder has the name of the identity, or a host name.

        Several holders on one machine may share an IP address.
        """
        wanted = {identity.name, *filter(is_host_name, hosts)}
        for other in self.valid():
            taken = wanted & {other.identity.name, *other.hosts}
            if taken and not other.identity.is_same_holder(identity):
                raise InvalidInputError(
                    f"{identity} cannot have the name {min(taken)}, which the certificate of {other.identity} has until "
                    f"{other.expires:%Y-%m-%d}: choose another name, because each name belongs to one host, or revoke that certificate with "
                    f"`collapipe certs revoke DIR {other.identity}`"
                )

    def other_holder(self, host: str, identity: Identity) -> Identity | None:
        """Returns another identity that has a valid certificate for a host; `None` if there is none."""
        others = (other for other in self.valid() if not other.identity.is_same_holder(identity))
        return next((other.identity for other in others if host in other.hosts), None)

    def _path(self, certificate: x509.Certificate) -> Path:
        return self._folder / f"{certificate.serial_number:x}.pem"

    def _all(self) -> dict[Path, Chain]:
        remedy = "restore it or delete it"
        return {
            path: read_required(path, pki.read_chain, remedy)
            for path in files_in(self._folder, ".pem")
        }
