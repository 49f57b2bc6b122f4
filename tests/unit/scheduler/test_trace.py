"""The scheduler collects the spans of hosts over real gRPC, and the page draws them as few bars."""

import math
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from planned_jobs import serving

from collapipe.rpc import ChannelPool
from collapipe.scheduler.trace_collection import collect_trace
from collapipe.scheduler.web.timeline import MOST_BARS, join_bars, kind_of, timeline
from collapipe.telemetry.spans import SPANS
from collapipe.trace_service import TraceServicer
from collapipe.v1 import plan_pb2, scheduler_pb2, trace_pb2, trace_pb2_grpc
from collapipe.v1.scheduler_pb2 import GetTraceResponse
from collapipe.v1.trace_pb2 import Span

AHEAD = 1000.0
"""The clock of the host is this many seconds ahead."""
ATTEMPT = plan_pb2.Attempt(job_id="traced", round_index=4, attempt=2, plan_id="plan")
PLANS = [plan_pb2.Plan(stages=[plan_pb2.Stage(host_id=name) for name in "abcd"])]


class Ahead(TraceServicer):
    """A host of this process whose clock is ahead."""

    def ReadClock(
        self, request: trace_pb2.ReadClockRequest, context: grpc.ServicerContext
    ) -> trace_pb2.ReadClockResponse:
        answer = super().ReadClock(request, context)
        answer.received_seconds += AHEAD
        answer.sent_seconds += AHEAD
        return answer


@pytest.fixture
def address() -> Iterator[str]:
    with serving(Ahead(), trace_pb2_grpc.add_TraceServiceServicer_to_server) as served:
        yield served


def status(host_id: str, address: str, *, alive: bool = True) -> scheduler_pb2.HostStatus:
    host = scheduler_pb2.Host(host_id=host_id, address=address)
    return scheduler_pb2.HostStatus(host=host, alive=alive)


def test_hosts_send_their_spans_and_others_are_named(address: str, channels: ChannelPool) -> None:
    SPANS.begin_round("traced", 4, 2)
    started = time.perf_counter()
    for step in range(2500):  # More than one message.
        SPANS.record("compute", "forward", started, step=step)
    statuses = [
        status("a", address),
        status("b", "127.0.0.1:1"),
        status("c", address, alive=False),
        status("not in the plan", address),
    ]
    messages = list(collect_trace(ATTEMPT, PLANS, statuses, channels))
    assert list(dict.fromkeys(m.host_id for m in messages)) == ["scheduler", "a", "b", "c", "d"]
    steps = [span.step for m in messages if m.host_id == "a" for span in m.spans]
    assert steps == list(range(2500))
    [a, *_] = [m for m in messages if m.host_id == "a"]
    assert abs(a.clock_offset_seconds - AHEAD) <= a.clock_uncertainty_seconds
    missing = {m.host_id: m.missing for m in messages if m.missing}
    assert list(missing) == ["b", "c", "d"]
    for host_id, reason in (("b", "reached"), ("c", "heartbeats"), ("d", "registered")):
        assert missing[host_id].startswith(host_id) and reason in missing[host_id]


def test_host_without_spans_of_the_round_says_so(address: str, channels: ChannelPool) -> None:
    another = plan_pb2.Attempt(job_id="never traced")
    edge = status("edge-server", address)
    edge.host.role = scheduler_pb2.HOST_ROLE_EDGE_SERVER
    messages = list(collect_trace(another, PLANS[:0], [edge], channels))
    assert [m.host_id for m in messages] == ["scheduler", "edge-server"]
    assert all("no spans" in m.missing for m in messages)


class Lying(Ahead):
    """A host that tells what a test chooses, without an end."""

    clock = trace_pb2.ReadClockResponse()
    spans: tuple[Span, ...] = ()

    def ReadClock(
        self, request: trace_pb2.ReadClockRequest, context: grpc.ServicerContext
    ) -> trace_pb2.ReadClockResponse:
        return self.clock

    def GetSpans(
        self, request: trace_pb2.GetSpansRequest, context: grpc.ServicerContext
    ) -> Iterator[trace_pb2.GetSpansResponse]:
        while True:
            yield trace_pb2.GetSpansResponse(spans=self.spans)


@pytest.mark.parametrize(
    ("clock", "spans", "words"),
    [
        (math.nan, [Span()], "nan as received_seconds"),
        (-1.0, [Span()], "-1.0 as received_seconds"),
        (1.0, [Span(started_seconds=math.inf)], "inf as started_seconds"),
        (1.0, [Span(name="x" * 1001)], "1001 characters as name"),
        (1.0, [Span(bytes=1 << 63)], "as bytes"),
        (1.0, [Span(name="compute")] * 30_000, "150000 spans, over the limit of 131072"),
    ],
)
def test_trace_goes_on_without_a_host_that_tells_what_cannot_be(
    channels: ChannelPool, clock: float, spans: list[Span], words: str
) -> None:
    host = Lying()
    host.clock = trace_pb2.ReadClockResponse(received_seconds=clock, sent_seconds=clock)
    host.spans = tuple(spans)
    with serving(host, trace_pb2_grpc.add_TraceServiceServicer_to_server) as address:
        messages = list(collect_trace(ATTEMPT, PLANS, [status("a", address)], channels))
    (missing,) = [m.missing for m in messages if m.host_id == "a" and m.missing]
    assert missing.startswith("a sent ") and words in missing


def span(
    start: float, end: float, name: str = "forward", track: str = "compute for cluster 0"
) -> Span:
    return Span(track=track, name=name, started_seconds=start, ended_seconds=end)


def answer(*spans: Span, host_id: str = "a", **more: Any) -> GetTraceResponse:
    return GetTraceResponse(host_id=host_id, spans=spans, **more)


def bars(*messages: GetTraceResponse) -> dict[str, Any]:
    return {host["id"]: host["bars"] for host in timeline(messages)["hosts"]}


def test_spans_of_two_hosts_have_one_clock() -> None:
    sent = span(152, 153, "send backward", "send to a")
    messages = [
        answer(span(100, 101)),
        answer(sent, host_id="b", clock_offset_seconds=50.0),
        answer(host_id="c", missing="c sends no heartbeats"),
    ]
    assert bars(*messages) == {"a": {"forward": [[0, 1]]}, "b": {"activations": [[2, 3]]}}
    shown = timeline(messages)
    assert shown["seconds"] == 3 and shown["missing"] == {"c": "c sends no heartbeats"}


def test_many_spans_become_few_bars_that_cover_them() -> None:
    spans = [span(0.002 * index, 0.002 * index + 0.001) for index in range(4 * MOST_BARS)]
    halves = len(spans) // 2
    drawn = bars(answer(*spans[:halves]), answer(*spans[halves:]))["a"]["forward"]
    assert 0 < len(drawn) <= MOST_BARS
    assert drawn[0][0] == 0 and abs(drawn[-1][1] - spans[-1].ended_seconds) < 0.01


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_spans_at_no_time_are_left_out(odd: float) -> None:
    spans = [span(odd, odd) for _ in range(MOST_BARS + 1)]
    found = answer(*spans, span(1, 2), span(2, odd, "backward"))
    assert bars(found) == {"a": {"forward": [[0, 1]]}} and timeline([found])["seconds"] == 1


def test_more_hosts_than_bars_have_one_bar_of_each_kind() -> None:
    names = [f"device-{index}" for index in range(MOST_BARS + 1)]
    messages = [answer(span(0, 1), span(1.0001, 2), host_id=name) for name in names]
    assert bars(*messages) == {name: {"forward": [[0.0, 2.0]]} for name in names}


def test_bars_that_are_too_far_apart_to_join_stay() -> None:
    far = [(-1.5e308, -1.5e308), (1.5e308, 1.5e308)]
    assert join_bars({("a", "forward"): far}, 1) == {("a", "forward"): far}


def test_span_without_a_name_is_left_out() -> None:
    spans = [span(0, 1, name) for name in ("", " ", "forward")]
    assert bars(answer(*spans)) == {"a": {"forward": [[0, 1]]}}


def test_waiting_and_the_phases_of_the_scheduler_are_left_out() -> None:
    assert kind_of("device-0-0", "compute for cluster 0", "wait for a frame") is None
    assert kind_of("scheduler", "round", "commit") is None
    assert kind_of("edge-server", "average", "average unit 1") == "average, commit"
    assert kind_of("device-0-0", "weights of unit 1", "push") == "weights"


def test_nothing_recorded_is_an_empty_picture() -> None:
    assert timeline([])["seconds"] == 0
