"""The data plane: one bidirectional stream between two neighbouring stages, for one attempt.

The previous stage opens the stream and sends activations; gradients and predictions come back on it. Sending
happens in gRPC's thread, so that a stage computes while its results travel.
"""

import threading
from collections.abc import Callable, Iterable, Iterator

import grpc

from collapipe.errors import CollapipeError, CorruptDataError, PeerLostError
from collapipe.neighbour_streams.endpoints import LinkMeter, LinkReceiver, LinkSender
from collapipe.rpc import Outbox, to_error
from collapipe.stage_runtime import Mailbox
from collapipe.tensors import Frame
from collapipe.v1 import stage_pb2, stage_pb2_grpc

Request = stage_pb2.ExchangeActivationsRequest
Response = stage_pb2.ExchangeActivationsResponse


class DownstreamLink:
    """The link to the next stage: opened by this one.

    Args:
        stub: Of the next stage.
        host_id: The next stage's host, for errors.
        opening: Binds the stream to the attempt.
        sender: Sends what goes there.
        receiver: Receives what comes back.
        mailbox: Gets the failure of the link.
        meter: Counts what was sent.
    """

    def __init__(
        self,
        stub: stage_pb2_grpc.StageServiceStub,
        host_id: str,
        opening: stage_pb2.OpenLink,
        sender: LinkSender,
        receiver: LinkReceiver,
        mailbox: Mailbox,
        meter: LinkMeter,
    ) -> None:
        self._host_id = host_id
        self._sender = sender
        self._receiver = receiver
        self._outbox: Outbox[Frame] = Outbox()
        self._mailbox = mailbox
        self._meter = meter
        self._closed = False
        self._call = stub.ExchangeActivations(self._requests(opening), wait_for_ready=True)
        threading.Thread(target=self._receive, name=f"link to {host_id}", daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Queues a frame; the window of the stage bounds the queue."""
        self._outbox.put(frame)

    def close(self, *, broken: bool) -> None:
        """Ends the link behind what is queued, or at once when the attempt broke off; neither is a failure."""
        self._closed = True
        self._outbox.close()
        if broken:
            self._call.cancel()

    def _requests(self, opening: stage_pb2.OpenLink) -> Iterator[Request]:
        yield Request(open=opening)
        for part in self._sender.parts(self._outbox, self._meter.sent):
            yield Request(chunk=part) if isinstance(part, bytes) else Request(frame=part)

    def _receive(self) -> None:
        try:
            receive_frames(self._call, self._receiver)
            failure: CollapipeError = PeerLostError(
                self._host_id, f"{self._host_id} closed its link in the middle of the round"
            )
        except grpc.RpcError as error:
            failure = to_error(error, self._host_id)
        except CollapipeError as error:
            failure = error
        if not self._closed:
            self._mailbox.fail(failure)


def receive_frames(parts: Iterable[Request] | Iterable[Response], receiver: LinkReceiver) -> None:
    """Receives the frames of a stream until it ends.

    Raises:
        CorruptDataError: The stream is not made of whole frames.
        grpc.RpcError: The stream broke.
    """
    try:
        for part in parts:
            kind = part.WhichOneof("part")
            if kind == "frame":
                receiver.begin(part.frame)
            elif kind == "chunk":
                receiver.add(part.chunk)
            elif kind != "opened":
                raise CorruptDataError(
                    f"a link carried {kind or 'an empty message'} instead of a frame"
                )
    finally:
        receiver.close()


def serve_upstream(
    requests: Iterator[Request],
    outbox: Outbox[Frame],
    sender: LinkSender,
    receiver: LinkReceiver,
    meter: LinkMeter,
    on_loss: Callable[[CollapipeError], None],
) -> Iterator[Response]:
    """Serves the link from the previous stage: what it sends is received, the outbox goes back.

    Args:
        requests: Of the call, behind its opening.
        outbox: Frames for the previous stage; closing it ends the link.
        sender: Sends them.
        receiver: Receives what the previous stage sends.
        meter: Counts what was sent.
        on_loss: Told when the previous stage went away or sent what is no frame.
    """

    def receive() -> None:
        try:
            receive_frames(requests, receiver)
        except CollapipeError as error:
            on_loss(error)
        except Exception:  # gRPC raises a bare Exception when the caller went away
            on_loss(PeerLostError("", "the previous stage broke its link"))

    threading.Thread(target=receive, name="link from the previous stage", daemon=True).start()
    yield Response(opened=stage_pb2.LinkOpened())
    for part in sender.parts(outbox, meter.sent):
        yield Response(chunk=part) if isinstance(part, bytes) else Response(frame=part)
