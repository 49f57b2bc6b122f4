"""Measures a link before training uses it: round trips first, then a burst of chunks.

The receiver measures the rate, because a sent chunk may still be in a buffer of the sender. Both ends limit the
bytes and the time of a probe.
"""

import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

import grpc

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.rpc import ChannelPool, Outbox, within_silence
from collapipe.telemetry import metrics
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks, SharedLink
from collapipe.traffic_shaping.pacing import Traffic
from collapipe.v1 import link_pb2, link_pb2_grpc

Request = link_pb2.ReceiveProbeRequest
Response = link_pb2.ReceiveProbeResponse

_ADDRESS = re.compile(r"[\w.:%\[\]-]+:\d{1,5}", re.ASCII)
_ROUND_TRIPS = 6
"""The first round trip also opens the connection, so only the shortest one counts."""
_MOST_ROUND_TRIPS = 100
_SILENCE_SECONDS = 10.0
"""A host that stays silent for longer is unreachable. Satellite links need several round trips of 0.6 s."""
_DEADLINE_SECONDS = 20.0
_BURST_SECONDS = 0.25
_BURST_BYTES = 4 << 20
_LEAST_CHUNKS = 4
"""The receiver measures from the first chunk on, so it needs at least two."""
_FIRST_CHUNK_BYTES = 4096
_LARGEST_CHUNK_BYTES = 256 << 10
_RECEIVED_SECONDS = 2.0
"""The receiver counts for no longer. A burst that filled buffers before a slow link would take longer."""
_RECEIVED_BYTES = 2 * _BURST_BYTES


class LinkServicer(link_pb2_grpc.LinkServiceServicer):
    """Probes links that leave this host, one at a time, and answers the probes of other hosts."""

    def __init__(self, links: OutgoingLinks, channels: ChannelPool) -> None:
        self._links = links
        self._channels = channels
        self._one_probe = threading.Lock()

    def MeasureLink(
        self, request: link_pb2.MeasureLinkRequest, context: grpc.ServicerContext
    ) -> link_pb2.MeasureLinkResponse:
        """Measures the link to another host without the limits of a plan."""
        if not request.host_id or not _ADDRESS.fullmatch(request.address):
            raise InvalidInputError(
                f"cannot measure a link to host {request.host_id!r} at address {request.address!r}: give a host id, and an address of the form host:port"
            )
        link = self._links.link_to(request.host_id, request.address)
        stub = link_pb2_grpc.LinkServiceStub(self._channels.channel(request.address))
        with self._one_probe:  # Two bursts at the same time would slow each other down.
            return measure_link(stub, link)

    def ReceiveProbe(
        self, request_iterator: Iterator[Request], context: grpc.ServicerContext
    ) -> Iterator[Response]:
        """Answers the probe of a link that leads to this host."""
        return answer_probe(request_iterator, self._links.host_id, self._links.emulation)


def measure_link(
    stub: link_pb2_grpc.LinkServiceStub, link: SharedLink
) -> link_pb2.MeasureLinkResponse:
    """Probes a link; raises `PeerLostError` if the receiver cannot be reached."""
    host_id, receiver = link.links.host_id, link.receiver
    round_trip_requests: Outbox[Request] = Outbox()

    def requests() -> Iterator[Request]:
        yield from round_trip_requests
        rate_bps = link.rate_bps(planned=False, reports=True)
        chunks = _growing_chunks(link.shaped.quantum_bytes(rate_bps, _LARGEST_CHUNK_BYTES))
        for chunk in link.paced(chunks, Traffic.ACTIVATIONS, planned=False):
            yield Request(host_id=host_id, chunk=chunk)
        yield Request(host_id=host_id, last=True)

    call = stub.ReceiveProbe(requests(), timeout=_DEADLINE_SECONDS)
    answers = within_silence(call, _SILENCE_SECONDS, receiver, lambda: "answer a probe")

    def next_answer() -> Response:
        answer = next(answers, None)
        if answer is None:
            raise PeerLostError(
                receiver, f"{receiver} ended a probe without an answer: repeat the probe"
            )
        return answer

    try:
        round_trips = []
        for _ in range(_ROUND_TRIPS):
            started = time.perf_counter()
            round_trip_requests.put(Request(host_id=host_id))
            next_answer()
            round_trips.append(time.perf_counter() - started)
        round_trip_requests.close()
        goodput_bps = next_answer().goodput_bps
        with suppress(
            PeerLostError
        ):  # The next probe must not queue behind the rest of this burst.
            next(answers, None)
    finally:
        round_trip_requests.close()
        call.cancel()
    metrics.LINK_ROUND_TRIP_SECONDS.labels(link.name).set(min(round_trips))
    metrics.LINK_PROBED_BPS.labels(link.name).set(goodput_bps)
    return link_pb2.MeasureLinkResponse(
        goodput_bps=goodput_bps, round_trip_seconds=min(round_trips)
    )


def answer_probe(
    requests: Iterable[Request], host_id: str, emulation: EmulationFile
) -> Iterator[Response]:
    """Answers a probe: each message without bytes at once, and the burst when it ends or takes too long.

    Before it answers a message without bytes, it waits for the emulated delay of both directions. The stream of
    answers ends when the whole burst has arrived.
    """
    num_round_trips, num_bytes, last_at, answered = 0, 0, 0.0, False
    first_at: float | None = None
    for request in requests:
        now = time.perf_counter()
        if not request.chunk and not request.last:
            num_round_trips += 1
            if num_round_trips > _MOST_ROUND_TRIPS:
                raise InvalidInputError(
                    f"a probe made more than {_MOST_ROUND_TRIPS} round trips: begin another"
                )
            current = emulation.current()
            delay = current.delay_seconds(request.host_id, host_id)
            time.sleep(delay + current.delay_seconds(host_id, request.host_id))
            yield Response()
            continue
        if first_at is None:
            first_at = now
        elif request.chunk:
            num_bytes += len(request.chunk)
            last_at = now
        ends = request.last or num_bytes > _RECEIVED_BYTES
        if not answered and (ends or now - first_at > _RECEIVED_SECONDS):
            if not num_bytes:
                raise InvalidInputError(
                    "the burst of a probe had less than 2 chunks: the rate is measured from the first chunk on"
                )
            yield Response(goodput_bps=8 * num_bytes / (last_at - first_at))
            answered = True
        if ends:
            return


def _growing_chunks(most_bytes: int) -> Iterator[bytes]:
    """Yields chunks of growing size: a slow link sends several in time, and a fast link needs few."""
    started, sent, size = time.monotonic(), 0, _FIRST_CHUNK_BYTES
    number = 0
    while number < _LEAST_CHUNKS or (
        sent < _BURST_BYTES and time.monotonic() - started < _BURST_SECONDS
    ):
        size = min(size, most_bytes, max(_BURST_BYTES - sent, 1))
        yield bytes(size)
        sent += size
        size *= 2
        number += 1
