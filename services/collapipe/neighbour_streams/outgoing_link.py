"""Links that leave a stage: the sender encodes frames and waits until they may leave."""

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from collapipe.codec_numbers import CODEC_NAMES
from collapipe.neighbour_streams.link_settings import LinkSettings
from collapipe.telemetry import metrics
from collapipe.telemetry.spans import SPANS
from collapipe.tensors import CHUNK_BYTES, Frame, encode_frame
from collapipe.traffic_shaping.outgoing_links import SharedLink
from collapipe.traffic_shaping.pacing import Traffic
from collapipe.v1 import stage_pb2


@dataclass(frozen=True)
class OutgoingLink:
    """The link from a stage to a neighbouring stage. Other traffic to the same host shares its rate."""

    shared: SharedLink
    settings: LinkSettings

    @property
    def receiver(self) -> str:
        """Id of the other host."""
        return self.shared.receiver

    def encoded_parts(
        self, frames: Iterable[Frame], stage_labels: tuple[str, str]
    ) -> Iterator[stage_pb2.FrameHeader | bytes]:
        """Encodes frames, and yields each header and chunk when it may leave.

        Args:
            stage_labels: Cluster index and stage index of the sending stage, for metrics.
        """
        link = self.shared
        for frame in frames:
            frame.wait()  # An accelerator that still computes is no part of sending.
            started = time.perf_counter()
            metrics.LINK_RATE_LIMIT_BPS.labels(link.name).set(link.rate_bps(reports=True))
            header, chunks = encode_frame(frame, self.settings.codec, link.chunk_bytes(CHUNK_BYTES))
            # The shaper counts the header's bytes before the header leaves.
            header.sent_at_seconds = started
            # The header waits for its turn, too. So the receiver, which measures from the header on, does not
            # measure the other traffic before the frame.
            parts: Iterator[stage_pb2.FrameHeader | bytes] = itertools.chain([header], chunks)
            for part in link.paced(parts, Traffic.ACTIVATIONS):
                if part is header:
                    header.sent_at_seconds = time.perf_counter()
                yield part
            # gRPC asks for the next part once the network has taken the last one. So the measured time
            # includes encoding, pacing and waiting for room.
            SPANS.record(
                f"send to {link.receiver}",
                f"send {frame.kind.name.lower()}",
                started,
                peer=link.receiver,
                codec=CODEC_NAMES[self.settings.codec],
                step=frame.step_index,
                micro_batch=frame.micro_batch,
                num_bytes=sum(tensor.byte_length for tensor in header.tensors),
            )
            seconds = time.perf_counter() - started
            labels = (*stage_labels, "forward" if frame.kind.towards_head else "backward")
            metrics.STAGE_SENDING_SECONDS.labels(*labels).inc(seconds)
            metrics.LINK_BYTES.labels(*labels, "sent").inc(frame.byte_length)
