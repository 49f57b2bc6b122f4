"""The two ends of one direction of a link: what a plan and the world do to frames on their way.

The sender encodes, paces and sets its radio; the receiver measures what arrives, and delivers it late where an emulated
link has a delay.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from collapipe.codec_names import CODEC_NAMES
from collapipe.emulation.world import EmulationFile
from collapipe.errors import InvalidInputError
from collapipe.telemetry import metrics
from collapipe.tensors import CHUNK_BYTES, Frame, FrameAssembler, encode_frame
from collapipe.traffic_shaping.pacing import Shaper
from collapipe.traffic_shaping.radio import RadioDriver, RadioState
from collapipe.v1 import plan_pb2, stage_pb2, tensor_pb2

_LEAST_MEASURED_BYTES = 4096
"""A smaller frame tells more of how processes are scheduled than of the link."""


@dataclass(frozen=True)
class LinkSettings:
    """What a plan decided for one direction of a link; by default nothing."""

    codec: tensor_pb2.Codec = tensor_pb2.CODEC_FP32
    rate_limit_bps: int = 0
    bandwidth_hz: float = 0.0
    transmit_power_watts: float = 0.0
    """Of the sender of this direction."""


def link_settings(plan: plan_pb2.Plan, sender_index: int, receiver_index: int) -> LinkSettings:
    """What a plan decides for one direction of the link between two neighbouring stages.

    Raises:
        InvalidInputError: It decides what no link can do.
    """
    index = min(sender_index, receiver_index)
    if index >= len(plan.links):
        return LinkSettings()
    link = plan.links[index]
    codec = link.codec or tensor_pb2.CODEC_FP32
    if codec not in CODEC_NAMES:
        raise InvalidInputError(
            f"link {index} of the plan has the codec {codec}, which this version does not know: run the same "
            "version everywhere"
        )
    power = (
        link.transmit_power_watts
        if sender_index < receiver_index
        else link.return_transmit_power_watts
    )
    for name, value in (("bandwidth", link.bandwidth_hz), ("transmit power", power)):
        if not (math.isfinite(value) and value >= 0):
            raise InvalidInputError(
                f"link {index} of the plan has a {name} of {value}: it needs a finite value of at least 0"
            )
    return LinkSettings(codec, link.rate_limit_bps, link.bandwidth_hz, power)


class LinkMeter:
    """Counts what one stage exchanges with its neighbours."""

    def __init__(self, cluster_index: int, stage_index: int) -> None:
        self._labels = (str(cluster_index), str(stage_index))
        self.received_bytes = 0
        """Bytes that have arrived, also of frames that are not complete."""

    def sent(self, frame: Frame, seconds: float) -> None:
        """Counts a frame that left, and how long that took."""
        labels = (*self._labels, _direction(frame))
        metrics.LINK_BYTES.labels(*labels, "sent").inc(frame.byte_length)
        metrics.STAGE_SENDING_SECONDS.labels(*labels).inc(seconds)

    def received(self, frame: Frame) -> None:
        """Counts a frame that arrived."""
        labels = (*self._labels, _direction(frame), "received")
        metrics.LINK_BYTES.labels(*labels).inc(frame.byte_length)


class LinkSender:
    """Sends one direction of a link.

    Args:
        sender: This host.
        receiver: The host at the other end.
        address: Where the receiver serves, "host:port".
        settings: What the plan decided.
        emulation: The world, asked anew for every frame.
        shaper: Of this host.
        radio: Of this host.
    """

    def __init__(
        self,
        sender: str,
        receiver: str,
        address: str,
        settings: LinkSettings,
        emulation: EmulationFile,
        shaper: Shaper,
        radio: RadioDriver,
    ) -> None:
        self.sender = sender
        self.receiver = receiver
        self._address = address
        self._settings = settings
        self._emulation = emulation
        self._shaper = shaper
        self._radio = radio

    @property
    def link(self) -> str:
        """Its name in metrics."""
        return f"{self.sender}>{self.receiver}"

    def rate_bps(self) -> float:
        """Sets the radio; the rate in force: the least of the plan's, the radio's and the wire's, 0 for no limit."""
        settings = self._settings
        state: RadioState | None = self._radio.transmit(
            self.sender, self.receiver, settings.bandwidth_hz, settings.transmit_power_watts
        )
        wire = self._emulation.current().link(self.sender, self.receiver)
        limits = [float(settings.rate_limit_bps), wire.rate_bps or 0.0]
        if state is not None:
            limits.append(state.rate_bps)
            metrics.RADIO_CHANNEL_GAIN.labels(self.link).set(state.gain)
            metrics.RADIO_NOISE_WATTS_PER_HERTZ.labels(self.link).set(state.noise_watts_per_hertz)
            metrics.RADIO_TRANSMIT_POWER_WATTS.labels(self.link).set(state.power_watts)
        return min((limit for limit in limits if limit), default=0.0)

    def parts(
        self, frames: Iterable[Frame], sent: Callable[[Frame, float], None]
    ) -> Iterator[stage_pb2.FrameHeader | bytes]:
        """The headers and chunks of frames, each when it may leave.

        Args:
            frames: What to send, in order.
            sent: Told of each frame that left, and of the seconds since it was taken up. Whoever iterates asks for
                the next part when the network has taken the last one, so they include pacing and waiting for room.
        """
        shaped = self._shaper.open(self._address)
        try:
            for frame in frames:
                began_at = time.perf_counter()
                rate = self.rate_bps()
                metrics.LINK_RATE_LIMIT_BPS.labels(self.link).set(rate)
                header, chunks = encode_frame(
                    frame, self._settings.codec, shaped.chunk_bytes(rate, CHUNK_BYTES)
                )
                shaped.begin(rate)
                yield header
                for chunk in chunks:
                    shaped.wait(len(chunk))
                    yield chunk
                sent(frame, time.perf_counter() - began_at)
        finally:
            shaped.close()

    def burst(self, chunks: Callable[[int], Iterable[bytes]]) -> Iterator[bytes]:
        """Chunks of a measurement, each when it may leave.

        Args:
            chunks: Given the size that they are to have, makes them.
        """
        shaped = self._shaper.open(self._address)
        try:
            rate = self.rate_bps()
            shaped.begin(rate)
            for chunk in chunks(shaped.chunk_bytes(rate, CHUNK_BYTES)):
                shaped.wait(len(chunk))
                yield chunk
        finally:
            shaped.close()


class LinkReceiver:
    """Receives one direction of a link.

    Args:
        sender: The host at the other end.
        receiver: This host.
        capacity: Frames that may be on an emulated way at a time; the windows of honest stages keep below.
        emulation: The world, asked anew for every frame.
        meter: Counts bytes.
        deliver: Takes each frame.
    """

    def __init__(
        self,
        sender: str,
        receiver: str,
        capacity: int,
        emulation: EmulationFile,
        meter: LinkMeter,
        deliver: Callable[[Frame], None],
    ) -> None:
        self._sender = sender
        self._receiver = receiver
        self._emulation = emulation
        self._meter = meter
        self._line = _DelayLine(deliver, capacity)
        self._assembler = FrameAssembler()
        self._began_at = 0.0
        self._codec = CODEC_NAMES[tensor_pb2.CODEC_FP32]
        self._wire_bytes = 0

    def begin(self, header: stage_pb2.FrameHeader) -> None:
        """Takes the header of a frame.

        Raises:
            CorruptDataError: The frame before is incomplete, or the header contradicts itself.
            InvalidInputError: The frame is larger than this receiver allocates.
        """
        self._began_at = time.perf_counter()
        frame = self._assembler.begin(header)
        self._wire_bytes = sum(tensor.byte_length for tensor in header.tensors)
        lossy = (t.codec for t in header.tensors if t.codec != tensor_pb2.CODEC_FP32)
        self._codec = CODEC_NAMES[next(lossy, tensor_pb2.CODEC_FP32)]
        if frame is not None:
            self._complete(frame)

    def add(self, chunk: bytes) -> None:
        """Takes a chunk.

        Raises:
            CorruptDataError: A chunk without a frame, too many bytes, or a wrong checksum.
        """
        self._meter.received_bytes += len(chunk)
        arrived_at = time.perf_counter()
        frame = self._assembler.add(chunk)
        if frame is None:
            return
        if self._wire_bytes >= _LEAST_MEASURED_BYTES:
            link = f"{self._sender}>{self._receiver}"
            seconds = arrived_at - self._began_at
            metrics.LINK_TRANSFER_BYTES.labels(link, self._codec).inc(self._wire_bytes)
            metrics.LINK_TRANSFER_SECONDS.labels(link).inc(seconds)
        self._complete(frame)

    def close(self) -> None:
        """Nothing more comes; what is on its way still arrives."""
        self._line.close()

    def _complete(self, frame: Frame) -> None:
        self._meter.received(frame)
        delay = self._emulation.current().delay_seconds(self._sender, self._receiver)
        self._line.put(frame, delay)


class _DelayLine:
    """Delivers frames in order, each some time after it came; whoever puts does not wait for that."""

    def __init__(self, deliver: Callable[[Frame], None], capacity: int) -> None:
        self._deliver = deliver
        self._frames: queue.Queue[tuple[float, Frame] | None] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None

    def put(self, frame: Frame, delay_seconds: float) -> None:
        """Takes a frame; without a delay, now or before, it is delivered at once."""
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


def _direction(frame: Frame) -> str:
    return "forward" if frame.kind.towards_head else "backward"
