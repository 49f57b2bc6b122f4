"""The scheduler collects the spans of hosts over real gRPC, and names the hosts that it does not reach."""

import time
from collections.abc import Iterator

import grpc
import pytest

from collapipe.rpc import ChannelPool, Security, serve
from collapipe.scheduler.trace_collection import collect_trace
from collapipe.telemetry.spans import SPANS
from collapipe.trace_service import TraceServicer
from collapipe.v1 import plan_pb2, scheduler_pb2, trace_pb2, trace_pb2_grpc

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
    server = serve(
        "127.0.0.1:0",
        Security.insecure(),
        lambda server, _: trace_pb2_grpc.add_TraceServiceServicer_to_server(Ahead(), server),
    )
    yield server.address
    server.drain(0)


@pytest.fixture
def channels() -> Iterator[ChannelPool]:
    pool = ChannelPool(Security.insecure())
    yield pool
    pool.close()


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
    assert "b cannot be reached" in missing["b"]
    assert missing["c"] == "c sends no heartbeats: start it again"
    assert missing["d"] == "d has not registered since the scheduler started"


def test_host_without_spans_of_the_round_says_so(address: str, channels: ChannelPool) -> None:
    another = plan_pb2.Attempt(job_id="never traced")
    messages = list(collect_trace(another, PLANS[:0], [edge_server(address)], channels))
    assert [m.host_id for m in messages] == ["scheduler", "edge-server"]
    assert all("has no spans of this round" in m.missing for m in messages)


def edge_server(address: str) -> scheduler_pb2.HostStatus:
    edge = status("edge-server", address)
    edge.host.role = scheduler_pb2.HOST_ROLE_EDGE_SERVER
    return edge
