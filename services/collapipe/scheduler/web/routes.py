"""The addresses of the page: its files, and the data that they show. Reading never changes anything."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from collapipe.errors import (
    CollapipeError,
    InvalidInputError,
    NotFoundError,
    NotPermittedError,
    WrongStateError,
)
from collapipe.scheduler.web.access import Access, Visitor
from collapipe.scheduler.web.records import Records
from collapipe.scheduler.web.snapshot import Focus, Snapshots

logger = logging.getLogger(__name__)

MOST_STREAMS = 16
"""Pages that follow changes at a time."""
SLOW_SECONDS = 10.0
"""A reader that takes longer for what was sent before is dropped."""
_PAUSE_SECONDS = 1.0
_SIGN_OF_LIFE = 15
"""Pauses after which a stream without changes shows that it lives."""
_THREADS = 2
"""Threads that read memory and disk for all visitors. Others wait."""
_MOST_BODY_BYTES = 256
_BODY_SECONDS = 10.0
_STATIC = Path(__file__).parent / "static"

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_STATUS: dict[type[Exception], int] = {
    NotFoundError: 404,
    NotPermittedError: 403,
    WrongStateError: 409,
    InvalidInputError: 400,
}

T = TypeVar("T")


def make_app(
    access: Access, snapshots: Snapshots, records: Records, closed: threading.Event
) -> ASGIApp:
    """Returns the application.

    Args:
        closed: Is set when the page ends. Streams end then.
    """
    routes = _Routes(access, snapshots, records, closed)
    app = Starlette(
        routes=[
            Route("/", routes.index),
            Route("/api/session", routes.open_link, methods=["POST"]),
            Route("/api/state", routes.state),
            Route("/api/stream", routes.stream),
            Route("/api/jobs/{job}/rounds", routes.rounds),
            Route("/api/jobs/{job}/rounds/{number}", routes.round),
            Route("/api/jobs/{job}/rounds/{number}/trace", routes.trace),
            Route("/api/jobs/{job}/cancel", routes.cancel, methods=["POST"]),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ],
        exception_handlers={CollapipeError: _refuse},
    )
    return _Guard(app, access)


class _Guard:
    """Refuses requests that another site makes, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower().encode(): value.encode() for name, value in _HEADERS.items()}
                is_file = scope["path"].startswith("/static/") or scope["path"] == "/"
                own[b"cache-control"] = b"no-cache" if is_file else b"no-store"
                message["headers"] = [*message["headers"], *own.items()]
            await send(message)

        refusal = self._refusal(Request(scope))
        if refusal:
            await _error(403, refusal)(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> str:
        host = request.headers.get("host", "")
        if not self._access.is_own(host):
            return f"this page is not served for the name {host[:100]!r}: open the address that the scheduler has printed"
        site = request.headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and request.url.path.startswith("/api/"):
            return "another site asked for this: open the page itself"
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("origin")
            if origin != f"{request.url.scheme}://{host}" or "x-collapipe" not in request.headers:
                return "only the page itself may change something: open it, and press its button"
        return ""


class _Routes:
    """Answers requests."""

    def __init__(
        self, access: Access, snapshots: Snapshots, records: Records, closed: threading.Event
    ) -> None:
        self._access = access
        self._snapshots = snapshots
        self._records = records
        self._closed = closed
        self._threads = CapacityLimiter(_THREADS)
        self._traces = CapacityLimiter(1)
        self._num_streams = 0

    async def index(self, request: Request) -> Response:
        return FileResponse(_STATIC / "index.html")

    async def open_link(self, request: Request) -> Response:
        """Gives a cookie for the key of the link."""
        links = self._access.links
        key = (await _body(request)).get("key")
        try:
            cookie = links.exchange(key) if links is not None and isinstance(key, str) else None
        except OSError as error:
            return _error(
                503,
                f"the next address cannot be stored ({error}): make room on the disk of the scheduler",
            )
        if cookie is None:
            return _error(
                403, "this address was used before, or the scheduler has made another one"
            )
        answer = Response(status_code=204)
        answer.set_cookie(_cookie_name(request), cookie, httponly=True, samesite="strict")
        return answer

    async def state(self, request: Request) -> Response:
        visitor = self._reader(request)
        return _json(self._for(visitor, await self._run(self._snapshots.sections, _focus(request))))

    async def stream(self, request: Request) -> Response:
        self._reader(request)
        if self._num_streams >= MOST_STREAMS:
            return _error(503, f"{MOST_STREAMS} pages are open already: close one of them")
        self._num_streams += 1
        return _Stream(partial(self._follow, request))

    async def _follow(self, request: Request, send: Callable[[str], Any]) -> None:
        """Sends the sections of a snapshot that have changed, about once in a second."""
        focus, shown, silent = _focus(request), dict[str, Any](), 0
        try:
            while not self._closed.is_set() and not await request.is_disconnected():
                visitor = self._reader(request)  # A key may be revoked meanwhile.
                now = self._for(visitor, await self._run(self._snapshots.sections, focus))
                changed = {name: value for name, value in now.items() if shown.get(name) != value}
                silent = 0 if changed else silent + 1
                if changed:
                    await send(f"data: {_dumps(changed)}\n\n")
                elif silent % _SIGN_OF_LIFE == 0:
                    await send(": alive\n\n")
                shown = now
                await asyncio.sleep(_PAUSE_SECONDS)
        except NotPermittedError:
            pass  # The answer has begun. The next request is told why.
        except asyncio.TimeoutError:
            logger.warning("the page drops a reader that is too slow: %s", request.client)
            request.state.transport.abort()
        finally:
            self._num_streams -= 1

    async def rounds(self, request: Request) -> Response:
        self._reader(request)
        job_id = request.path_params["job"]
        return _json(
            await self._run(self._records.rounds, job_id, _index(request.query_params.get("after")))
        )

    async def round(self, request: Request) -> Response:
        self._reader(request)
        return _json(await self._run(self._records.round, *_round(request)))

    async def trace(self, request: Request) -> Response:
        self._reader(request)
        if self._traces.available_tokens < 1:
            return _error(503, "another page asks the hosts for a trace: try again in some seconds")
        job_id, index = _round(request)
        cluster = _index(request.query_params.get("cluster"))
        async with self._traces:
            return _json(await self._run(self._records.trace, job_id, index, cluster))

    async def cancel(self, request: Request) -> Response:
        visitor, job_id = self._reader(request), request.path_params["job"]
        await self._run(self._snapshots.cancel, job_id, visitor.may_change)
        logger.info(
            "job %s is cancelled from the page by %s", job_id, visitor.identity or "its user"
        )
        return Response(status_code=204)

    def _reader(self, request: Request) -> Visitor:
        """Returns who asks; raises `NotPermittedError` for somebody who may see nothing."""
        cookie = request.cookies.get(_cookie_name(request), "")
        visitor = self._access.visitor(cookie, request.state.uris, request.state.chain)
        if not visitor.may_see:
            raise NotPermittedError(
                "this browser has no key for the page, which other users of this machine reach, too: open the address that "
                "`collapipe status` prints"
            )
        return visitor

    def _for(self, visitor: Visitor, sections: dict[str, Any]) -> dict[str, Any]:
        """Adds which jobs the visitor may cancel."""
        jobs = [{**job, "mine": visitor.may_change(job["owner"])} for job in sections["jobs"]]
        return {**sections, "jobs": jobs}

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)


class _Stream(Response):
    """Server-sent events. A reader that does not read gets an `asyncio.TimeoutError`."""

    def __init__(self, follow: Callable[[Callable[[str], Any]], Any]) -> None:
        super().__init__(media_type="text/event-stream")
        self._follow = follow
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_text(text: str) -> None:
            message = {"type": "http.response.body", "body": text.encode(), "more_body": True}
            await asyncio.wait_for(send(message), SLOW_SECONDS)

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await self._follow(send_text)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _dumps(content: Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def _json(content: Any) -> Response:
    return Response(_dumps(content), media_type="application/json")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)


async def _refuse(request: Request, error: Exception) -> Response:
    found = (status for kind, status in _STATUS.items() if isinstance(error, kind))
    return _error(next(found, 500), str(error))


async def _body(request: Request) -> dict[str, Any]:
    """Returns the JSON object in a small body; an empty one if there is none."""
    body = b""

    async def read() -> None:
        nonlocal body
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_BODY_BYTES:
                raise InvalidInputError(
                    f"a request has more than the {_MOST_BODY_BYTES} bytes that are allowed: send less"
                )

    try:
        await asyncio.wait_for(read(), _BODY_SECONDS)
        content = json.loads(body)
    except (asyncio.TimeoutError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _cookie_name(request: Request) -> str:
    # Cookies do not know ports, and a machine may have several testbeds.
    return f"collapipe-{request.scope['server'][1]}"


def _focus(request: Request) -> Focus:
    listed = request.query_params.get("clusters", "").split(",")
    clusters = frozenset(_index(each) for each in listed[:64] if each)
    return Focus(request.query_params.get("job", ""), clusters)


def _round(request: Request) -> tuple[str, int]:
    """Returns the job and the index of a round. Addresses count rounds from 1, as people do."""
    return request.path_params["job"], _index(request.path_params["number"]) - 1


def _index(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else 0
