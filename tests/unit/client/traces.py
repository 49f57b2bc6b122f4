"""Reads a trace as Perfetto does: slices of a track are a stack."""

from dataclasses import dataclass, field
from pathlib import Path

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent


@dataclass
class Slice:
    """A slice of a trace. Times are in ns; `depth` is 0 for a slice in no other."""

    host: str
    track: str
    name: str
    category: str
    start: int
    depth: int
    end: int = -1
    values: dict[str, int | str] = field(default_factory=dict)
    flows: list[int] = field(default_factory=list)


@dataclass
class ReadTrace:
    """The slices, attributes and process labels of a trace."""

    slices: list[Slice] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    labels: dict[str, list[str]] = field(default_factory=dict)
    unix_nanoseconds: int = 0


def read_trace(path: Path) -> ReadTrace:
    """Reads a file, and fails if the slices of a track are not properly nested and in the order of time."""
    trace = Trace.FromString(path.read_bytes())
    read = ReadTrace()
    processes: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    stacks: dict[int, list[Slice]] = {}
    times: dict[int, int] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            if track.HasField("process"):
                processes[track.process.pid] = track.process.process_name
                read.labels[track.process.process_name] = list(track.process.process_labels)
            elif track.HasField("thread"):
                assert track.uuid not in tracks
                tracks[track.uuid] = (processes[track.thread.pid], track.thread.thread_name)
        elif packet.HasField("trace_attributes"):
            read.attributes = {a.key: a.string_value for a in packet.trace_attributes.attribute}
        elif packet.HasField("clock_snapshot"):
            read.unix_nanoseconds = packet.clock_snapshot.clocks[-1].timestamp
        elif packet.HasField("track_event"):
            event = packet.track_event
            host, name = tracks[event.track_uuid]
            assert packet.timestamp >= times.get(event.track_uuid, 0)
            times[event.track_uuid] = packet.timestamp
            stack = stacks.setdefault(event.track_uuid, [])
            if event.type == TrackEvent.TYPE_SLICE_END:
                stack.pop().end = packet.timestamp
                continue
            values = {
                note.name: note.string_value or note.int_value for note in event.debug_annotations
            }
            made = Slice(
                *(host, name, event.name, event.categories[0], packet.timestamp, len(stack)),
                values=values,
                flows=list(event.flow_ids),
            )
            stack.append(made)
            read.slices.append(made)
    assert not any(stacks.values())
    return read
