"""Calls that take long: the server streams signs of life, and the caller gives up after a silence.

A slow Raspberry Pi that reports progress is alive. So there is no limit on the duration of a call, but on the
silence of the server.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import grpc

from collapipe.errors import CancelledError, PeerLostError
from collapipe.rpc.status import to_error

T = TypeVar("T")

_READ_AHEAD = 8
"""Answers that are received before the caller asks for them."""

SIGN_OF_LIFE_SECONDS = 1.0
"""Longest time between two messages of a working server."""


class Outbox(Generic[T]):
    """A queue of messages for a stream. Iterating over it ends after `close`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        """Appends an item. Items that are put after `close` are never sent."""
        self._items.put(item)

    def __len__(self) -> int:
        return self._items.qsize()

    def close(self) -> None:
        """Ends the stream behind the queued items."""
        self._items.put(None)

    def __iter__(self) -> Iterator[T]:
        while (item := self._items.get()) is not None:
            yield item


def work_with_signs_of_life(
    work: Callable[[Callable[[T], None]], None],
    sign_of_life: Callable[[], T],
    cancel: Callable[[CancelledError], None],
    context: grpc.ServicerContext,
) -> Iterator[T]:
    """Runs work in its own thread, and yields its messages and signs of life.

    Args:
        work: Does the work, given a function that sends a message. Its exception ends the stream.
        sign_of_life: Makes the message for each second in which the work sends nothing.
        cancel: Called once if the caller goes away before the work ends. It must make `work` end soon.
    """
    outbox: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    # Whichever comes first acquires this lock for good: the end of the work, or the departure of the caller.
    ended = threading.Lock()

    def run() -> None:
        failure = None
        try:
            work(lambda message: outbox.put((message, None)))
        except BaseException as error:  # The thread that answers the call raises it.
            failure = error
        ended.acquire(blocking=False)
        outbox.put((None, failure))

    def on_departure() -> None:
        if ended.acquire(blocking=False):
            cancel(CancelledError("the caller of this work went away"))

    thread = threading.Thread(target=run, name="work", daemon=True)
    if not context.add_callback(on_departure):
        raise CancelledError("the caller went away before the work began")
    thread.start()
    try:
        while True:
            try:
                message, error = outbox.get(timeout=SIGN_OF_LIFE_SECONDS)
            except queue.Empty:
                yield sign_of_life()
                continue
            if message is not None:
                yield message
            elif error is not None:
                raise error
            else:
                return
    finally:  # gRPC also ends this generator here if the caller goes away between two messages.
        on_departure()
        thread.join()


def within_silence(
    call: Iterable[T],
    silence_seconds: float,
    host_id: str,
    waiting_for: Callable[[], str],
    why_unreachable: Callable[[], str] = lambda: "",
    refused_seconds: float | None = None,
) -> Iterator[T]:
    """Yields the answers of a streaming call, and gives up after a silence.

    Args:
        call: A streaming call of a stub.
        silence_seconds: Longest wait for the next answer.
        waiting_for: Returns the task of the peer in words, for errors.
        why_unreachable: Asked if not even a first answer has come. Returns why there is no connection, or "".
        refused_seconds: How often it is asked before the silence is over. A peer that refuses connections is given up then.

    Raises:
        PeerLostError: The peer ended, cannot be reached, or is silent.
        CollapipeError: The error that the peer answered with.
    """
    # If the caller is slower than the network, the bound makes the peer wait, so that memory does not fill up.
    answers: queue.Queue[T | BaseException | None] = queue.Queue(_READ_AHEAD)
    abandoned = threading.Event()

    def receive() -> None:
        try:
            for answer in call:
                answers.put(answer)
                if abandoned.is_set():
                    return
        except grpc.RpcError as error:
            answers.put(to_error(error, host_id))
        else:
            answers.put(None)

    threading.Thread(target=receive, name=f"answers of {host_id}", daemon=True).start()
    has_answered, heard_at = False, time.monotonic()
    try:
        while True:
            left = heard_at + silence_seconds - time.monotonic()
            asks_soon = not has_answered and refused_seconds is not None and refused_seconds < left
            try:
                answer = answers.get(timeout=refused_seconds if asks_soon else max(left, 0.0))
            except queue.Empty:
                reason = "" if has_answered else why_unreachable()
                if asks_soon and not reason:
                    continue
                raise PeerLostError(
                    host_id,
                    reason
                    or f"{host_id} has sent no sign of life for {silence_seconds:g} s while it should "
                    f"{waiting_for()}: check that it runs and can be reached",
                ) from None
            if answer is None:
                return
            if isinstance(answer, BaseException):
                raise answer
            has_answered = True
            yield answer
            heard_at = time.monotonic()
    finally:
        call.cancel()  # type: ignore[attr-defined]
        abandoned.set()
        while not answers.empty():  # The receiving thread may wait for room.
            answers.get_nowait()
