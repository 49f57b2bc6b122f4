"""The certificates that an authority has issued."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from cryptography import x509

from collapipe.certificates import pki
from collapipe.certificates.identity import Identity, is_host_name
from collapipe.certificates.pki import HolderCertificate
from collapipe.certificates.private_files import make_folder, read_required, write_file
from collapipe.errors import InvalidInputError


class IssuedCertificates:
    """A folder with every certificate of an authority. Callers must hold the lock of the authority."""

    def __init__(self, folder: Path, clock: pki.Clock) -> None:
        self._folder = folder
        self._clock = clock

    def valid(self) -> Iterator[HolderCertificate]:
        """Yields all certificates that have not expired."""
        now = self._clock()
        for certificate in self._all().values():
            identity = pki.identity_of(certificate)
            if identity is not None and now < certificate.not_valid_after_utc:
                yield HolderCertificate(identity, certificate)

    def add(self, certificate: x509.Certificate, replaced: x509.Certificate | None = None) -> None:
        """Adds a certificate and deletes older ones of its key, except the one that it replaces.

        The holder uses the replaced certificate until it receives the new one. The others are deleted because
        repeated renewals would fill the disk. No certificate is deleted for its age, because the clock of the
        authority may be wrong.
        """
        make_folder(self._folder)
        older = self._all()
        write_file(self._folder / f"{certificate.serial_number:x}.pem", pki.pem(certificate))
        for path, other in older.items():
            if other.public_key() == certificate.public_key() and other != replaced:
                path.unlink(missing_ok=True)

    def remove(self, removed: Iterable[HolderCertificate]) -> None:
        """Deletes certificates, so that nobody can renew them, and their names are free."""
        for held in removed:
            (self._folder / f"{held.certificate.serial_number:x}.pem").unlink(missing_ok=True)

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
                    f"{other.expires:%Y-%m-%d}: choose another name, because each name belongs to one host"
                )

    def other_holder(self, host: str, identity: Identity) -> Identity | None:
        """Returns another identity that has a valid certificate for a host; `None` if there is none."""
        others = (other for other in self.valid() if not other.identity.is_same_holder(identity))
        return next((other.identity for other in others if host in other.hosts), None)

    def _all(self) -> dict[Path, x509.Certificate]:
        remedy = "restore it or delete it"
        return {
            path: read_required(path, pki.read_certificate, remedy)
            for path in self._folder.glob("*.pem")
        }
