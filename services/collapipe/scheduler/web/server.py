"""Serves the page: uvicorn and its event loop in one thread, and what reads memory and disk in two others.

uvicorn is imported in its thread, so the scheduler serves gRPC before the page answers.
"""

import asyncio
import importlib.util
import ipaddress
import logging
import socket
import ssl
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collapipe.errors import InvalidInputError
from collapipe.rpc import Security
from collapipe.scheduler.web.access import (
    LINK_FILE,
    Access,
    Links,
    is_loopback,
    names_in_certificate,
    write_private,
)
from collapipe.scheduler.web.records import Records
from collapipe.scheduler.web.snapshot import Snapshots

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
_MOST_OF_AN_ADDRESS = 16
"""A browser opens six connections at most."""
SILENCE_SECONDS = 10.0
"""A connection without a request is closed after one to two times this time, and one without a TLS handshake after it."""
_MOST_HEADER_BYTES = 16_384
_DRAIN_SECONDS = 3.0


class _Listener(socket.socket):
    """Closes connections beyond the limits at once, so also those whose TLS handshake never ends are few."""

    _open: tuple[tuple[socket.socket, str], ...] = ()

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self._open = tuple(each for each in self._open if each[0].fileno() >= 0)
        of_address = sum(other == address[0] for _, other in self._open)
        if len(self._open) >= MOST_CONNECTIONS or of_address >= _MOST_OF_AN_ADDRESS:
            connection.close()
            raise ConnectionAbortedError  # asyncio goes on with the next one.
        self._open += ((connection, address[0]),)
        return connection, address


class WebServer:
    """The page. It is served from the end of `__init__` until `close`.

    Args:
        listen: "host:port"; port 0 takes a free port. A host whose address is not a loopback address gets HTTPS, unless the
            scheduler speaks plain text.
        directory: The state directory of the scheduler, which gets the file with the address and the link.
        advertised: The host by which others reach the scheduler; "" if unknown. It is in the address of a page that is served on all
            addresses of this machine. Without it, a name in the certificate is, or 127.0.0.1.

    Raises:
        InvalidInputError: The address is wrong or in use, or a package is missing.
    """

    def __init__(
        self,
        listen: str,
        directory: Path,
        security: Security,
        snapshots: Snapshots,
        records: Records,
        advertised: str = "",
    ) -> None:
        for package in ("starlette", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                raise InvalidInputError(
                    f"--web needs the Python package {package}, which is not installed: install collapipe[scheduler] again, "
                    'or serve no page with --web ""'
                )
        host, self._socket = _bind(listen)
        address, port = self._socket.getsockname()[:2]
        if ipaddress.ip_address(address).is_unspecified:
            # A bare name, such as that of the holder, is mostly known to no browser.
            names = (name for name in names_in_certificate(security) if "." in name or ":" in name)
            host = advertised or next(names, "127.0.0.1")
        name = f"[{host}]" if ":" in host else host
        authority = f"{name}:{port}"
        self._context: ssl.SSLContext | None = None
        if is_loopback(address):
            self.url = f"http://{authority}/"
            links: Links | None = Links(self.url, directory)
        else:
            links = None
            if not security.is_insecure:
                self._context = _context(security)
            self.url = f"http{'s' if self._context else ''}://{authority}/"
            write_private(directory / LINK_FILE, {"url": self.url})
        self._access = Access(host, links, security)
        self._snapshots = snapshots
        self._records = records
        self._server: uvicorn.Server | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the page and its connections."""
        self._closed.set()
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(_DRAIN_SECONDS)

    def _run(self) -> None:
        import uvicorn

        from collapipe.scheduler.web.routes import make_app

        config = uvicorn.Config(
            make_app(self._access, self._snapshots, self._records, self._closed),
            http=_protocol(),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,  # Warnings are about requests, and anybody could fill the disk with them.
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl = self._context
        self._server = uvicorn.Server(config)
        if not self._closed.is_set():
            asyncio.run(self._serve(self._server))

    async def _serve(self, server: "uvicorn.Server") -> None:
        if self._context is not None:
            # uvicorn does not pass it on, and the default is 60 s.
            loop = asyncio.get_running_loop()
            hasty = partial(loop.create_server, ssl_handshake_timeout=SILENCE_SECONDS)
            vars(loop)["create_server"] = hasty
        await server.serve(sockets=[self._socket])


def _bind(listen: str) -> tuple[str, socket.socket]:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, int(port)), family=family, backlog=MOST_CONNECTIONS)
        return host, _Listener(fileno=bound.detach())
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"cannot serve the page on {listen} ({error}): choose another address with --web, port 0 for any free port, or "
            "an empty text to serve none"
        ) from None


def _context(security: Security) -> ssl.SSLContext:
    """Returns the TLS of the page, which asks for a certificate, but takes visitors without one. Renewals apply at once."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_OPTIONAL
    assert security.ca and security.certificate and security.key
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0  # A resumed connection would not know the chain of the visitor.
    context.load_verify_locations(security.ca)
    context.load_cert_chain(security.certificate, security.key)

    def renew(connection: ssl.SSLObject, name: str | None, before: ssl.SSLContext) -> None:
        if (renewed := security.server_context()) is not None:
            # This changes only the certificate. The connection still takes visitors without one.
            connection.context = renewed

    context.sni_callback = renew
    return context


def _chain(tls: ssl.SSLObject) -> bytes:
    """Returns the certificates between a visitor and the root, in PEM."""
    # Python has no public name for it before 3.13.
    chain = tls._sslobj.get_verified_chain() or []  # type: ignore[attr-defined]
    return "".join(certificate.public_bytes() for certificate in chain[:-1]).encode()


def _protocol() -> type[asyncio.Protocol]:
    """Returns the protocol of connections: that of uvicorn, with limits, and with the certificate of the visitor."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            tls = transport.get_extra_info("ssl_object")
            shown = tls.getpeercert() if tls is not None else None
            self.app_state = {
                "transport": transport,
                "uris": [v for kind, v in (shown or {}).get("subjectAltName", ()) if kind == "URI"],
                "chain": _chain(tls) if shown else None,
            }
            self._silent = self.loop.call_later(SILENCE_SECONDS, self._end_silent, None)

        def connection_lost(self, exc: Exception | None) -> None:
            self._silent.cancel()
            super().connection_lost(exc)

        def _end_silent(self, before: object) -> None:
            """Ends the connection if it has no answer under way, and had no request since the last look."""
            if self.cycle is before and (before is None or self.cycle.response_complete):
                self.transport.abort()
            self._silent = self.loop.call_later(SILENCE_SECONDS, self._end_silent, self.cycle)

    return Protocol
