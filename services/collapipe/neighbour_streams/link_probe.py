"""Measures a link before anything was trained over it: round trips, then a burst of chunks.

What counts is what the receiver saw: a chunk that was sent has only been buffered. Both ends are bounded in bytes and time.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import grpc

from collapipe.emulation.world import EmulationFile
from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.neighbour_streams.endpoints import LinkSender, LinkSettings
from collapipe.rpc import ChannelPool, Outbox, within_silence
from collapipe.telemetry import metrics
from collapipe.v1 import link_pb2, link_pb2_grpc

_ROUND_TRIPS = 6
"""The first also connects; the least of all counts."""
_MOST_ROUND_TRIPS = 100
_SILENCE_SECONDS = 10.0
"""A receiver that answers no later cannot be reached. By satellite, the first chunks take several round trips of 0.6 s each."""
_DEADLINE_SECONDS = 20.0
_BURST_SECONDS = 0.25
_BURST_BYTES = 4 << 20
_LEAST_CHUNKS = 4
"""The receiver's clock starts with the first, so that it takes at least one more to see a rate."""
_FIRST_CHUNK_BYTES = 4096
_LARGEST_CHUNK_BYTES = 256 << 10
_RECEIVED_SECONDS = 2.0
"""A burst that takes longer has filled buffers before a slow link; what has arrived by then tells its rate."""
_RECEIVED_BYTES = 2 * _BURST_BYTES


class LinkServicer(link_pb2_grpc.LinkServiceServicer):
    """Serves measurements of links, one at a time.

    Args:
        host_id: This host, as registered.
        channels: Channels to other hosts.
        emulation: The emulated world, if there is one.
        open_sender: Makes the sending end of a link to a host, given its id, its address and the link's settings.
    """

    def __init__(
        self,
        host_id: str,
        channels: ChannelPool,
        emulation: EmulationFile,
        open_sender: Callable[[str, str, LinkSettings], LinkSender],
    ) -> None:
        self._host_id = host_id
        self._channels = channels
        self._emulation = emulation
        self._open_sender = open_sender
        self._measuring = threading.Lock()

    def MeasureLink(
        self, request: link_pb2.MeasureLinkRequest, context: grpc.ServicerContext
    ) -> link_pb2.MeasureLinkResponse:
        """Measures the link to another host, as the world and no plan limits it."""
        if not request.host_id or not request.address:
            raise InvalidInputError(
                f"a link is measured to a host and its address, not to {request.host_id!r} at {request.address!r}"
            )
        sender = self._open_sender(request.host_id, request.address, LinkSettings())
        stub = link_pb2_grpc.LinkServiceStub(self._channels.channel(request.address))
        with self._measuring:  # two bursts at a time would measure each other
            return measure_link(stub, sender)

    def ReceiveProbe(
        self,
        request_iterator: Iterator[link_pb2.ReceiveProbeRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[link_pb2.ReceiveProbeResponse]:
        """Answers the measurement of a link that leads here."""
        return answer_probe(request_iterator, self._host_id, self._emulation)


def measure_link(
    stub: link_pb2_grpc.LinkServiceStub, sender: LinkSender
) -> link_pb2.MeasureLinkResponse:
    """Measures the link to another host.

    Args:
        stub: Of the host.
        sender: Sends there; at most at its rate.

    Raises:
        PeerLostError: The host cannot be reached.
    """
    requests: Outbox[link_pb2.ReceiveProbeRequest] = Outbox()

    def parts() -> Iterator[link_pb2.ReceiveProbeRequest]:
        yield from requests
        for chunk in sender.burst(_chunks):
            yield link_pb2.ReceiveProbeRequest(host_id=sender.sender, chunk=chunk)
        yield link_pb2.ReceiveProbeRequest(host_id=sender.sender, last=True)

    call = stub.ReceiveProbe(parts(), timeout=_DEADLINE_SECONDS)
    answers = within_silence(call, _SILENCE_SECONDS, sender.receiver, lambda: "answer a probe")

    def next_answer() -> link_pb2.ReceiveProbeResponse:
        answer = next(answers, None)
        if answer is None:
            raise PeerLostError(
                sender.receiver, f"{sender.receiver} ended a probe without an answer: repeat it"
            )
        return answer

    try:
        round_trips = []
        for _ in range(_ROUND_TRIPS):
            started = time.perf_counter()
            requests.put(link_pb2.ReceiveProbeRequest(host_id=sender.sender))
            next_answer()
            round_trips.append(time.perf_counter() - started)
        requests.close()
        goodput_bps = next_answer().goodput_bps
    finally:
        requests.close()
        call.cancel()
    metrics.LINK_ROUND_TRIP_SECONDS.labels(sender.link).set(min(round_trips))
    metrics.LINK_PROBED_BPS.labels(sender.link).set(goodput_bps)
    return link_pb2.MeasureLinkResponse(
        goodput_bps=goodput_bps, round_trip_seconds=min(round_trips)
    )


def answer_probe(
    requests: Iterable[link_pb2.ReceiveProbeRequest], host_id: str, emulation: EmulationFile
) -> Iterator[link_pb2.ReceiveProbeResponse]:
    """Answers a measurement: each message without bytes at once, and a burst when it ends or took its time.

    Args:
        requests: Of the caller.
        host_id: This host.
        emulation: The world; an emulated delay, there and back, comes before an answer.
    """
    num_round_trips, num_bytes, last_at = 0, 0, 0.0
    first_at: float | None = None
    for request in requests:
        now = time.perf_counter()
        if not request.chunk and not request.last:
            num_round_trips += 1
            if num_round_trips > _MOST_ROUND_TRIPS:
                raise InvalidInputError(
                    f"a probe made more than {_MOST_ROUND_TRIPS} round trips: begin another"
                )
            world = emulation.current()
            there = world.delay_seconds(request.host_id, host_id)
            time.sleep(there + world.delay_seconds(host_id, request.host_id))
            yield link_pb2.ReceiveProbeResponse()
            continue
        if first_at is None:
            first_at = now
        elif request.chunk:
            num_bytes += len(request.chunk)
            last_at = now
        if request.last or num_bytes > _RECEIVED_BYTES or now - first_at > _RECEIVED_SECONDS:
            if not num_bytes:
                raise InvalidInputError(
                    "the burst of a probe had less than 2 chunks: a rate is what comes after the first"
                )
            rate = 8 * num_bytes / (last_at - first_at)
            yield link_pb2.ReceiveProbeResponse(goodput_bps=rate)
            return


def _chunks(most_bytes: int) -> Iterator[bytes]:
    """Chunks that grow, so that a slow link brings several and a fast one is not held up by their number."""
    started, sent, size = time.monotonic(), 0, _FIRST_CHUNK_BYTES
    number = 0
    while number < _LEAST_CHUNKS or (
        sent < _BURST_BYTES and time.monotonic() - started < _BURST_SECONDS
    ):
        size = min(size, most_bytes, _LARGEST_CHUNK_BYTES, max(_BURST_BYTES - sent, 1))
        yield bytes(size)
        sent += size
        size *= 2
        number += 1
