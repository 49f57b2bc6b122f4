"""One bidirectional gRPC stream between two neighbouring stages, for one attempt.

The earlier stage opens the stream and sends activations. Activation gradients and predictions come back on it.
Other threads send and receive, so that a stage computes while its frames travel.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import grpc

from collapipe.errors import CollapipeError, CorruptDataError, InvalidInputError, PeerLostError
from collapipe.neighbour_streams.incoming_link import IncomingLink
from collapipe.neighbour_streams.outgoing_link import OutgoingLink
from collapipe.rpc import Outbox, explain_unexpected, to_error
from collapipe.tensors import Frame
from collapipe.v1 import stage_pb2, stage_pb2_grpc

logger = logging.getLogger(__name__)

Request = stage_pb2.ExchangeActivationsRequest
Response = stage_pb2.ExchangeActivationsResponse
Message = TypeVar("Message", Request, Response)


@dataclass(frozen=True)
class NeighbourLinks:
    """The two links between a stage and one of its neighbours.

    Args:
        stage_labels: Cluster index and stage index of this stage, for metrics.
        outbox: Frames for the neighbour. The in-flight window of the stage bounds their number.
    """

    stage_labels: tuple[str, str]
    outbox: Outbox[Frame]
    outgoing: OutgoingLink
    incoming: IncomingLink

    def send(self, message: type[Message]) -> Iterator[Message]:
        """Yields the frames of the outbox as messages of one type, until the outbox is closed."""
        for part in self.outgoing.encoded_parts(self.outbox, self.stage_labels):
            yield message(chunk=part) if isinstance(part, bytes) else message(frame=part)

    def receive(self, parts: Iterable[Request] | Iterable[Response]) -> None:
        """Receives the frames of the neighbour until the stream ends.

        Raises:
            PeerLostError: The stream does not consist of whole frames, or bytes are damaged.
            DivergedError: A value is not finite.
            grpc.RpcError: The stream broke.
        """
        try:
            for part in parts:
                kind = part.WhichOneof("part")
                if kind == "frame":
                    self.incoming.begin_frame(part.frame)
                elif kind == "chunk":
                    self.incoming.add_chunk(part.chunk)
                elif kind != "opened":
                    raise CorruptDataError(
                        f"a stream carried {kind or 'an empty message'} instead of a frame"
                    )
        except (CorruptDataError, InvalidInputError) as error:
            sender = self.incoming.sender
            raise PeerLostError(sender, f"{sender} sent damaged data: {error}") from error
        finally:
            self.incoming.close()


class StreamToNextStage:
    """The stream that this stage opens to the next stage.

    Args:
        opens_within_seconds: How long the next stage may take to accept the stream. It has been configured, so it could at once.
        on_failure: Called from another thread if the stream fails before `close`.
    """

    def __init__(
        self,
        stub: stage_pb2_grpc.StageServiceStub,
        opening: stage_pb2.OpenLink,
        links: NeighbourLinks,
        opens_within_seconds: float,
        on_failure: Callable[[CollapipeError], None],
    ) -> None:
        self._links = links
        self._on_failure = on_failure
        self._closed = False
        self._call = stub.ExchangeActivations(self._requests(opening), wait_for_ready=True)
        self._opening = threading.Timer(opens_within_seconds, self._not_opened)
        self._opening.daemon = True
        self._opening.start()
        name = f"stream to {links.outgoing.receiver}"
        threading.Thread(target=self._receive, name=name, daemon=True).start()

    def close(self, *, broken: bool) -> None:
        """Ends the stream behind the frames in the outbox, or at once if the attempt is broken."""
        self._closed = True
        self._opening.cancel()
        self._links.outbox.close()
        if broken:
            self._call.cancel()

    def _requests(self, opening: stage_pb2.OpenLink) -> Iterator[Request]:
        yield Request(open=opening)
        yield from self._links.send(Request)

    def _answers(self) -> Iterator[Response]:
        for answer in self._call:
            self._opening.cancel()
            yield answer

    def _not_opened(self) -> None:
        host_id, seconds = self._links.outgoing.receiver, self._opening.interval
        failure = PeerLostError(
            host_id,
            f"{host_id} has not accepted the stream of the stage before it for {seconds:g} s: it hangs, or the link between them "
            "is cut in one direction",
        )
        self._on_failure(failure)
        self._call.cancel()

    def _receive(self) -> None:
        host_id = self._links.outgoing.receiver
        try:
            self._links.receive(self._answers())
            failure: CollapipeError = PeerLostError(
                host_id, f"{host_id} closed its stream in the middle of the round"
            )
        except grpc.RpcError as error:
            failure = to_error(error, host_id)
        except CollapipeError as error:
            failure = error
        except Exception as error:  # Whatever arrives must not end this thread silently.
            logger.exception("receiving from %s failed unexpectedly", host_id)
            failure = PeerLostError(
                host_id,
                f"this host could not use what {host_id} sent. On this host: {explain_unexpected(error)}",
            )
        if not self._closed:
            self._on_failure(failure)


def serve_previous_stage(
    requests: Iterator[Request],
    links: NeighbourLinks,
    on_failure: Callable[[CollapipeError], None],
) -> Iterator[Response]:
    """Serves the stream that the previous stage opened, until the outbox is closed.

    Args:
        requests: The messages after the opening one.
        on_failure: Called from another thread if the stream breaks or carries something else than frames.
    """

    def receive() -> None:
        try:
            links.receive(requests)
        except CollapipeError as error:
            on_failure(error)
        except Exception as error:
            reason = "the previous stage broke its stream"
            if not isinstance(error, grpc.RpcError):  # It says that the caller has gone away.
                logger.exception("receiving from the previous stage failed unexpectedly")
                reason = f"this host could not use what the previous stage sent. On this host: {explain_unexpected(error)}"
            on_failure(PeerLostError("", reason))

    threading.Thread(target=receive, name="stream from the previous stage", daemon=True).start()
    yield Response(opened=stage_pb2.LinkOpened())
    yield from links.send(Response)
