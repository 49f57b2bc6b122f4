"""Long work over a stream: signs of life on one side, a deadline on silence on the other.

A slow Raspberry Pi that reports progress is not dead, and a dead one reports nothing: so whoever works says
something every second, and whoever waits gives up after a silence, not after a duration.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import grpc

from collapipe.errors import CancelledError, PeerLostError
from collapipe.rpc.status import to_error

T = TypeVar("T")

_READ_AHEAD = 8
"""Answers that are read before they are wanted."""

SIGN_OF_LIFE_SECONDS = 1.0
"""How often work in progress says that it is alive."""


class Outbox(Generic[T]):
    """A queue that a stream drains: iterating over it ends after `close`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        """Appends an item; what is put after `close` is never sent."""
        self._items.put(item)

    def close(self) -> None:
        """Ends the stream behind what is queued."""
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
    """Answers a stream from work in a thread of its own.

    Args:
        work: Does the work; is given a function that sends a message. What it raises ends the stream.
        sign_of_life: Makes the message that is sent when the work was silent for a second.
        cancel: Called once if the caller goes away before the work ends; must make `work` end soon.
        context: Of the call.

    Yields:
        What `work` sends, and signs of life.
    """
    outbox: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    over = (
        threading.Lock()
    )  # taken by what comes first: the end of the work, or the caller's leaving

    def run() -> None:
        failure = None
        try:
            work(lambda message: outbox.put((message, None)))
        except BaseException as error:  # handed over to the thread that answers
            failure = error
        over.acquire(blocking=False)
        outbox.put((None, failure))

    def on_leaving() -> None:
        if over.acquire(blocking=False):
            cancel(CancelledError("whoever asked for this work went away"))

    thread = threading.Thread(target=run, name="work", daemon=True)
    if not context.add_callback(on_leaving):
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
    finally:  # also when the caller went away between two messages
        on_leaving()
        thread.join()


def within_silence(
    call: Iterable[T], silence_seconds: float, host_id: str, waiting_for: Callable[[], str]
) -> Iterator[T]:
    """Iterates over the answers of a streaming call, and gives up when they stop coming.

    Args:
        call: A streaming call of a stub.
        silence_seconds: Longest wait for the next answer.
        host_id: The peer, for errors.
        waiting_for: What the caller waits for, in words.

    Raises:
        PeerLostError: The peer ended, cannot be reached, or is silent.
        CollapipeError: What the peer answered with.
    """
    # bounded: a caller that is slower than the network holds it up, and is not filled with what it brings
    answers: queue.Queue[T | BaseException | None] = queue.Queue(_READ_AHEAD)
    abandoned = threading.Event()

    def pump() -> None:
        try:
            for answer in call:
                answers.put(answer)
                if abandoned.is_set():
                    return
        except grpc.RpcError as error:
            answers.put(to_error(error, host_id))
        else:
            answers.put(None)

    threading.Thread(target=pump, name=f"answers of {host_id}", daemon=True).start()
    try:
        while True:
            try:
                answer = answers.get(timeout=silence_seconds)
            except queue.Empty:
                raise PeerLostError(
                    host_id,
                    f"{host_id} has said nothing for {silence_seconds:g} s while it was to "
                    f"{waiting_for()}: see whether it runs and can be reached",
                ) from None
            if answer is None:
                return
            if isinstance(answer, BaseException):
                raise answer
            yield answer
    finally:
        call.cancel()  # type: ignore[attr-defined]
        abandoned.set()
        while not answers.empty():  # lets a pump go on that waits for room
            answers.get_nowait()
