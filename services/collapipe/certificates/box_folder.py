"""The folder of a box that joined: its key, its certificate, and the settings of its service.

FOLDER/tls/ca.pem, cert.pem, key.pem
FOLDER/<role>.toml
FOLDER/joined.json, which tells where the authority is
"""

import datetime
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from collapipe.certificates import forms
from collapipe.certificates.forms import utc_now
from collapipe.certificates.identity import Identity
from collapipe.certificates.private_files import OWNER_ONLY, explained, make_folder, write_file
from collapipe.documents import read_document, write_document
from collapipe.errors import InvalidInputError, NotPermittedError


@dataclass(frozen=True)
class Joined:
    """What a box has in its folder."""

    identity: Identity
    hosts: frozenset[str]
    """By which its certificate lets others reach it, besides its name."""
    born: datetime.datetime
    expires: datetime.datetime

    @property
    def is_expired(self) -> bool:
        """Whether nobody accepts it any more."""
        return utc_now() >= self.expires

    @property
    def is_due(self) -> bool:
        """Whether it is time for a renewal."""
        return forms.is_due(self.born, self.expires, utc_now())


class BoxFolder:
    """A folder of a box; its files belong to whoever owns it.

    Args:
        folder: Made when it is first written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._document = folder / "joined.json"
        self.tls = folder / "tls"

    def settings_file(self, identity: Identity) -> Path:
        """Where the settings of the service are."""
        return self._folder / f"{identity.role.value}.toml"

    def joined(self) -> Joined | None:
        """Who the box is; `None` when it has not joined, or what is there is damaged."""
        with explained(self.tls):
            if not (self.tls / "cert.pem").exists():
                return None
            data = (self.tls / "cert.pem").read_bytes()
            key_file = self.tls / "key.pem"
            key_data = key_file.read_bytes() if key_file.exists() else b""
            ca_file = self.tls / "ca.pem"
            ca_data = ca_file.read_bytes() if ca_file.exists() else b""
        try:
            certificate, key = forms.read_certificate(data), forms.read_key(key_data)
            authority = forms.read_certificate(ca_data)
        except InvalidInputError:
            return None
        if not (
            forms.is_of_key(certificate, key.public_key())
            and forms.is_signed_by(certificate, authority)
        ):
            return None
        identity = forms.identity_of(certificate)
        return None if identity is None else _joined(identity, certificate)

    def join(
        self,
        identity: Identity,
        authority: x509.Certificate,
        authority_address: str,
        hosts: frozenset[str],
        enroll: Callable[[bytes], x509.Certificate],
    ) -> Joined:
        """Makes a key, gets a certificate for it, and puts both in place; or changes nothing.

        The folder is tried before the token is used up, and the key never leaves it.

        Args:
            identity: Who the box becomes.
            authority: Certificate of who signs.
            authority_address: Where it serves, "host:port".
            hosts: Asked for, besides the name.
            enroll: Takes the request, PKCS #10 in DER, to the authority.

        Raises:
            InvalidInputError: The folder cannot be written, or the answer is for something else.
        """
        make_folder(self._folder)
        with explained(self._folder):
            incoming = Path(tempfile.mkdtemp(prefix=".tls-", dir=self._folder))
        outgoing = incoming.with_name(f"{incoming.name}-before")
        try:
            key = forms.new_key()
            write_file(incoming / "key.pem", forms.key_pem(key), OWNER_ONLY)
            write_file(incoming / "ca.pem", forms.pem(authority))
            certificate = enroll(forms.build_request(identity, hosts, key))
            _check_answer(certificate, identity, authority)
            if not forms.is_of_key(certificate, key.public_key()):
                raise InvalidInputError("the authority answered with a certificate for another key")
            write_file(incoming / "cert.pem", forms.pem(certificate))
            with explained(self._folder):
                incoming.chmod(0o755)
                self._give_to_owner(incoming, *incoming.iterdir())
                write_document(self._document, {"authority": authority_address})
                if self.tls.exists():  # of a join that has expired
                    self.tls.rename(outgoing)
                incoming.rename(self.tls)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
            shutil.rmtree(outgoing, ignore_errors=True)
        return _joined(identity, certificate)

    def renew(self, renew: Callable[[bytes, bytes], x509.Certificate]) -> Joined:
        """Replaces the certificate; the key stays.

        Args:
            renew: Takes the present certificate and the request, both DER, to the authority.

        Raises:
            InvalidInputError: The box has not joined, or the answer is for something else.
        """
        joined = self.to_renew()
        with explained(self.tls):
            key = forms.read_key((self.tls / "key.pem").read_bytes())
            present = forms.read_certificate((self.tls / "cert.pem").read_bytes())
        authority = self.authority()
        request = forms.build_request(joined.identity, joined.hosts, key)
        certificate = renew(forms.der(present), request)
        _check_answer(certificate, joined.identity, authority)
        write_file(self.tls / "cert.pem", forms.pem(certificate))
        self._give_to_owner(self.tls / "cert.pem")
        return _joined(joined.identity, certificate)

    def to_renew(self) -> Joined:
        """What the box is; raises `InvalidInputError` when it has not joined."""
        joined = self.joined()
        if joined is None:
            raise InvalidInputError(
                f"{self.tls} holds no certificate to renew: join with a token of `collapipe certs token`"
            )
        return joined

    @property
    def is_renewable(self) -> bool:
        """Whether the box knows its authority; a certificate that was copied here has none."""
        return self._document.exists()

    def authority_address(self) -> str:
        """Where the authority serves that the box joined; raises `InvalidInputError`."""
        document = read_document(self._document) or {}
        if "authority" not in document:
            raise InvalidInputError(
                f"{self._document} does not tell where the authority is: join again with a new token"
            )
        return str(document["authority"])

    def authority(self) -> x509.Certificate:
        """The certificate of the authority that the box joined; raises `InvalidInputError`."""
        with explained(self.tls):
            return forms.read_certificate((self.tls / "ca.pem").read_bytes())

    def write_settings(self, identity: Identity, settings: Mapping[str, str | int]) -> Path:
        """Writes the file for `--config` of the service, and returns it."""
        path = self.settings_file(identity)
        if (
            path.exists()
        ):  # of a join that has expired, perhaps with changes that somebody wants back
            with explained(path):
                path.replace(path.with_name(f"{path.name}.before"))
        # a JSON string is a TOML string, if it escapes no surrogates
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()
        ]
        write_file(path, ("\n".join(lines) + "\n").encode())
        self._give_to_owner(path)
        return path

    def _give_to_owner(self, *paths: Path) -> None:
        """Lets the service read what root wrote for it."""
        with explained(self._folder):
            owner = self._folder.stat()
            if os.geteuid() == 0:
                for path in paths:
                    os.chown(path, owner.st_uid, owner.st_gid)


def _joined(identity: Identity, certificate: x509.Certificate) -> Joined:
    return Joined(
        identity,
        forms.hosts_of(certificate),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
    )


def _check_answer(
    certificate: x509.Certificate, identity: Identity, authority: x509.Certificate
) -> None:
    if forms.identity_of(certificate) != identity or not forms.is_signed_by(certificate, authority):
        raise NotPermittedError(
            "the authority answered with a certificate of somebody else: make a new token with `collapipe certs token`"
        )
