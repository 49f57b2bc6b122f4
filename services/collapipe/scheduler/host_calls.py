"""The calls of a job to its hosts, which end together when the job is cancelled or one of them fails."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from collapipe.errors import AttemptFailedError, CancelledError, CollapipeError, PeerLostError
from collapipe.rpc import ChannelPool, to_error, within_silence
from collapipe.v1 import control_unit_pb2_grpc, edge_server_pb2_grpc, scheduler_pb2

T = TypeVar("T")

_POLL_SECONDS = 0.2
_MEANWHILE_SECONDS = 0.8
"""Time between two calls of `meanwhile`. With 1,000 hosts, looking at all of them takes milliseconds."""


class HostCalls:
    """The calls of one job to its hosts. A host may be silent for `silence_seconds` between two answers.

    Args:
        meanwhile: Called at least once a second while the thread of the job waits for calls to end.
        why_unreachable: Returns why there is no connection to a host, or "".
    """

    def __init__(
        self,
        channels: ChannelPool,
        silence_seconds: float,
        meanwhile: Callable[[], object] = lambda: None,
        why_unreachable: Callable[[str], str] = lambda host_id: "",
    ) -> None:
        self.channels = channels
        self._silence_seconds = silence_seconds
        self._meanwhile = meanwhile
        self._next_meanwhile = 0.0
        self._why_unreachable = why_unreachable
        self._cancelled = threading.Event()
        self._cancel_reason = ""
        self._has_failed = False
        self._calls: set[Any] = set()
        self._lock = threading.Lock()

    def control_unit(
        self, host: scheduler_pb2.Host
    ) -> control_unit_pb2_grpc.ControlUnitServiceStub:
        """Returns the methods of a control unit. Their calls are given to `answers` or `last_answer`."""
        return control_unit_pb2_grpc.ControlUnitServiceStub(self.channels.channel(host.address))

    def edge_server(self, host: scheduler_pb2.Host) -> edge_server_pb2_grpc.EdgeServerServiceStub:
        """Returns the methods of an edge server, as `control_unit` does."""
        return edge_server_pb2_grpc.EdgeServerServiceStub(self.channels.channel(host.address))

    def cancel(self, reason: str) -> None:
        """Ends all calls with a `CancelledError` of this reason."""
        self._cancel_reason = reason
        self._cancelled.set()
        self._cancel_calls()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def is_ending(self) -> bool:
        """Whether the job is cancelled, or a failure ends all calls."""
        return self.is_cancelled or self._has_failed

    def end_all(self) -> None:
        """Ends all calls, also those that begin before the next attempt."""
        self._has_failed = True
        self._cancel_calls()

    def begin_attempt(self) -> None:
        """Allows calls again after a failure of some of them; raises `CancelledError` if the job is cancelled."""
        self._has_failed = False
        self.sleep(0)

    def sleep(self, seconds: float = _POLL_SECONDS) -> None:
        """Waits a moment; raises `CancelledError` if the job is cancelled."""
        if self._cancelled.wait(seconds):
            raise CancelledError(self._cancel_reason)

    def answers(self, call: Iterable[T], host_id: str, task: str) -> Iterator[T]:
        """Returns the answers of a streaming call.

        Args:
            task: What the host is asked to do, for error messages: "load its data".

        Raises:
            PeerLostError: The host ended, cannot be reached, or is silent for too long.
            CancelledError: The job was cancelled, or another call failed.
        """
        with self._open(call):
            yield from within_silence(
                call,
                self._silence_seconds,
                host_id,
                lambda: task,
                lambda: self._why_unreachable(host_id),
            )

    def ask(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Any, T]",
        request: Any,
        host_id: str,
        seconds: float,
    ) -> T:
        """Does what `collapipe.rpc.call` does. Raises also `CancelledError`, as `answers` does."""
        call = method.future(request, timeout=seconds)
        with self._open(call):
            try:
                return call.result()
            except grpc.FutureCancelledError:
                raise CancelledError("another call failed") from None
            except grpc.RpcError as error:
                told = to_error(error, host_id)
                if isinstance(told, CancelledError):  # The host says so, and not this job.
                    told = PeerLostError(
                        host_id,
                        f"{host_id} cancelled a call of the scheduler: {told}; look at the log of {host_id}",
                    )
                raise told from None

    @contextmanager
    def _open(self, call: Any) -> Iterator[None]:
        """Within the block, the call is cancelled when all calls of the job are. A `CancelledError` then says why."""
        with self._lock:
            self._calls.add(call)
        if self.is_ending:
            self._cancel_calls()
        try:
            yield
        except CancelledError as error:
            raise CancelledError(self._cancel_reason or str(error)) from error
        finally:
            with self._lock:
                self._calls.discard(call)

    def last_answer(
        self, call: Iterable[T], host_id: str, task: str, see: Callable[[T], None] = lambda _: None
    ) -> T:
        """Returns the last answer of a streaming call.

        Args:
            see: Called with each answer. Earlier ones mostly show only that the host is alive.
        """
        last = None
        for last in self.answers(call, host_id, task):
            see(last)
        if last is None:
            raise AttemptFailedError(f"{host_id} gave no answer when it was asked to {task}")
        return last

    def in_parallel(self, work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """Calls `work` for all items at the same time. A failure ends the calls of the others. Raises the first failure after all work
        has ended."""
        if not items:
            return []
        with ThreadPoolExecutor(len(items), "cluster") as executor:
            futures = [executor.submit(work, item) for item in items]
            first_failed, running = None, set(futures)
            while running:
                done, running = wait(running, _POLL_SECONDS, "FIRST_EXCEPTION")
                failed = [future for future in done if future.exception()]
                if failed and first_failed is None:
                    first_failed = failed[0]
                    self.end_all()
                self.call_meanwhile()
            if first_failed is not None:
                self.sleep(0)  # The job may have been cancelled since.
                first_failed.result()
            return [future.result() for future in futures]

    def run_detached(self, work: Callable[[], T]) -> T:
        """Runs work that cannot be interrupted. If the job is cancelled, its calls to hosts end, and its thread is left running."""
        done = start_detached(work)
        while not done.done():
            wait([done], timeout=_POLL_SECONDS)
            self.call_meanwhile()
            if self._cancelled.is_set():
                raise CancelledError(self._cancel_reason)
        return done.result()

    def call_meanwhile(self) -> None:
        """Calls `meanwhile`, unless that was a moment ago. Whoever waits for calls in another way has to call it several times a second."""
        if time.monotonic() >= self._next_meanwhile:
            self._meanwhile()
            self._next_meanwhile = time.monotonic() + _MEANWHILE_SECONDS

    def _cancel_calls(self) -> None:
        with self._lock:
            for call in self._calls:
                call.cancel()


def told_by(host_id: str, error: CollapipeError) -> CollapipeError:
    """Returns an error that a host answered with. Its text names the host."""
    error.told_by = host_id
    return error


def start_detached(work: Callable[[], T]) -> Future[T]:
    """Runs work in a thread of its own, for which the end of the process does not wait."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # Whoever asks for the result gets it.
            done.set_exception(error)

    threading.Thread(target=run, name="detached", daemon=True).start()
    return done
