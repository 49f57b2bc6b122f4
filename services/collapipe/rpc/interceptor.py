"""Surrounds every handler of a server: checks the caller, counts the call, turns errors into statuses."""

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from collapipe.certificates.revoked_keys import RevokedKeyList
from collapipe.errors import CollapipeError, InvalidInputError, NotPermittedError, PeerLostError
from collapipe.rpc.call_shaping import shaped_handler
from collapipe.rpc.caller_connections import CallerConnections
from collapipe.rpc.permissions import (
    Permissions,
    caller_name,
    check_not_revoked,
    check_permitted,
    check_protocol,
)
from collapipe.rpc.processor_shares import CALL_SECONDS, Meter, ProcessorShares
from collapipe.rpc.refusal_log import RefusalLog
from collapipe.rpc.silent_calls import SilentCalls
from collapipe.rpc.status import details, explain_unexpected, to_code, trailing_metadata
from collapipe.telemetry import metrics
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks

logger = logging.getLogger(__name__)

_KINDS = {
    (False, False): ("unary", "unary_unary"),
    (False, True): ("server_stream", "unary_stream"),
    (True, False): ("client_stream", "stream_unary"),
    (True, True): ("bidi_stream", "stream_stream"),
}
"""Name in metrics, and attribute of the function. The keys say whether requests and responses are streams."""

STREAM_THREADS = 1024
"""Most streams of one method that a server works on at the same time. An open stream is one call and takes one thread.

An edge server has two streams for each cluster of a job, by two methods, and a scheduler one for each client that watches a job.
A job has at most 1,000 clusters. A thread that waits costs little, and is only made when all others are busy."""

UNARY_THREADS = 64
"""Most other calls of one method that a server works on at the same time. They end soon, so the next ones hardly wait."""

_MOST_OF_A_CALLER = {True: STREAM_THREADS // 4, False: UNARY_THREADS // 2}
"""Calls of one caller to one method at the same time, for streams and for others. Otherwise one caller could hold all threads."""

_SCHEDULER = "/collapipe.v1.SchedulerService/"
_PROBE = "/collapipe.v1.LinkService/ReceiveProbe"
_MOST_OF_A_METHOD = {
    _PROBE: 4,
    "/collapipe.v1.EdgeServerService/ExportModel": 2,
    f"{_SCHEDULER}RegisterHost": 2,
    f"{_SCHEDULER}UseModel": 16,
    f"{_SCHEDULER}WatchJob": 64,
    f"{_SCHEDULER}GetRecords": 4,
    f"{_SCHEDULER}DumpJob": 4,
    "/collapipe.v1.StorageService/DumpRows": 4,
    f"{_SCHEDULER}GetTrace": 4,
    f"{_SCHEDULER}ExplainDecision": 4,
    f"{_SCHEDULER}ReplayDecision": 2,
}
"""Calls of one caller at the same time to methods that take more than a thread: the bytes of a probe, seconds for which the scheduler
calls a host back, a copy of the model on the disk, up to 8 MiB of texts that wait, or the processor of the scheduler. A client may have 32 jobs that wait, so it can watch all."""

_MOST_REQUEST_BYTES = 64 << 10
_LARGE_REQUESTS = {f"{_SCHEDULER}{name}" for name in ("SubmitJob", "CheckResume", "UseModel")}
"""No other request to the scheduler may have more than `_MOST_REQUEST_BYTES`, because it is kept while its call is open."""
_HEALTH = "/grpc.health.v1.Health/"
_OF_ALL_VERSIONS = (_HEALTH, "/collapipe.v1.EnrollmentService/")
"""A box whose version does not fit must still be able to renew its certificate. A join token has the versions itself."""
_REGISTER = f"{_SCHEDULER}RegisterHost"
"""Looks at the versions of the protocol itself, because the scheduler shows which hosts it refuses."""
_HEARTBEAT = f"{_SCHEDULER}Heartbeat"
"""Looks for revoked keys itself, because a caller with one must still be able to learn the list."""

_WITHOUT_A_SHARE = (_HEARTBEAT, f"{_SCHEDULER}UseModel")
"""The methods of the scheduler whose calls do not count for their callers' shares: heartbeats, and uses of a model, which may take
long."""
_ADVANCE_SECONDS = {
    _PROBE: 0.2,  # It uses less, but a host needs few of them.
    **{
        f"{_SCHEDULER}{name}": 0.05
        for name in ("GetRecords", "DumpJob", "GetTrace", "ExplainDecision", "ReplayDecision")
    },
}
"""Processor time that is counted when a call begins. Otherwise, a caller could begin many calls before any of them counts."""
_WATCH_SECONDS = 5.0
"""For how long after its first answer a call that watches a job counts. Meanwhile it sends the stored events. Later it sends only new
ones, and `scheduler/events.py` limits their number."""


class CallInterceptor(grpc.ServerInterceptor):
    """Wraps every handler. Without permissions, it allows every call.

    Every handler takes a stream of requests, because gRPC calls it before the first request only then. So a caller without
    permission is refused whatever it sends.

    Each method has threads of its own. So streams that stay open hold up no heartbeats, and no streams of other methods.

    Args:
        revoked: Callers with these keys are refused. Their open streams end with the next message.
        links: The links of the answers; `None` if nothing shapes them.
    """

    def __init__(
        self,
        permissions: Permissions | None,
        revoked: RevokedKeyList,
        links: OutgoingLinks | None = None,
    ) -> None:
        self._permissions = permissions
        self._revoked = revoked
        self._links = links
        self._silent_calls = SilentCalls()
        self._shares = ProcessorShares()
        self.connections = CallerConnections()
        self._lock = threading.Lock()
        self._running: Counter[tuple[str, str]] = Counter()
        """Number of calls by method and caller."""
        self._refusals = RefusalLog()
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def close(self) -> None:
        """Ends the thread that looks after calls. Those in progress go on."""
        self._silent_calls.close()

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        kind = (bool(handler.request_streaming), bool(handler.response_streaming))
        grpc_type, attribute = _KINDS[kind]
        function = getattr(handler, attribute)
        if self._links is not None:
            function = shaped_handler(function, kind, handler_call_details, self._links)

        parse = handler.request_deserializer or bytes
        most = _MOST_OF_A_METHOD.get(method, _MOST_OF_A_CALLER[any(kind)])

        def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            with self._around_call(method, grpc_type, context, most):
                return function(self._request(method, kind, parse, requests, context), context)

        def stream_answers(
            requests: Iterator[bytes], context: grpc.ServicerContext
        ) -> Iterator[Any]:
            with self._around_call(method, grpc_type, context, most) as meter:
                answers = function(self._request(method, kind, parse, requests, context), context)
                for message in self._while_permitted(answers, context):
                    yield message
                    if meter is not None:
                        meter.count()

        if handler.response_streaming:
            wrapped, factory = stream_answers, grpc.stream_stream_rpc_method_handler
        else:
            wrapped, factory = answer, grpc.stream_unary_rpc_method_handler
        # gRPC looks for this attribute.
        vars(wrapped)["experimental_thread_pool"] = self._pool(method, is_stream=any(kind))
        return factory(wrapped, None, handler.response_serializer)

    def _request(
        self,
        method: str,
        kind: tuple[bool, bool],
        parse: Callable[[bytes], Any],
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> Any:
        """Waits for the first request, and returns what the handler takes: this request, or the stream of all.

        Raises:
            CollapipeError: No request came.
        """
        messages = _parsed(method, parse, requests)
        with self._silent_calls.waiting(method, caller_name(context), context):
            first = next(messages, None)
        if kind[0]:
            stream = itertools.chain(() if first is None else (first,), messages)
            return self._while_permitted(stream, context)
        if first is None:
            raise InvalidInputError(
                f"a call of {method} needs one message, but none was sent: send one"
            )
        return first

    def _while_permitted(
        self, messages: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """Yields messages until the key of the caller is revoked; then raises `NotPermittedError`."""
        num_changes = 0
        try:
            for message in messages:
                if num_changes != self._revoked.num_changes:
                    num_changes = self._revoked.num_changes
                    check_not_revoked(context, self._revoked)
                yield message
        finally:
            # A handler that is a generator ends with the call, and not when Python finds it unused.
            getattr(messages, "close", lambda: None)()

    @contextmanager
    def _counted(self, method: str, caller: str, most: int) -> Iterator[None]:
        """Refuses a call within the block if its caller has `most` of the same method; raises `PeerLostError`."""
        key = method, caller
        with self._lock:
            has_most = self._running[key] >= most
            self._running[key] += not has_most
        if has_most:
            self._shares.refuse(caller, method)
            raise PeerLostError(
                "",
                f"{caller} has {most} calls of {method}, and may not have more: try again when one has ended",
            )
        try:
            yield
        finally:
            with self._lock:
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]

    def _pool(self, method: str, *, is_stream: bool) -> ThreadPoolExecutor:
        """Returns the threads of a method. Only one thread of gRPC calls this, the one that takes in all calls."""
        if method not in self._pools:
            num_threads = STREAM_THREADS if is_stream else UNARY_THREADS
            self._pools[method] = ThreadPoolExecutor(num_threads, method.rpartition("/")[2])
        return self._pools[method]

    @contextmanager
    def _around_call(
        self, method: str, grpc_type: str, context: grpc.ServicerContext, most: int
    ) -> Iterator[Meter | None]:
        """Checks the caller before the block. If the call counts for its share of the processor, waits for that share, and gives the
        block a meter.

        Other calls get no meter: what hosts do for a job is limited by the job.
        """
        _, service, name = method.split("/", 2)
        labels = (grpc_type, service, name)
        started = time.perf_counter()
        metrics.CALLS_STARTED.labels(*labels).inc()

        def end(error: BaseException | None) -> None:
            code = _status_code(error, context)
            metrics.CALLS_HANDLED.labels(*labels, code.name).inc()
            metrics.CALL_SECONDS.labels(*labels).observe(time.perf_counter() - started)
            if isinstance(error, NotPermittedError):
                is_plain = self._permissions is None
                who = context.peer().rpartition(":")[0] if is_plain else caller_name(context)
                self._refusals.tell(method, who, error)
            if isinstance(error, CollapipeError):
                context.set_trailing_metadata(trailing_metadata(error))
                context.abort(code, details(str(error)))
            elif isinstance(error, Exception) and code is grpc.StatusCode.INTERNAL:
                logger.error("%s/%s failed unexpectedly", service, name, exc_info=error)
                context.abort(code, explain_unexpected(error))

        meter = None
        try:
            caller = caller_name(context)
            try:
                self._check_permitted(method, context)
            except NotPermittedError:
                # A refused heartbeat that waits would keep a thread from the heartbeats of other hosts.
                if method != _HEARTBEAT:
                    self._shares.refuse(caller, method)
                raise
            self.connections.check(caller, context.peer())
            with self._counted(method, caller, most):
                if has_share(method):
                    meter = self._take_share(method, caller)
                yield meter
        # An error refers to this frame. If a variable of this frame kept the error, both would stay until Python looks for
        # cycles, and with them the call. gRPC counts such a call as one that its connection has open.
        except BaseException as error:
            end(error)
            raise
        finally:
            if meter is not None:
                meter.count()
        end(None)

    def _check_permitted(self, method: str, context: grpc.ServicerContext) -> None:
        """Refuses a call that the caller may not make; raises `NotPermittedError`. Every peer may check the health."""
        if method.startswith(_HEALTH):
            return
        if self._permissions is not None:
            check_permitted(method, context, self._permissions)
            if method != _HEARTBEAT:
                check_not_revoked(context, self._revoked)
        if method != _REGISTER and not method.startswith(_OF_ALL_VERSIONS):
            check_protocol(context, caller_name(context), "the service that was called")

    def _take_share(self, method: str, caller: str) -> Meter:
        """Waits until a caller may use the processor. Raises the errors of `ProcessorShares.begin`."""
        advance = _ADVANCE_SECONDS.get(method, CALL_SECONDS)
        self._shares.begin(caller, method, advance)
        watches = method == f"{_SCHEDULER}WatchJob"
        return Meter(self._shares, caller, advance, _WATCH_SECONDS if watches else None)


def has_share(method: str) -> bool:
    """Returns whether a call counts for its caller's share of the processor."""
    return method == _PROBE or (method.startswith(_SCHEDULER) and method not in _WITHOUT_A_SHARE)


def _parsed(method: str, parse: Callable[[bytes], Any], requests: Iterator[bytes]) -> Iterator[Any]:
    """Parses messages. If gRPC did, each damaged one would write a traceback to the log."""
    is_small = method.startswith(_SCHEDULER) and method not in _LARGE_REQUESTS
    for data in requests:
        if is_small and len(data) > _MOST_REQUEST_BYTES:
            raise InvalidInputError(
                f"a message of {len(data)} bytes to {method} is too large: send at most {_MOST_REQUEST_BYTES}"
            )
        try:
            message = parse(data)
        except DecodeError:
            raise InvalidInputError(
                f"a message of {len(data)} bytes to {method} is damaged: run the same version of CollaPipe on all machines"
            ) from None
        yield message


def _status_code(error: BaseException | None, context: grpc.ServicerContext) -> grpc.StatusCode:
    """Returns the status with which a call ends.

    If the caller goes away, a handler that reads requests sees an RpcError or the end of the requests.
    """
    if isinstance(error, CollapipeError):
        return to_code(error)
    may_be_cancelled = error is None or isinstance(error, grpc.RpcError)
    if isinstance(error, GeneratorExit) or (may_be_cancelled and not context.is_active()):
        return grpc.StatusCode.CANCELLED
    if error is None:
        return grpc.StatusCode.OK
    # The type stubs lack `code`: a handler may have set a status by itself.
    return context.code() or grpc.StatusCode.INTERNAL  # type: ignore[attr-defined]
