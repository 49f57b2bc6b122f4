"""The folder of a box that joined a deployment.

- `tls/ca.pem`, `cert.pem` and `key.pem`: the authority's certificate, the box's certificate and its key
- `<role>.toml`: the settings of the service
- `joined.json`: the address of the authority
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography import x509

from collapipe.certificates import pki
from collapipe.certificates.identity import Identity
from collapipe.certificates.pki import HolderCertificate
from collapipe.certificates.private_files import (
    OWNER_ONLY,
    file_errors,
    make_folder,
    read_certificate_of_key,
    read_if_valid,
    read_required,
    write_file,
)
from collapipe.documents import read_document, write_document
from collapipe.errors import InvalidInputError, NotPermittedError

_JOIN_AGAIN = "join again with a new token of `collapipe certs token`"


class BoxFolder:
    """The folder of a box, created when it joins. Files that root writes get the owner of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._document = folder / "joined.json"
        self.tls = folder / "tls"
        """Folder of `ca.pem`, `cert.pem` and `key.pem`."""

    def settings_file(self, identity: Identity) -> Path:
        """Returns the path of the service's settings."""
        return self._folder / f"{identity.role.value}.toml"

    def joined(self) -> HolderCertificate | None:
        """Returns the certificate of the box; `None` if it has not joined or a file is damaged."""
        authority = read_if_valid(self.tls / "ca.pem", pki.read_certificate)
        if authority is None:
            return None
        certificate = read_certificate_of_key(self.tls, authority)
        identity = None if certificate is None else pki.identity_of(certificate)
        if certificate is None or identity is None:
            return None
        return HolderCertificate(identity, certificate)

    def require_joined(self) -> HolderCertificate:
        """Returns the certificate of the box. Raises `InvalidInputError` if it has not joined."""
        held = self.joined()
        if held is None:
            raise InvalidInputError(
                f"{self.tls} holds no certificate to renew: join with a token of `collapipe certs token`"
            )
        return held

    def join(
        self,
        identity: Identity,
        authority: x509.Certificate,
        authority_address: str,
        hosts: frozenset[str],
        enroll: Callable[[bytes], x509.Certificate],
    ) -> HolderCertificate:
        """Creates a key, gets a certificate for it and puts both into the folder, or changes nothing.

        The key is written before the request is sent, so that an error of the file system does not waste the
        token.

        Args:
            identity: The identity that the certificate must have.
            authority_address: "host:port".
            hosts: The hosts that the request asks for, besides the name.
            enroll: Sends a signing request, PKCS #10 in DER, to the authority.

        Raises:
            InvalidInputError: The folder cannot be written, or the certificate is for another key.
            NotPermittedError: The certificate is for another identity or of another authority.
        """
        make_folder(self._folder)
        with file_errors(self._folder):
            incoming = Path(tempfile.mkdtemp(prefix=".tls-", dir=self._folder))
        outgoing = incoming.with_name(f"{incoming.name}-before")
        try:
            key = pki.new_key()
            write_file(incoming / "key.pem", pki.key_pem(key), OWNER_ONLY)
            write_file(incoming / "ca.pem", pki.pem(authority))
            certificate = enroll(pki.build_request(identity, hosts, key))
            _check_answer(certificate, identity, authority)
            if not pki.is_of_key(certificate, key.public_key()):
                raise InvalidInputError("the authority answered with a certificate for another key")
            write_file(incoming / "cert.pem", pki.pem(certificate))
            with file_errors(self._folder):
                incoming.chmod(0o755)
                self._give_to_owner(incoming, *incoming.iterdir())
                write_document(self._document, {"authority": authority_address})
                if self.tls.exists():
                    self.tls.rename(outgoing)
                incoming.rename(self.tls)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
            shutil.rmtree(outgoing, ignore_errors=True)
        return HolderCertificate(identity, certificate)

    def renew(self, renew: Callable[[bytes, bytes], x509.Certificate]) -> HolderCertificate:
        """Replaces the certificate and keeps the key.

        Args:
            renew: Sends the present certificate and a signing request, both in DER, to the authority.

        Raises:
            InvalidInputError: The box has not joined.
            NotPermittedError: The certificate is for another identity or of another authority.
        """
        held, authority = self.require_joined(), self.authority()
        key = read_required(self.tls / "key.pem", pki.read_key, _JOIN_AGAIN)
        request = pki.build_request(held.identity, held.hosts, key)
        certificate = renew(pki.der(held.certificate), request)
        _check_answer(certificate, held.identity, authority)
        write_file(self.tls / "cert.pem", pki.pem(certificate))
        self._give_to_owner(self.tls / "cert.pem")
        return HolderCertificate(held.identity, certificate)

    @property
    def is_renewable(self) -> bool:
        """Whether the box knows the address of its authority."""
        return self._document.exists()

    def authority_address(self) -> str:
        """Returns the address of the authority. Raises `InvalidInputError` if it is unknown."""
        document = read_document(self._document) or {}
        if "authority" not in document:
            raise InvalidInputError(
                f"{self._document} does not contain the address of the authority: {_JOIN_AGAIN}"
            )
        return str(document["authority"])

    def authority(self) -> x509.Certificate:
        """Returns the certificate of the authority. Raises `InvalidInputError` if it is missing."""
        return read_required(self.tls / "ca.pem", pki.read_certificate, _JOIN_AGAIN)

    def write_settings(self, identity: Identity, settings: Mapping[str, str | int]) -> None:
        """Writes the settings file of the service. A file of an earlier join is renamed to `.before`."""
        path = self.settings_file(identity)
        if path.exists():  # Its owner may have changed it, and may want the changes back.
            with file_errors(path):
                path.replace(path.with_name(f"{path.name}.before"))
        # A JSON string is a TOML string if no surrogates are escaped.
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()
        ]
        write_file(path, ("\n".join(lines) + "\n").encode())
        self._give_to_owner(path)

    def _give_to_owner(self, *paths: Path) -> None:
        """Makes the owner of the folder, who runs the service, the owner of files that root wrote."""
        with file_errors(self._folder):
            owner = self._folder.stat()
            if os.geteuid() == 0:
                for path in paths:
                    os.chown(path, owner.st_uid, owner.st_gid)


def _check_answer(
    certificate: x509.Certificate, identity: Identity, authority: x509.Certificate
) -> None:
    if pki.identity_of(certificate) != identity or not pki.is_signed_by(certificate, authority):
        raise NotPermittedError(
            "the authority answered with a certificate for another identity, or of another authority: make a new token "
            "with `collapipe certs token`"
        )
