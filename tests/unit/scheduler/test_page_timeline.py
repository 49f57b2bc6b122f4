"""Spans become few bars, of kinds that people can tell apart, on one clock."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from collapipe.scheduler.web.timeline import MOST_BARS, join_bars, kind_of, timeline
from collapipe.v1.scheduler_pb2 import GetTraceResponse
from collapipe.v1.trace_pb2 import Span


def span(track: str, name: str, start: float, end: float) -> Span:
    return Span(track=track, name=name, started_seconds=start, ended_seconds=end)


def bars(shown: dict[str, Any]) -> dict[str, Any]:
    return {host["id"]: host["bars"] for host in shown["hosts"]}


def test_spans_of_two_hosts_have_one_clock() -> None:
    shown = timeline(
        [
            GetTraceResponse(
                host_id="a", spans=[span("compute for cluster 0", "forward", 100, 101)]
            ),
            GetTraceResponse(
                host_id="b",
                clock_offset_seconds=50.0,
                spans=[span("send to a", "send backward", 152, 153)],
            ),
            GetTraceResponse(host_id="c", missing="c sends no heartbeats"),
        ]
    )
    assert bars(shown) == {"a": {"forward": [[0, 1]]}, "b": {"activations": [[2, 3]]}}
    assert shown["seconds"] == 3 and shown["missing"] == {"c": "c sends no heartbeats"}


def test_many_spans_become_few_bars_that_cover_them() -> None:
    def messages() -> Iterator[GetTraceResponse]:
        for first in range(0, 20_000, 100):
            spans = [
                span("compute", "forward", 0.002 * i, 0.002 * i + 0.001)
                for i in range(first, first + 100)
            ]
            yield GetTraceResponse(host_id="a", spans=spans)

    drawn = bars(timeline(messages()))["a"]["forward"]
    assert 0 < len(drawn) <= MOST_BARS
    assert drawn[0][0] == 0 and abs(drawn[-1][1] - 39.999) < 0.01


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_spans_at_no_time_are_left_out(odd: float) -> None:
    spans = [span("compute", "forward", odd, odd) for _ in range(MOST_BARS + 1)]
    spans += [span("compute", "forward", 1, 2), span("compute", "backward", 2, odd)]
    shown = timeline([GetTraceResponse(host_id="a", spans=spans)])
    assert bars(shown) == {"a": {"forward": [[0, 1]]}} and shown["seconds"] == 1


def test_more_hosts_than_bars_have_one_bar_of_each_kind() -> None:
    spans = [span("compute", "forward", 0, 1), span("compute", "forward", 1.0001, 2)]
    messages = [
        GetTraceResponse(host_id=f"device-{index}", spans=spans) for index in range(MOST_BARS + 1)
    ]
    assert set(map(str, bars(timeline(messages)).values())) == {"{'forward': [[0.0, 2.0]]}"}


def test_bars_that_are_too_far_apart_to_join_stay() -> None:
    far = [(-1.5e308, -1.5e308), (1.5e308, 1.5e308)]
    assert join_bars({("a", "forward"): far}, 1) == {("a", "forward"): far}


def test_span_without_a_name_is_left_out() -> None:
    spans = [span("compute", name, 0, 1) for name in ("", " ", "forward")]
    assert bars(timeline([GetTraceResponse(host_id="a", spans=spans)])) == {
        "a": {"forward": [[0, 1]]}
    }


def test_waiting_and_the_phases_of_the_scheduler_are_left_out() -> None:
    assert kind_of("device-0-0", "compute for cluster 0", "wait for a frame") is None
    assert kind_of("scheduler", "round", "commit") is None
    assert kind_of("edge-server", "average", "average unit 1") == "average, commit"
    assert kind_of("device-0-0", "weights of unit 1", "push") == "weights"


def test_nothing_recorded_is_an_empty_picture() -> None:
    assert timeline([])["seconds"] == 0
