"""Links that leave a host: the sender encodes frames, paces them and sets its radio."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.neighbour_streams.link_settings import LinkSettings
from collapipe.telemetry import metrics
from collapipe.tensors import CHUNK_BYTES, Frame, encode_frame
from collapipe.traffic_shaping.pacing import Shaper
from collapipe.traffic_shaping.radio_driver import RadioDriver
from collapipe.v1 import stage_pb2


@dataclass(frozen=True)
class OutgoingLinks:
    """The emulation, the shaper and the radio for the links that leave one host."""

    host_id: str
    emulation: EmulationFile
    shaper: Shaper
    radio: RadioDriver | None = None

    def link_to(self, receiver: str, address: str, settings: LinkSettings) -> "OutgoingLink":
        """Returns the link to a host that serves at `address`, which is "host:port"."""
        return OutgoingLink(self, receiver, address, settings)


@dataclass(frozen=True)
class OutgoingLink:
    """The link from this host to another one."""

    host: OutgoingLinks
    receiver: str
    address: str
    settings: LinkSettings

    @property
    def name(self) -> str:
        """The label of this link in metrics."""
        return f"{self.host.host_id}>{self.receiver}"

    def prepare_radio(self) -> float:
        """Sets the radio for the next frame, and returns the rate to pace at, in bit/s; 0 means no limit.

        The rate is the lowest of the rates of the plan, the radio and the emulated wire. The emulation is
        read each time, so that a change applies from the next frame on.
        """
        sender, settings = self.host.host_id, self.settings
        radio = None
        if self.host.radio is not None:
            radio = self.host.radio.transmit(
                sender, self.receiver, settings.bandwidth_hz, settings.transmit_power_watts
            )
        wire = self.host.emulation.current().link(sender, self.receiver)
        limits = [float(settings.rate_limit_bps), wire.rate_bps or 0.0]
        if radio is not None:
            limits.append(radio.rate_bps)
            metrics.RADIO_CHANNEL_GAIN.labels(self.name).set(radio.gain)
            metrics.RADIO_NOISE_WATTS_PER_HERTZ.labels(self.name).set(radio.noise_watts_per_hertz)
            metrics.RADIO_TRANSMIT_POWER_WATTS.labels(self.name).set(radio.power_watts)
        return min((limit for limit in limits if limit), default=0.0)

    def encoded_parts(
        self, frames: Iterable[Frame], stage_labels: tuple[str, str]
    ) -> Iterator[stage_pb2.FrameHeader | bytes]:
        """Encodes frames, and yields each header and chunk when it may leave.

        Args:
            stage_labels: Cluster index and stage index of the sending stage, for metrics.
        """
        with closing(self.host.shaper.open(self.address)) as shaped:
            for frame in frames:
                started = time.perf_counter()
                rate = self.prepare_radio()
                metrics.LINK_RATE_LIMIT_BPS.labels(self.name).set(rate)
                header, chunks = encode_frame(
                    frame, self.settings.codec, shaped.chunk_bytes(rate, CHUNK_BYTES)
                )
                shaped.begin(rate)
                yield header
                for chunk in chunks:
                    shaped.wait(len(chunk))
                    yield chunk
                # gRPC asks for the next part once the network has taken the last one. So the measured time
                # includes encoding, pacing and waiting for room.
                seconds = time.perf_counter() - started
                labels = (*stage_labels, "forward" if frame.kind.towards_head else "backward")
                metrics.STAGE_SENDING_SECONDS.labels(*labels).inc(seconds)
                metrics.LINK_BYTES.labels(*labels, "sent").inc(frame.byte_length)

    def paced_burst(self, chunks: Callable[[int], Iterable[bytes]]) -> Iterator[bytes]:
        """Yields each chunk of a probe when it may leave.

        Args:
            chunks: Makes the chunks; its argument is the largest size of a chunk, in bytes.
        """
        with closing(self.host.shaper.open(self.address)) as shaped:
            rate = self.prepare_radio()
            shaped.begin(rate)
            for chunk in chunks(shaped.chunk_bytes(rate, CHUNK_BYTES)):
                shaped.wait(len(chunk))
                yield chunk
