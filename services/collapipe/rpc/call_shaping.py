"""Shapes calls between hosts: their messages share the links with all other traffic, and get its emulated delay.

Each call names its caller, so that the server knows the link of its answers. If a server emulates links, it names
itself, too. The sender of a message waits until the link has carried it. The server waits for the emulated delay of both directions, because only the
server surely knows both hosts. Streams with much data shape themselves.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from collapipe.traffic_shaping.outgoing_links import OutgoingLinks, SharedLink, message_bytes
from collapipe.traffic_shaping.pacing import Traffic

T = TypeVar("T")

HOST_KEY = "collapipe-host-bin"
"""Key of the metadata with the host id of the sender. It chooses a link and grants no rights."""

_REQUESTS_SHAPED_BY_SENDER = frozenset({"ExchangeActivations", "ReceiveProbe", "PushUnit"})
_ANSWERS_SHAPED_BY_SENDER = frozenset({"ExchangeActivations", "ReceiveProbe", "FetchBlob"})

_MOST_DELAYED = 64
"""Messages that an emulated delay holds back. Then the sender waits."""
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class _CallDetails(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: Any
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class ShapedCalls(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Names the caller in each call to an address, and sends requests when they may leave."""

    def __init__(self, links: OutgoingLinks, address: str) -> None:
        self._links = links
        self._address = address

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        self._link.wait(message_bytes(request), Traffic.CONTROL)
        return self._learning(continuation(self._with_caller(details), request))

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return self.intercept_unary_unary(continuation, details, request)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        if _name(details.method) not in _REQUESTS_SHAPED_BY_SENDER:
            requests = _paced(requests, lambda: self._link)
        return self._learning(continuation(self._with_caller(details), requests))

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        return self.intercept_stream_stream(continuation, details, requests)

    @property
    def _link(self) -> SharedLink:
        return self._links.link_at(self._address)

    def _learning(self, call: Any) -> Any:
        """Makes a call tell at its end which host serves at the address, if that is unknown."""

        def learn(ended: Any) -> None:
            if server := _host_of(ended.initial_metadata()):
                self._links.link_to(server, self._address)

        if self._links.emulation.is_given and not self._link.receiver:
            call.add_done_callback(learn)
        return call

    def _with_caller(self, details: Any) -> _CallDetails:
        caller = (HOST_KEY, self._links.host_id.encode())
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), caller],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )


def keep_link_to_caller(context: grpc.ServicerContext, links: OutgoingLinks) -> None:
    """Keeps the link to a caller with rights, and with it the rate that the link was found to have."""
    links.link_to_caller(_host_of(context.invocation_metadata()), is_checked=True)


def link_to_caller(context: grpc.ServicerContext, links: OutgoingLinks) -> SharedLink:
    """Returns the link from this host to the caller. A caller that is no host has a link without limits."""
    return links.link_to_caller(_host_of(context.invocation_metadata()))


def shaped_handler(
    function: Callable[[Any, Any], Any],
    streams: tuple[bool, bool],
    details: grpc.HandlerCallDetails,
    links: OutgoingLinks,
) -> Callable[[Any, Any], Any]:
    """Returns a handler whose requests and answers take the time of the emulated links.

    Args:
        function: The handler of one call.
        streams: Whether requests and answers are streams.
        details: The call. If it names no caller, its handler stays as it is.
    """
    caller, name = _host_of(details.invocation_metadata), _name(details.method)
    if not caller:
        return function
    link = links.link_to_caller(caller)

    def arriving(request: Any) -> Any:
        def delay_seconds() -> float:
            return links.delay_seconds(caller, links.host_id)

        if name in _REQUESTS_SHAPED_BY_SENDER:
            return request
        if streams[0]:
            return delayed(request, delay_seconds) if links.emulation.is_given else request
        _sleep(delay_seconds())
        return request

    def introduce(context: Any) -> None:
        if links.emulation.is_given:
            context.send_initial_metadata(((HOST_KEY, links.host_id.encode()),))

    def answer(request: Any, context: Any) -> Any:
        introduce(context)
        message = function(arriving(request), context)
        link.wait(message_bytes(message), Traffic.CONTROL)
        _sleep(link.delay_seconds)
        return message

    def stream_answers(request: Any, context: Any) -> Iterator[Any]:
        introduce(context)
        messages = function(arriving(request), context)
        if name not in _ANSWERS_SHAPED_BY_SENDER:
            messages = _paced(messages, lambda: link)
            if links.emulation.is_given:
                messages = delayed(messages, lambda: link.delay_seconds)
        yield from messages

    return stream_answers if streams[1] else answer


def delayed(messages: Iterable[T], delay_seconds: Callable[[], float]) -> Iterator[T]:
    """Yields each message a given time after it came, in order. A thread of its own takes the messages."""
    # Whoever takes the messages may be slow, so the number of delayed messages is bounded.
    line: queue.Queue[tuple[float, T | None, BaseException | None]] = queue.Queue(_MOST_DELAYED)
    abandoned = threading.Event()

    def append(message: T | None, failure: BaseException | None) -> bool:
        due_at = time.monotonic() + delay_seconds()
        while not abandoned.is_set():
            with suppress(queue.Full):
                line.put((due_at, message, failure), timeout=_POLL_SECONDS)
                return True
        return False

    def take() -> None:
        failure = None
        try:
            for message in messages:
                if not append(message, None):
                    return
        except BaseException as error:  # The thread that waits for messages raises it.
            failure = error
        append(None, failure)

    threading.Thread(target=take, name="delay", daemon=True).start()
    try:
        while True:
            due_at, message, failure = line.get()
            _sleep(due_at - time.monotonic())
            if failure is not None:
                raise failure
            if message is None:
                return
            yield message
    finally:
        abandoned.set()


def _paced(messages: Iterable[Any], link: Callable[[], SharedLink]) -> Iterator[Any]:
    for message in messages:
        link().wait(message_bytes(message), Traffic.CONTROL)
        yield message


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def _name(method: str) -> str:
    return method.rpartition("/")[2]


def _host_of(metadata: Any) -> str:
    named = next((value for key, value in metadata or () if key == HOST_KEY), b"")
    return named.decode(errors="replace")
