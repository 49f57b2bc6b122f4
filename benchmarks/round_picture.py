"""Draws what every host did in a round, as an SVG file for the documents.

    collapipe trace JOB --round 1 --output ROUND.pftrace
    python -m benchmarks.round_picture ROUND.pftrace OUT.svg --seconds 30

Each host has one line for what it computes and one for the weights that it moves. `--seconds` sets the length of the time
axis, so that two pictures can be compared.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from collapipe.scheduler.web.timeline import KINDS, MOVES, Bars, join_bars, kind_of

_HUES = ("#4c78a8", "#72b7b2", "#f2cf5b", "#e45756", "#b279a2", "#bab0ac")
COLOURS = dict(zip(KINDS, _HUES, strict=True))


@dataclass(frozen=True)
class Slice:
    """What a track shows from `start` to `end`, in seconds."""

    host: str
    track: str
    name: str
    start: float
    end: float

    @property
    def kind(self) -> str | None:
        """The colour in which the slice is drawn; `None` if it is not."""
        return kind_of(self.host, self.track, self.name)


def main(arguments: Sequence[str] = ()) -> None:
    """Reads a trace and writes a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, help="length of the time axis")
    chosen = parser.parse_args(arguments)
    draw(list(read_slices(chosen.trace)), chosen.picture, chosen.seconds)


def read_slices(path: Path) -> Iterator[Slice]:
    """Yields the slices of a trace that `collapipe trace` has written."""
    hosts: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    open_slices: dict[int, list[tuple[str, int]]] = {}
    for packet in Trace.FromString(path.read_bytes()).packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            if track.HasField("process"):
                hosts[track.uuid] = track.process.process_name
            elif track.HasField("thread"):
                tracks[track.uuid] = hosts[track.parent_uuid], track.thread.thread_name
        elif packet.HasField("track_event"):
            event = packet.track_event
            begun = open_slices.setdefault(event.track_uuid, [])
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                begun.append((event.name, packet.timestamp))
            else:
                name, start = begun.pop()
                host, track_name = tracks[event.track_uuid]
                yield Slice(host, track_name, name, 1e-9 * start, 1e-9 * packet.timestamp)


def draw(slices: Sequence[Slice], picture: Path, seconds: float | None) -> None:
    """Draws two lines for each host: what it computes, and what it sends and fetches."""
    from matplotlib import pyplot, rcParams

    rcParams["svg.hashsalt"] = "round"  # The same slices give the same file.
    hosts = [
        host
        for host in dict.fromkeys(one.host for one in slices)
        if any(one.host == host and one.kind for one in slices)
    ]
    figure, axis = pyplot.subplots(figsize=(9, 0.9 + 0.62 * len(hosts)), layout="constrained")
    bars: Bars = {}
    for one in slices:
        if one.kind is not None:
            bars.setdefault((one.host, one.kind), []).append((one.start, one.end))
    bars = join_bars(bars)
    for kind, colour in COLOURS.items():  # Weights are drawn before activations, which are shorter.
        for (host, what), spans in bars.items():
            if what == kind:
                line = 2 * hosts.index(host) + (kind in MOVES)
                axis.broken_barh(
                    [(start, end - start) for start, end in spans],
                    (line + 0.08, 0.84),
                    color=colour,
                    linewidth=0,
                )
        axis.bar(0, 0, color=colour, label=kind)
    for line in range(2, 2 * len(hosts), 2):
        axis.axhline(line, color="#cccccc", linewidth=0.5)
    axis.set(xlabel="seconds", ylim=(2 * len(hosts), 0), xlim=(0, seconds))
    axis.set_yticks(
        [line + 0.5 for line in range(2 * len(hosts))],
        [label for host in hosts for label in (f"{host}  computes", "moves")],
        fontsize=8,
    )
    axis.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=len(COLOURS), fontsize=8, frameon=False)
    figure.savefig(picture, format="svg", metadata={"Date": None})
    print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB, {len(slices)} slices")


if __name__ == "__main__":
    main(sys.argv[1:])
