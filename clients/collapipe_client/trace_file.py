"""Writes spans of many hosts as a trace that Perfetto shows, all on the clock of the scheduler.

The format is described at https://perfetto.dev/docs/reference/synthetic-track-event.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    ClockSnapshot,
    Trace,
    TraceAttributes,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)

from collapipe.errors import InvalidInputError
from collapipe.v1.scheduler_pb2 import GetTraceResponse
from collapipe.v1.trace_pb2 import Span

_SEQUENCE = 1
"""Every packet belongs to one sequence, because one writer makes them all."""
_MOST_SECONDS = 1e9
"""On the clock of a host, which counts from its start. Larger times are no times, and do not fit into a trace."""
_MOST_BYTES = 1 << 50
_NAMED_FIRST = ("round", "compute", "send", "receive", "weights")
"""The beginnings of the tracks that come first in a host, in this order."""

Arrow = tuple[str, str, str, int, int]
"""What a frame has in common at both ends of a link: sender, receiver, kind, step and micro-batch."""


@dataclass(kw_only=True)
class HostTrace:
    """The spans of one host.

    Args:
        clock_offset_seconds: How far the clock of the spans is ahead of the scheduler's.
        missing: Why there are no spans, or not all; empty if there are all.
    """

    host_id: str
    spans: list[Span] = field(default_factory=list)
    clock_offset_seconds: float = 0.0
    clock_uncertainty_seconds: float = 0.0
    unix_offset_seconds: float = 0.0
    missing: str = ""

    def on_common_clock(self, seconds: float) -> float:
        """Turns a time of this host into a time of the scheduler."""
        return seconds - self.clock_offset_seconds


def read_hosts(messages: Iterable[GetTraceResponse]) -> list[HostTrace]:
    """Collects the messages of each host, in the order of their first message.

    Hosts may send anything. Spans that cannot be are left out, and `missing` says how many.
    """
    hosts: dict[str, HostTrace] = {}
    num_wrong: Counter[str] = Counter()
    for message in messages:
        host = hosts.setdefault(message.host_id, HostTrace(host_id=message.host_id))
        spans = [span for span in message.spans if _is_possible(span, message)]
        num_wrong[host.host_id] += len(message.spans) - len(spans)
        host.spans += spans
        host.missing = message.missing
        if spans:
            host.clock_offset_seconds = message.clock_offset_seconds
            host.unix_offset_seconds = message.unix_offset_seconds
            host.clock_uncertainty_seconds = max(
                host.clock_uncertainty_seconds, message.clock_uncertainty_seconds
            )
    for host_id, number in num_wrong.items():
        if number:
            wrong = f"{number} spans of {host_id} are left out, because their names, times or sizes cannot be"
            hosts[host_id].missing = "; ".join(filter(None, (hosts[host_id].missing, wrong)))
    return list(hosts.values())


def _is_possible(span: Span, message: GetTraceResponse) -> bool:
    times = span.started_seconds, span.ended_seconds, message.clock_offset_seconds
    return (
        bool(span.track.strip() and span.name.strip())
        and span.started_seconds <= span.ended_seconds
        and all(abs(each) <= _MOST_SECONDS for each in times)
        and 0 <= message.clock_uncertainty_seconds <= _MOST_SECONDS
        and span.bytes <= _MOST_BYTES
    )


def write_trace(file: Path, title: str, hosts: list[HostTrace]) -> int:
    """Writes a trace whose time 0 is the begin of its first span. Returns the number of spans.

    Args:
        hosts: The scheduler comes first. At least one host has spans.

    Raises:
        InvalidInputError: The file cannot be written.
    """
    begin = min(host.on_common_clock(span.started_seconds) for host in hosts for span in host.spans)
    arrows = _arrows(hosts)
    partial = file.with_name(f"{file.name}.partial")
    try:
        with open(partial, "wb") as stream:
            # Serialised messages that follow each other are one message with the packets of all.
            header = Trace(packet=_header(title, hosts, begin))
            stream.write(header.SerializeToString())
            for rank, host in enumerate(hosts):
                packets = _host_packets(host, rank, begin, arrows)
                stream.write(Trace(packet=packets).SerializeToString())
        partial.replace(file)
    except OSError as error:
        raise InvalidInputError(
            f"{file} cannot be written ({error.strerror}): choose another file with --output"
        ) from error
    return sum(len(host.spans) for host in hosts)


def _header(title: str, hosts: list[HostTrace], begin: float) -> Iterator[TracePacket]:
    """Yields what belongs to the whole trace: its clock, its attributes and the order of hosts and tracks."""
    clocks = [ClockSnapshot.Clock(clock_id=ClockSnapshot.Clock.BOOTTIME, timestamp=0)]
    if unix_offset := hosts[0].unix_offset_seconds:
        unix_nanoseconds = round((begin + unix_offset) * 1e9)
        clocks.append(
            ClockSnapshot.Clock(clock_id=ClockSnapshot.Clock.REALTIME, timestamp=unix_nanoseconds)
        )
    yield TracePacket(
        timestamp=0,
        trusted_packet_sequence_id=_SEQUENCE,
        clock_snapshot=ClockSnapshot(clocks=clocks),
    )
    attributes = {"round": title}
    for host in hosts:
        attributes[f"clock of {host.host_id}"] = _clock_text(host)
        if host.missing:
            attributes[f"missing {host.host_id}"] = host.missing
    yield TracePacket(
        trusted_packet_sequence_id=_SEQUENCE,
        trace_attributes=TraceAttributes(
            attribute=[
                TraceAttributes.Attribute(key=key, string_value=value)
                for key, value in attributes.items()
            ]
        ),
    )
    # Ranks of processes and threads count only if the root says so.
    yield _describe(
        TrackDescriptor(
            uuid=0,
            process_ordering=TrackDescriptor.PROCESS_ORDERING_EXPLICIT,
            thread_ordering=TrackDescriptor.THREAD_ORDERING_EXPLICIT,
        )
    )


def _clock_text(host: HostTrace) -> str:
    return (
        f"{1000 * host.clock_offset_seconds:.3f} ms ahead, at most "
        f"{1000 * host.clock_uncertainty_seconds:.3f} ms wrong"
    )


def _describe(track: TrackDescriptor) -> TracePacket:
    return TracePacket(trusted_packet_sequence_id=_SEQUENCE, track_descriptor=track)


def _host_packets(
    host: HostTrace, rank: int, begin: float, arrows: dict[Arrow, int]
) -> Iterator[TracePacket]:
    """Yields a process for the host, a thread for each track, and two packets for each span."""
    process_id = 1000 * (rank + 1)
    process = TrackDescriptor(uuid=process_id, sibling_order_rank=rank)
    process.process.pid, process.process.process_name = process_id, host.host_id
    process.process.process_labels.append(_clock_text(host))
    if host.missing:
        process.process.process_labels.append(f"missing: {host.missing}")
    yield _describe(process)
    for position, (name, spans) in enumerate(_lanes(host.spans), start=1):
        thread = TrackDescriptor(
            uuid=process_id + position, parent_uuid=process_id, sibling_order_rank=position
        )
        thread.thread.pid, thread.thread.tid = process_id, thread.uuid
        thread.thread.thread_name = name
        yield _describe(thread)
        yield from _slices(host, spans, thread.uuid, begin, arrows)


def _lanes(spans: Iterable[Span]) -> Iterator[tuple[str, list[Span]]]:
    """Yields each track with its spans, in the order of their begin.

    Spans that overlap without one lying in the other, such as two transfers at once, get tracks of their own.
    """
    tracks: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.started_seconds, -span.ended_seconds)):
        tracks.setdefault(span.track, []).append(span)
    for track in sorted(tracks, key=_track_order):
        lanes: list[_Lane] = []
        for span in tracks[track]:
            lane = next((lane for lane in lanes if lane.has_room_for(span)), None)
            if lane is None:
                lane = _Lane()
                lanes.append(lane)
            lane.spans.append(span)
            lane.under_way.append(span)
        for number, lane in enumerate(lanes, start=1):
            yield (track if number == 1 else f"{track} ({number})"), lane.spans


@dataclass
class _Lane:
    """Spans that follow each other or nest."""

    spans: list[Span] = field(default_factory=list)
    under_way: list[Span] = field(default_factory=list)
    """The spans that the last one lies in, and the last one itself."""

    def has_room_for(self, span: Span) -> bool:
        """Returns whether a span, which begins no earlier than the others, can follow or nest."""
        while self.under_way and self.under_way[-1].ended_seconds <= span.started_seconds:
            self.under_way.pop()
        return not self.under_way or span.ended_seconds <= self.under_way[-1].ended_seconds


def _track_order(track: str) -> tuple[int, str]:
    first = track.split()[0]
    return _NAMED_FIRST.index(first) if first in _NAMED_FIRST else len(_NAMED_FIRST), track


def _slices(
    host: HostTrace, spans: list[Span], track: int, begin: float, arrows: dict[Arrow, int]
) -> Iterator[TracePacket]:
    """Yields the begin and the end of each span of a lane, in the order of time."""
    open_until: list[int] = []

    def close_until(nanoseconds: int) -> Iterator[TracePacket]:
        while open_until and open_until[-1] <= nanoseconds:
            event = TrackEvent(type=TrackEvent.TYPE_SLICE_END, track_uuid=track)
            yield TracePacket(
                timestamp=open_until.pop(), trusted_packet_sequence_id=_SEQUENCE, track_event=event
            )

    def nanoseconds_of(seconds: float) -> int:
        return round((host.on_common_clock(seconds) - begin) * 1e9)

    for span in spans:
        start = nanoseconds_of(span.started_seconds)
        yield from close_until(start)
        yield TracePacket(
            timestamp=start,
            trusted_packet_sequence_id=_SEQUENCE,
            track_event=_begin_event(host.host_id, span, track, arrows),
        )
        open_until.append(nanoseconds_of(span.ended_seconds))
    yield from close_until(2**63)


def _begin_event(host_id: str, span: Span, track: int, arrows: dict[Arrow, int]) -> TrackEvent:
    event = TrackEvent(
        type=TrackEvent.TYPE_SLICE_BEGIN,
        track_uuid=track,
        name=span.name,
        categories=[span.name.split()[0]],
    )
    numbers = {
        name: getattr(span, name) for name in ("step", "micro_batch", "unit") if span.HasField(name)
    }
    if span.HasField("micro_batch"):
        event.name = f"{span.name} {span.micro_batch}"
    elif span.HasField("unit"):
        event.name = f"{span.name} unit {span.unit}"
    if span.bytes:
        numbers["bytes"] = span.bytes
    for name, number in numbers.items():
        event.debug_annotations.add(name=name, int_value=number)
    arrow = _arrow(host_id, span)
    if arrow is not None:
        event.debug_annotations.add(name="link", string_value=f"{arrow[0]}>{arrow[1]}")
        if arrow in arrows:
            event.flow_ids.append(arrows[arrow])
    if span.codec:
        event.debug_annotations.add(name="codec", string_value=span.codec)
    return event


def _arrow(host_id: str, span: Span) -> Arrow | None:
    way, _, kind = span.name.partition(" ")
    if not span.peer or way not in ("send", "receive"):
        return None
    ends = (host_id, span.peer) if way == "send" else (span.peer, host_id)
    return (*ends, kind, span.step, span.micro_batch)


def _arrows(hosts: list[HostTrace]) -> dict[Arrow, int]:
    """Numbers the frames, so that Perfetto draws an arrow from sending a frame to receiving it."""
    numbers: dict[Arrow, int] = {}
    for host in hosts:
        for span in host.spans:
            if (arrow := _arrow(host.host_id, span)) is not None:
                numbers.setdefault(arrow, len(numbers) + 1)
    return numbers
