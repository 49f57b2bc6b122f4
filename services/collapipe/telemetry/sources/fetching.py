"""One HTTP request with limits on its time and its size."""

import asyncio
import ssl
import zlib
from typing import NamedTuple

import httpx

from collapipe.errors import PeerLostError


class Response(NamedTuple):
    """The response to a request."""

    status: int
    body: bytes


class AnswerTooLargeError(PeerLostError):
    """A server answered with more than is read."""


def open_client(tls: ssl.SSLContext | None) -> httpx.AsyncClient:
    """Returns a client for hosts of this network; it ignores proxies and follows no redirects.

    It has no time limit: httpx limits each read, which a server that sends slowly never exceeds. `fetch`
    limits the whole request instead.

    Args:
        tls: For https; `None` trusts the public authorities.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(
        timeout=None,
        headers={"Accept-Encoding": "gzip"},
        limits=limits,
        trust_env=False,
        follow_redirects=False,
        verify=True if tls is None else tls,
    )


async def fetch(
    client: httpx.AsyncClient, request: httpx.Request, timeout_seconds: float, max_bytes: int
) -> Response:
    """Sends a request and reads the whole response.

    Args:
        timeout_seconds: Limit of the whole exchange, from the look-up of the name to the last byte.
        max_bytes: Limit of the body, both as it comes and without its compression. httpx would expand a few kilobytes that
            are compressed twice to gigabytes.

    Raises:
        AnswerTooLargeError: The server sends too much.
        PeerLostError: It cannot be reached, is too slow, closes the connection, or compresses in another way than by gzip.
    """

    async def exchange() -> Response:
        response = await client.send(request, stream=True)
        body, num_received = bytearray(), 0
        try:
            coding = response.headers.get("Content-Encoding", "")
            if coding not in ("", "gzip"):
                raise PeerLostError(
                    "",
                    f"{url} compresses by {coding!r:.80}, but only gzip was asked for: check that the address is right",
                )
            gzip = zlib.decompressobj(16 + zlib.MAX_WBITS)
            async for chunk in response.aiter_raw():
                num_received += len(chunk)
                left = max_bytes - len(body)
                body += gzip.decompress(chunk, left + 1) if coding else chunk
                if max(len(body), num_received) > max_bytes:
                    raise AnswerTooLargeError(
                        "",
                        f"{url} sent more than {max_bytes} bytes: check that the address is right",
                    )
        finally:
            await response.aclose()
        return Response(response.status_code, bytes(body))

    url = request.url.copy_with(query=None)
    try:
        return await asyncio.wait_for(exchange(), timeout_seconds)
    except asyncio.TimeoutError:
        raise PeerLostError(
            "",
            f"{url} did not answer within {timeout_seconds:g} s: check its load, or raise the limit",
        ) from None
    except zlib.error as error:
        raise PeerLostError(
            "", f"{url} sent a damaged answer ({error}): check that the address is right"
        ) from None
    except httpx.HTTPError as error:
        raise PeerLostError(
            "",
            f"{url} cannot be reached ({str(error) or type(error).__name__}): check that it runs there",
        ) from None
