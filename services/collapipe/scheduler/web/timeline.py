"""Turns the spans of a round into bars of a picture: few enough to draw, and each of a kind that people can tell apart."""

import math
from collections.abc import Iterable, Iterator, Sequence

from collapipe.scheduler.trace_collection import SCHEDULER
from collapipe.scheduler.web.values import Value, number, text
from collapipe.v1 import scheduler_pb2

KINDS = ("forward", "backward", "update", "weights", "average, commit", "activations")
"""The kinds of bars, in the order of a legend. Those after `update` move or average data, and compute nothing for the pipeline."""

MOST_BARS = 1200
_WEIGHTS = ("push", "fetch", "send")


def kind_of(host: str, track: str, name: str) -> str | None:
    """Returns the kind of a span; `None` if a picture leaves it out."""
    first = name.partition(" ")[0]
    if track.startswith("compute") and first in ("forward", "backward", "update"):
        return first
    if track.startswith("weights") and first in _WEIGHTS:
        return "weights"
    if track.startswith("send to"):
        return "activations"
    if first in ("average", "commit") and host != SCHEDULER:
        return "average, commit"
    return None


Bars = dict[tuple[str, str], list[tuple[float, float]]]
"""The begin and the end of bars in seconds, by host and kind."""


def join_bars(bars: Bars, most: int = MOST_BARS) -> Bars:
    """Joins bars of one host and kind that follow each other closely, until there are few enough or one of each."""
    gap = 0.0
    while sum(map(len, bars.values())) > max(most, len(bars)) and gap < math.inf:
        gap = 1.5 * gap or 1e-3
        bars = {key: list(_joined(spans, gap)) for key, spans in bars.items()}
    return bars


def _joined(spans: Sequence[tuple[float, float]], gap: float) -> Iterator[tuple[float, float]]:
    """Joins spans with less than `gap` seconds between them."""
    ordered = sorted(spans)
    start, end = ordered[0]
    for next_start, next_end in ordered[1:]:
        if next_start - end < gap:
            end = max(end, next_end)
        else:
            yield start, end
            start, end = next_start, next_end
    yield start, end


def timeline(messages: Iterable[scheduler_pb2.GetTraceResponse]) -> Value:
    """Returns the bars of each host, on the clock of the scheduler, and why spans of some hosts are missing."""
    bars: Bars = {}
    hosts: dict[str, str] = {}
    for message in messages:
        hosts[message.host_id] = message.missing
        for span in message.spans:
            kind = kind_of(message.host_id, span.track, span.name)
            ends = (span.started_seconds, span.ended_seconds)
            begin, end = (each - message.clock_offset_seconds for each in ends)
            # Hosts may send any numbers.
            if kind is not None and math.isfinite(begin) and math.isfinite(end):
                spans = bars.setdefault((message.host_id, kind), [])
                spans.append((begin, end))
                if len(spans) > 4 * MOST_BARS:  # A long round would fill the memory.
                    bars |= join_bars({(message.host_id, kind): spans})
    begin = min((start for spans in bars.values() for start, _ in spans), default=0.0)
    end = max((end for spans in bars.values() for _, end in spans), default=0.0)
    drawn = join_bars(bars)
    return {
        "seconds": number(end - begin),
        "kinds": KINDS,
        "missing": {host: text(reason) for host, reason in hosts.items() if reason},
        "hosts": [
            {
                "id": host,
                "bars": {
                    kind: [
                        [number(a - begin, 5), number(b - begin, 5)] for a, b in drawn[host, kind]
                    ]
                    for kind in KINDS
                    if (host, kind) in drawn
                },
            }
            for host in hosts
            if any((host, kind) in drawn for kind in KINDS)
        ],
    }
