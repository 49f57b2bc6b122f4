"""One HTTP exchange with a limit on its time and on its size."""

import asyncio

import httpx

from collapipe.errors import PeerLostError


def open_client() -> httpx.AsyncClient:
    """Returns a client that goes straight to hosts of this network.

    Limits of time are `fetch`'s: httpx has them for each read, which a peer that trickles never reaches.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)


async def fetch(
    client: httpx.AsyncClient, request: httpx.Request, timeout_seconds: float, max_bytes: int
) -> tuple[int, bytes]:
    """Sends a request and reads the whole answer.

    Args:
        client: What `open_client` returned.
        request: What to send.
        timeout_seconds: Bounds everything from looking up the name to the last byte.
        max_bytes: Bounds the body.

    Returns:
        The HTTP status and the body.

    Raises:
        PeerLostError: It cannot be reached, is too slow, breaks off or says too much.
    """

    async def exchange() -> tuple[int, bytes]:
        response = await client.send(request, stream=True)
        body = bytearray()
        try:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > max_bytes:
                    raise PeerLostError(
                        "",
                        f"{request.url} answered with more than {max_bytes} bytes: is it the right address?",
                    )
        finally:
            await response.aclose()
        return response.status_code, bytes(body)

    try:
        return await asyncio.wait_for(exchange(), timeout_seconds)
    except asyncio.TimeoutError:
        raise PeerLostError(
            "",
            f"{request.url.copy_with(query=None)} did not answer within {timeout_seconds:g} s: see whether it is overloaded, or allow more",
        ) from None
    except httpx.HTTPError as error:
        raise PeerLostError(
            "",
            f"{request.url.copy_with(query=None)} cannot be asked ({str(error) or type(error).__name__}): does it run there?",
        ) from None
