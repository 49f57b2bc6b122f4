"""Links that lead to a host: the receiver reassembles frames and measures how fast they arrive."""

import collections
import queue
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from collapipe.codec_numbers import CODEC_NAMES
from collapipe.emulation.emulation_file import EmulationFile
from collapipe.errors import CorruptDataError, DivergedError
from collapipe.telemetry import metrics
from collapipe.telemetry.spans import SPANS
from collapipe.tensors import Frame, FrameAssembler, FrameKind
from collapipe.v1 import stage_pb2, tensor_pb2

_LEAST_MEASURED_BYTES = 4096
"""The arrival time of a smaller frame depends on the scheduling of processes more than on the link."""
_COMPARED_HEADERS = 64
"""Headers whose transit times are compared. The clocks of two hosts hardly drift apart in so short a time."""


_LARGEST_VALUE = 1e18
"""Squares of much larger values overflow in fp32. The next stage would then be blamed for values that are not finite."""


def _is_moderate(tensor: Tensor) -> bool:
    # The norm takes a tenth of the time. It may overflow although each value is moderate, so only the values decide.
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return bool(norm <= _LARGEST_VALUE or (tensor.float().abs() <= _LARGEST_VALUE).all())


class IncomingLink:
    """The link from another host to this one.

    Args:
        sender: Id of the other host.
        receiver: Id of this host.
        limits: For each kind of frames that the other host may send, the most memory of a frame, in bytes.
        stage_labels: Cluster index and stage index of the receiving stage, for metrics.
        capacity: The largest number of frames that an emulated delay holds back. A correct neighbour stays below it.
        deliver: Takes each complete frame, in the order of arrival.
        mistake_in: Returns why a frame is of no use, in words; empty if it is of use.
    """

    def __init__(
        self,
        sender: str,
        receiver: str,
        limits: Mapping[FrameKind, int],
        stage_labels: tuple[str, str],
        capacity: int,
        emulation: EmulationFile,
        deliver: Callable[[Frame], None],
        mistake_in: Callable[[Frame], str] = lambda frame: "",
    ) -> None:
        self.sender = sender
        self.received_bytes = 0
        """Bytes that have arrived, including those of an incomplete frame."""
        self._receiver = receiver
        self._mistake_in = mistake_in
        self._stage_labels = stage_labels
        self._emulation = emulation
        self._delay_line = _DelayLine(deliver, capacity)
        self._assembler = FrameAssembler(limits)
        self._header = stage_pb2.FrameHeader()
        self._header_arrived_at = 0.0
        self._frame_ended_at = time.perf_counter()
        """When the last frame ended, or when the link was opened."""
        self._transits: collections.deque[float] = collections.deque(maxlen=_COMPARED_HEADERS)
        """Transit times of the last headers, plus the unknown difference of the two clocks."""

    def begin_frame(self, header: stage_pb2.FrameHeader) -> None:
        """Takes the header of a frame. Raises the errors of `FrameAssembler.begin`, and `DivergedError`."""
        self._header, self._header_arrived_at = header, time.perf_counter()
        self._transits.append(self._header_arrived_at - header.sent_at_seconds)
        frame = self._assembler.begin(header)
        if frame is not None:
            self._complete(frame)

    def add_chunk(self, chunk: bytes) -> None:
        """Takes the next bytes of a frame. Raises the errors of `FrameAssembler.add`, and `DivergedError`."""
        self.received_bytes += len(chunk)
        arrived_at = time.perf_counter()
        frame = self._assembler.add(chunk)
        if frame is not None:
            self._measure(arrived_at)
            self._frame_ended_at = arrived_at
            self._complete(frame)

    def close(self) -> None:
        """Ends the link. Frames that an emulated delay holds back are still delivered."""
        self._delay_line.close()

    def _measure(self, ended_at: float) -> None:
        """Counts the bytes of a frame and the time since its header arrived.

        A busy host reads a header late, but not the fastest one of many. So a header arrived as long after it was
        sent as that one did, but not before the end of the frame before it. A false time of the sender moves the start
        to that end at most.
        """
        arrived_at = self._header.sent_at_seconds + min(self._transits)
        started_at = max(self._frame_ended_at, arrived_at)
        tensors = self._header.tensors
        wire_bytes = sum(tensor.byte_length for tensor in tensors)
        if wire_bytes < _LEAST_MEASURED_BYTES:
            return
        lossy = (tensor.codec for tensor in tensors if tensor.codec != tensor_pb2.CODEC_FP32)
        codec = CODEC_NAMES[next(lossy, tensor_pb2.CODEC_FP32)]
        link = f"{self.sender}>{self._receiver}"
        metrics.LINK_TRANSFER_BYTES.labels(link, codec).inc(wire_bytes)
        metrics.LINK_TRANSFER_SECONDS.labels(link).inc(max(ended_at - started_at, 0.0))

    def _complete(self, frame: Frame) -> None:
        if wrong := self._mistake_in(frame):
            raise CorruptDataError(
                f"a frame of kind {frame.kind.name} has {wrong}: run the same version everywhere"
            )
        for tensor in frame.tensors.values():
            if tensor.is_floating_point() and not _is_moderate(tensor):
                raise DivergedError(
                    f"{self.sender} sent values that are not finite, or beyond {_LARGEST_VALUE:g}, in micro-batch {frame.micro_batch} of "
                    f"step {frame.step_index}",
                    self.sender,
                )
        SPANS.record(
            f"receive from {self.sender}",
            f"receive {frame.kind.name.lower()}",
            self._header_arrived_at,
            peer=self.sender,
            step=frame.step_index,
            micro_batch=frame.micro_batch,
            num_bytes=sum(tensor.byte_length for tensor in self._header.tensors),
        )
        labels = (*self._stage_labels, "forward" if frame.kind.towards_head else "backward")
        metrics.LINK_BYTES.labels(*labels, "received").inc(frame.byte_length)
        delay = self._emulation.current().delay_seconds(self.sender, self._receiver)
        self._delay_line.put(frame, delay)


class _DelayLine:
    """Delivers each frame a given time after its arrival, in order, without blocking the receiver."""

    def __init__(self, deliver: Callable[[Frame], None], capacity: int) -> None:
        self._deliver = deliver
        self._frames: queue.Queue[tuple[float, Frame] | None] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None

    def put(self, frame: Frame, delay_seconds: float) -> None:
        """Takes a frame. Delivers it at once if neither this nor an earlier frame has a delay."""
        if self._thread is None and not delay_seconds:
            self._deliver(frame)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="delay", daemon=True)
            self._thread.start()
        self._frames.put((time.monotonic() + delay_seconds, frame))

    def close(self) -> None:
        if self._thread is not None:
            self._frames.put(None)

    def _run(self) -> None:
        while (item := self._frames.get()) is not None:
            due_at, frame = item
            time.sleep(max(0.0, due_at - time.monotonic()))
            self._deliver(frame)
