"""Who may see the page, and who may act on it.

On a loopback address, whoever has opened the present link of the page: other users of the machine reach the port, too, but
only the owner of the state directory can read the link. On other addresses, everybody may look, and certificates of people
may act.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from collapipe.certificates import Identity, pki
from collapipe.certificates.identity import PEOPLE
from collapipe.certificates.private_files import OWNER_ONLY, replace_file
from collapipe.documents import write_document
from collapipe.rpc import Security, owns

LINK_FILE = "page.json"
"""The file in the state directory with the address and the present link of the page."""

_SECRET_FILE = "page-secret"
_SECRET_BYTES = 32
_SESSION_SECONDS = 30 * 86_400


@dataclass(frozen=True)
class Visitor:
    """Somebody who asks for the page.

    Args:
        may_see: Whether it may see anything of jobs and hosts.
        identity: The person in its certificate. `None` without one.
        has_link: Whether it has opened the link, which the owner of the testbed has.
    """

    may_see: bool
    identity: Identity | None = None
    has_link: bool = False

    def may_change(self, owner: str) -> bool:
        """Returns whether it may cancel a job of this owner."""
        if self.has_link:
            return True
        person = self.identity
        return person is not None and person.role in PEOPLE and owns(person, owner)


class Links:
    """The link of a page on a loopback address. It works once: whoever opens it gets a cookie, and the file gets another link.

    Cookies outlive a restart of the scheduler, because the key that signs them is in the state directory.

    Args:
        url: Of the page, without the key of a link.
    """

    def __init__(self, url: str, directory: Path) -> None:
        self._url = url
        self._file = directory / LINK_FILE
        self._secret = _secret(directory / _SECRET_FILE)
        self._lock = threading.Lock()
        self._make_link()

    def exchange(self, key: str) -> str | None:
        """Returns the value of a cookie for the key of the present link; `None` for any other key."""
        with self._lock:
            if not hmac.compare_digest(key.encode(errors="replace"), self._key.encode()):
                return None
            self._make_link()
        expires = str(int(time.time()) + _SESSION_SECONDS)
        return f"{expires}.{self._sign(expires)}"

    def knows(self, cookie: str) -> bool:
        """Returns whether `exchange` has made this cookie, and it has not expired."""
        expires, _, signature = cookie.partition(".")
        is_signed = hmac.compare_digest(signature.encode(), self._sign(expires).encode())
        return is_signed and int(expires) > time.time()

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def _make_link(self) -> None:
        key = secrets.token_urlsafe(24)
        # If the disk is full, the link in the file goes on working.
        write_private(self._file, {"url": self._url, "link": f"{self._url}#key={key}"})
        self._key = key


def write_private(path: Path, document: dict[str, str]) -> None:
    """Replaces a document that only the user of this process may read."""
    # The file that `write_document` renames keeps the mode that it has now.
    os.close(os.open(path.with_name(f"{path.name}.tmp"), os.O_CREAT | os.O_WRONLY, 0o600))
    write_document(path, document)


def _secret(path: Path) -> bytes:
    """Returns the key that signs cookies. The first process makes it."""
    secret = path.read_bytes() if path.exists() else b""
    if len(secret) != _SECRET_BYTES:  # A cut secret could be guessed.
        secret = secrets.token_bytes(_SECRET_BYTES)
        replace_file(path, secret, OWNER_ONLY)
    return secret


def is_loopback(address: str) -> bool:
    """Returns whether only this machine reaches an IP address."""
    return ipaddress.ip_address(address).is_loopback


def names_in_certificate(security: Security) -> list[str]:
    """Returns the hosts in the certificate of this process by which other machines know it, IP addresses first."""
    if security.certificate is None:
        return []
    chain = pki.read_chain(security.certificate.read_bytes())
    return sorted(pki.hosts_of(chain.certificate), key=lambda host: (not _is_address(host), host))


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


class Access:
    """Who may see the page at an address, and under which names it is reached.

    Args:
        host: The host of the address.
        links: The link of a page on a loopback address; `None` on other addresses.
    """

    def __init__(self, host: str, links: Links | None, security: Security) -> None:
        self.links = links
        self._security = security
        self._names = {"localhost", host.lower()}
        if links is None:
            self._names.update(names_in_certificate(security))

    def visitor(self, cookie: str, uris: list[str], chain: bytes | None) -> Visitor:
        """Returns who a visitor is.

        Args:
            cookie: The value of the cookie of `Links`, or "".
            uris: The identities in the certificate of the visitor.
            chain: That certificate and the one of its issuing authority, in PEM. `None` without a certificate.

        Raises:
            NotPermittedError: The key of one of them is revoked.
        """
        if self.links is not None:
            has_link = self.links.knows(cookie)
            return Visitor(may_see=has_link, has_link=has_link)
        if chain is None:
            return Visitor(may_see=True)
        self._security.revoked.check(chain)
        return Visitor(may_see=True, identity=Identity.from_uris(uris))

    def is_own(self, header: str) -> bool:
        """Returns whether a Host header names this page. Another name is that of a site that points its name here (DNS rebinding)."""
        host = header.lower()
        if not host.endswith("]"):
            host = host.rpartition(":")[0] or host
        try:
            address = ipaddress.ip_address(
                host.strip("[]")
            )  # Nobody can point an address elsewhere.
        except ValueError:
            return host in self._names
        return address.is_loopback or self.links is None
