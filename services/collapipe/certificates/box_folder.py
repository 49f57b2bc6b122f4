"""The folder of a box that joined a deployment.

- `tls/ca.pem`, `cert.pem` and `key.pem`: the certificate of the root, those of the box and of its issuing authority, and its key
- `<role>.toml`: the settings of the service
- `joined.json`: the address of the authority
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cryptography import x509

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from collapipe.certificates import pki
from collapipe.certificates.identity import Identity
from collapipe.certificates.pki import Chain, HolderCertificate
from collapipe.certificates.private_files import (
    OWNER_ONLY,
    file_errors,
    make_folder,
    read_chain_of_key,
    read_if_valid,
    read_required,
    write_file,
)
from collapipe.documents import read_document, write_document
from collapipe.errors import InvalidInputError, NotPermittedError

_RESERVED_BYTES = 64 << 10
"""More than the files that are written after the authority has answered."""
_STRING = r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'"
"""A string of TOML in one line."""
_JOIN_AGAIN = "join again with a new token of `collapipe certs token`"


class BoxFolder:
    """The folder of a box, created when it joins. Files that root writes get the owner of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._document = folder / "joined.json"
        self.tls = folder / "tls"
        """Folder of `ca.pem`, `cert.pem` and `key.pem`."""

    def settings_file(self, identity: Identity) -> Path:
        """Returns the path of the service's settings."""
        return self.folder / f"{identity.role.value}.toml"

    def joined(self) -> HolderCertificate | None:
        """Returns the certificate of the box; `None` if it has not joined or a file is damaged."""
        root = read_if_valid(self.tls / "ca.pem", pki.read_certificate)
        chain = None if root is None else read_chain_of_key(self.tls, root)
        identity = None if chain is None else pki.identity_of(chain.certificate)
        return None if chain is None or identity is None else HolderCertificate(identity, chain)

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
        root: x509.Certificate,
        authority_address: str,
        hosts: frozenset[str],
        enroll: Callable[[bytes], Chain],
    ) -> HolderCertificate:
        """Creates a key, gets a certificate for it and puts both into the folder, or changes nothing.

        The key is written before the request is sent, with a reserve for what follows, so that an error of the file system does not
        waste the token.

        Args:
            identity: The identity that the certificate must have.
            authority_address: "host:port".
            hosts: The hosts that the request asks for, besides the name.
            enroll: Sends a signing request, PKCS #10 in DER, to the authority.

        Raises:
            InvalidInputError: The folder cannot be written, or the certificate is for another key.
            NotPermittedError: The certificate is for another identity or of another authority.
        """
        make_folder(self.folder)
        with file_errors(self.folder):
            incoming = Path(tempfile.mkdtemp(prefix=".tls-", dir=self.folder))
        outgoing = incoming.with_name(f"{incoming.name}-before")
        try:
            key = pki.new_key()
            write_file(incoming / "key.pem", pki.key_pem(key), OWNER_ONLY)
            write_file(incoming / "ca.pem", pki.pem(root))
            reserve = incoming / "reserve"
            write_file(reserve, os.urandom(_RESERVED_BYTES), OWNER_ONLY)
            chain = enroll(pki.build_request(identity, hosts, key))
            reserve.unlink()
            _check_answer(chain, identity, root)
            if not pki.is_of_key(chain.certificate, key.public_key()):
                raise InvalidInputError(
                    f"the authority answered with a certificate for another key: {_JOIN_AGAIN}"
                )
            write_file(incoming / "cert.pem", chain.pem)
            with file_errors(self.folder):
                incoming.chmod(0o755)
                self._give_to_owner(incoming, *incoming.iterdir())
                write_document(self._document, {"authority": authority_address})
                if self.tls.exists():
                    self.tls.rename(outgoing)
                incoming.rename(self.tls)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
            shutil.rmtree(outgoing, ignore_errors=True)
        return HolderCertificate(identity, chain)

    def renew(self, renew: Callable[[bytes, bytes], Chain]) -> HolderCertificate:
        """Replaces the certificate and keeps the key.

        Args:
            renew: Sends the present certificate and a signing request, both in DER, to the authority.

        Raises:
            InvalidInputError: The box has not joined.
            NotPermittedError: The certificate is for another identity or of another authority.
        """
        held, root = self.require_joined(), self.root()
        key = read_required(self.tls / "key.pem", pki.read_key, _JOIN_AGAIN)
        request = pki.build_request(held.identity, held.hosts, key)
        chain = renew(pki.der(held.certificate), request)
        _check_answer(chain, held.identity, root)
        write_file(self.tls / "cert.pem", chain.pem)
        self._give_to_owner(self.tls / "cert.pem")
        return HolderCertificate(held.identity, chain)

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

    def root(self) -> x509.Certificate:
        """Returns the certificate of the root. Raises `InvalidInputError` if it is missing."""
        return read_required(self.tls / "ca.pem", pki.read_certificate, _JOIN_AGAIN)

    def settings(self, identity: Identity) -> dict[str, Any]:
        """Returns the settings of the service; empty without a file. Raises `InvalidInputError` if it is no TOML."""
        return self._read_settings(identity)[1]

    def change_settings(self, identity: Identity, changes: Mapping[str, Any]) -> None:
        """Sets settings in the file of the service, which is made if there is none. All else in it stays, also comments.

        Raises:
            InvalidInputError: A setting is written in a way that this function cannot change, or the file cannot be used.
        """
        path = self.settings_file(identity)
        text, before = self._read_settings(identity)
        for name, value in changes.items():
            if before.get(name) != value:
                text = _with_setting(text, name, value)
        if _parsed(text) != before | dict(changes):
            raise InvalidInputError(
                f"{path} has settings that this command cannot change, such as a list in several lines: set {', '.join(changes)} by hand"
            )
        write_file(path, text.encode())
        self._give_to_owner(path)

    def _read_settings(self, identity: Identity) -> tuple[str, dict[str, Any]]:
        path = self.settings_file(identity)
        with file_errors(path):
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        settings = _parsed(text)
        if settings is None:
            raise InvalidInputError(f"{path} is not TOML: correct it, or delete it and join again")
        return text, settings

    def _give_to_owner(self, *paths: Path) -> None:
        """Makes the owner of the folder, who runs the service, the owner of files that root wrote."""
        with file_errors(self.folder):
            owner = self.folder.stat()
            if os.geteuid() == 0:
                for path in paths:
                    # A link may lead to a file of somebody else.
                    os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _with_setting(text: str, name: str, value: Any) -> str:
    """Returns a TOML text with a setting. A comment behind the former value stays."""
    # A JSON string is a TOML string if no surrogates are escaped.
    line = f"{name} = {json.dumps(value, ensure_ascii=False, default=str)}"
    former = re.compile(
        rf"^{name}[ \t]*=[ \t]*(?:{_STRING}|[^\s#\"'\[{{]+)(?=[ \t]*(?:#|\r?$))", re.MULTILINE
    )
    table = re.search(r"^[ \t]*\[", text, re.MULTILINE)
    end = table.start() if table else len(text)
    head, tail = text[:end], text[end:]
    changed, number = former.subn(lambda _: line, head, count=1)
    if not number:
        changed = head + "\n" * (head != "" and not head.endswith("\n")) + line + "\n"
    return changed + tail


def _parsed(text: str) -> dict[str, Any] | None:
    """Returns the settings in a TOML text; `None` if it is none."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _check_answer(chain: Chain, identity: Identity, root: x509.Certificate) -> None:
    try:
        if pki.identity_of(chain.certificate) != identity:
            raise NotPermittedError("it is for another identity")
        chain.check(root, pki.utc_now())
    except NotPermittedError as error:
        raise NotPermittedError(
            f"the authority answered with a wrong certificate ({error}): make a new token with `collapipe certs token`"
        ) from None
