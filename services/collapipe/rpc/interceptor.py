"""What happens around every handler: callers are checked, errors become statuses, calls are counted."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from collapipe.errors import CollapipeError
from collapipe.rpc.permissions import Permissions, check_permitted
from collapipe.rpc.status import details, to_code, trailing_metadata
from collapipe.telemetry import metrics

logger = logging.getLogger(__name__)

_FACTORIES = {
    (False, False): ("unary", grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): ("server_stream", grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): ("client_stream", grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): ("bidi_stream", grpc.stream_stream_rpc_method_handler, "stream_stream"),
}

_HEALTH = "/grpc.health.v1.Health/"


class CallInterceptor(grpc.ServerInterceptor):
    """Admits callers by their roles, maps what handlers raise to statuses, counts calls under the established names.

    Args:
        callers: Who may call what; `None` in plain text, where nobody is known.
    """

    def __init__(self, callers: Permissions | None) -> None:
        self._callers = callers

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Wraps the handler of a call."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        # open to every peer; and wrapped, health would lose its own thread
        if handler is None or method.startswith(_HEALTH):
            return handler
        streams = (bool(handler.request_streaming), bool(handler.response_streaming))
        grpc_type, factory, attribute = _FACTORIES[streams]
        behaviour = getattr(handler, attribute)
        wrapped = (
            self._streaming(behaviour, method, grpc_type)
            if streams[1]
            else self._unary(behaviour, method, grpc_type)
        )
        return factory(wrapped, handler.request_deserializer, handler.response_serializer)

    def _unary(
        self, behaviour: Callable[..., Any], method: str, grpc_type: str
    ) -> Callable[..., Any]:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            with _Observed(method, grpc_type, context):
                self._admit(method, context)
                return behaviour(request, context)

        return handle

    def _streaming(
        self, behaviour: Callable[..., Any], method: str, grpc_type: str
    ) -> Callable[..., Iterator[Any]]:
        def handle(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with _Observed(method, grpc_type, context):
                self._admit(method, context)
                yield from behaviour(request, context)

        return handle

    def _admit(self, method: str, context: grpc.ServicerContext) -> None:
        if self._callers is not None:
            check_permitted(method, context, self._callers)


class _Observed:
    """One call, from its start to its status."""

    def __init__(self, method: str, grpc_type: str, context: grpc.ServicerContext) -> None:
        _, service, name = method.split("/", 2)
        self._labels = (grpc_type, service, name)
        self._context = context

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        metrics.CALLS_STARTED.labels(*self._labels).inc()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        code = grpc.StatusCode.OK
        if isinstance(error, CollapipeError):
            code = to_code(error)
        elif isinstance(error, GeneratorExit) or (
            # to who reads requests, a caller that went away shows as an error or as their end
            (error is None or isinstance(error, grpc.RpcError)) and not self._context.is_active()
        ):
            code = grpc.StatusCode.CANCELLED
        elif error is not None:
            # the stubs do not know `code`
            code = self._context.code() or grpc.StatusCode.INTERNAL  # type: ignore[attr-defined]
        seconds = time.perf_counter() - self._started
        metrics.CALLS_HANDLED.labels(*self._labels, code.name).inc()
        metrics.CALL_SECONDS.labels(*self._labels).observe(seconds)
        if isinstance(error, CollapipeError):
            self._context.set_trailing_metadata(trailing_metadata(error))
            self._context.abort(code, details(str(error)))
        elif isinstance(error, Exception) and code is grpc.StatusCode.INTERNAL:
            logger.error("%s failed unexpectedly", "/".join(self._labels[1:]), exc_info=error)
            explanation = details(f"{type(error).__name__}: {error}")
            self._context.abort(code, f"{explanation}; see the log of this service")
