"""The data plane: one bidirectional stream between two neighbouring stages, for one attempt.

The previous stage opens the stream and sends activations; gradients and predictions come back on it. Sending
happens in gRPC's thread, so that a stage computes while its results travel.
"""

import threading
from collections.abc import Callable, Iterable, Iterator

import grpc

from collapipe.errors import CollapipeError, CorruptDataError, PeerLostError
from collapipe.pipeline import Mailbox
from collapipe.rpc import Outbox, to_error
from collapipe.telemetry import metrics
from collapipe.tensors import Frame, FrameAssembler, encode_frame
from collapipe.v1 import stage_pb2, stage_pb2_grpc

Request = stage_pb2.ExchangeActivationsRequest
Response = stage_pb2.ExchangeActivationsResponse


class LinkMeter:
    """Counts what one stage exchanges with one neighbour."""

    def __init__(self, cluster_index: int, stage_index: int) -> None:
        self._labels = (str(cluster_index), str(stage_index))
        self.received_bytes = 0
        """Bytes that have arrived, also of frames that are not complete."""

    def sent(self, frame: Frame) -> None:
        """Counts a frame that left."""
        metrics.link_bytes(*self._labels, _direction(frame), "sent", frame.byte_length)

    def received(self, frame: Frame) -> None:
        """Counts a frame that arrived."""
        metrics.link_bytes(*self._labels, _direction(frame), "received", frame.byte_length)


class DownstreamLink:
    """The link to the next stage: opened by this one.

    Args:
        stub: Of the next stage.
        host_id: The next stage's host, for errors.
        opening: Binds the stream to the attempt.
        mailbox: Gets what comes back, and the failure of the link.
        meter: Counts bytes.
    """

    def __init__(
        self,
        stub: stage_pb2_grpc.StageServiceStub,
        host_id: str,
        opening: stage_pb2.OpenLink,
        mailbox: Mailbox,
        meter: LinkMeter,
    ) -> None:
        self._host_id = host_id
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
        for frame in self._outbox:
            header, chunks = encode_frame(frame)
            yield Request(frame=header)
            for chunk in chunks:
                yield Request(chunk=chunk)
            self._meter.sent(frame)

    def _receive(self) -> None:
        try:
            receive_frames(self._call, self._mailbox, self._meter)
            failure: CollapipeError = PeerLostError(
                self._host_id, f"{self._host_id} closed its link in the middle of the round"
            )
        except grpc.RpcError as error:
            failure = to_error(error, self._host_id)
        except CollapipeError as error:
            failure = error
        if not self._closed:
            self._mailbox.fail(failure)


def receive_frames(
    parts: Iterable[Request] | Iterable[Response], mailbox: Mailbox, meter: LinkMeter
) -> None:
    """Puts the frames of a stream into a mailbox until the stream ends.

    Raises:
        CorruptDataError: The stream is not made of whole frames.
        grpc.RpcError: The stream broke.
    """
    assembler = FrameAssembler()
    for part in parts:
        kind = part.WhichOneof("part")
        if kind == "opened":
            continue
        if kind not in ("frame", "chunk"):
            raise CorruptDataError(
                f"a link carried {kind or 'an empty message'} instead of a frame"
            )
        if kind == "frame":
            frame = assembler.begin(part.frame)
        else:
            chunk = part.chunk
            meter.received_bytes += len(chunk)
            frame = assembler.add(chunk)
        if frame is not None:
            meter.received(frame)
            mailbox.put(frame)


def serve_upstream(
    requests: Iterator[Request],
    outbox: Outbox[Frame],
    mailbox: Mailbox,
    meter: LinkMeter,
    on_loss: Callable[[CollapipeError], None],
) -> Iterator[Response]:
    """Serves the link from the previous stage: what it sends goes to the mailbox, the outbox goes back.

    Args:
        requests: Of the call, behind its opening.
        outbox: Frames for the previous stage; closing it ends the link.
        mailbox: Gets what arrives.
        meter: Counts bytes.
        on_loss: Told when the previous stage went away or sent what is no frame.
    """

    def receive() -> None:
        try:
            receive_frames(requests, mailbox, meter)
        except CollapipeError as error:
            on_loss(error)
        except Exception:  # gRPC raises a bare Exception when the caller went away
            on_loss(PeerLostError("", "the previous stage broke its link"))

    threading.Thread(target=receive, name="link from the previous stage", daemon=True).start()
    yield Response(opened=stage_pb2.LinkOpened())
    for frame in outbox:
        header, chunks = encode_frame(frame)
        yield Response(frame=header)
        for chunk in chunks:
            yield Response(chunk=chunk)
        meter.sent(frame)


def _direction(frame: Frame) -> str:
    return "forward" if frame.kind.towards_head else "backward"
