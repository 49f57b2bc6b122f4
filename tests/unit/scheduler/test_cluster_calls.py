"""What the scheduler believes of what a control unit tells about its round, over real gRPC."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from collapipe.errors import CollapipeError, DivergedError, PeerLostError
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.scheduler.cluster_calls import ClusterCalls
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.v1 import control_unit_pb2, control_unit_pb2_grpc, job_pb2, plan_pb2

from .jobs import hosts, job

Response = control_unit_pb2.RunRoundResponse


class ControlUnit(control_unit_pb2_grpc.ControlUnitServiceServicer):
    """A control unit that tells what a test chooses."""

    def __init__(self, told: list[Response | CollapipeError]) -> None:
        self._told = told

    def RunRound(
        self, request: control_unit_pb2.RunRoundRequest, context: grpc.ServicerContext
    ) -> Iterator[Response]:
        for message in self._told:
            if isinstance(message, CollapipeError):
                raise message
            yield message


@contextmanager
def telling(folder: Path, *told: Response | CollapipeError) -> Iterator[tuple[Any, EventLog]]:
    """Yields a function that runs a round in which the control unit tells this, and the events of the job."""
    plain, log, servicer = Security.insecure(), EventLog(), ControlUnit(list(told))
    server = serve(
        "127.0.0.1:0",
        plain,
        lambda server, _: control_unit_pb2_grpc.add_ControlUnitServiceServicer_to_server(
            servicer, server
        ),
    )
    found = hosts()
    cluster = found.clusters[0]
    cluster.control_unit.address = server.address
    channels, store = ChannelPool(plain), JobStore(folder)
    progress = JobProgress(store.create(job()), store, log)
    planner: Any = SimpleNamespace(hosts=replace(found, clusters=(cluster,)))
    calls = ClusterCalls(progress, planner, channels, HostCalls(5.0), None, [20])

    def run(local_steps: int = 1) -> control_unit_pb2.RoundPrepared:
        plan = plan_pb2.Plan(cluster_index=0)
        return calls.run(control_unit_pb2.RunRoundRequest(plan=plan, local_steps=local_steps))

    try:
        yield run, log
    finally:
        channels.close()
        server.drain(0)


def progress_of(cluster: int, **fields: Any) -> Response:
    return Response(progress=job_pb2.RoundProgress(cluster_index=cluster, **fields))


def test_control_unit_speaks_for_its_own_cluster_and_in_few_words(tmp_path: Path) -> None:
    told = [progress_of(index, waiting_for="x" * 5000) for index in (7, 8, 2**32 - 1)]
    prepared = Response(prepared=control_unit_pb2.RoundPrepared())
    with telling(tmp_path, *told, prepared) as (run, log):
        run()
    log.close()
    events = [event.progress for event in log.watch(1.0) if event and event.HasField("progress")]
    assert [event.cluster_index for event in events] == [0]
    assert len(events[0].waiting_for) == 1000


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (progress_of(0, waiting_for="x" * (1 << 19)), "a message of 5242"),
        (Response(evaluation=job_pb2.EvaluationSums(sums={"rows": -4.0})), "the counts "),
        (
            Response(evaluation=job_pb2.EvaluationSums(sums={"right": float("nan")})),
            "the counts ",
        ),
        (
            Response(evaluation=job_pb2.EvaluationSums(sums={"rows": 4.0})),
            "the metric cannot be computed",
        ),
        (
            Response(
                prepared=control_unit_pb2.RoundPrepared(
                    state=plan_pb2.ClusterState(num_samples=1 << 62)
                )
            ),
            "training rows, but it has loaded 20",
        ),
        (PeerLostError("device-of-others", "gone"), "blames device-of-others"),
        (DivergedError("not finite", "device-of-others"), "blames device-of-others"),
    ],
)
def test_control_unit_that_tells_what_cannot_be_is_to_blame(
    tmp_path: Path, told: Response | CollapipeError, words: str
) -> None:
    unit = hosts().clusters[0].control_unit.host_id
    with telling(tmp_path, told) as (run, _), pytest.raises(PeerLostError, match=words) as raised:
        run()
    assert raised.value.host_id == unit


def test_losses_of_many_mini_batches_are_not_too_long(tmp_path: Path) -> None:
    summary = job_pb2.RoundSummary(losses=[1.0] * 30_000, gradient_norms=[1.0] * 30_000)
    prepared = Response(prepared=control_unit_pb2.RoundPrepared(summary=summary))
    with telling(tmp_path, prepared) as (run, _):
        with pytest.raises(PeerLostError, match="over the limit of 262176"):
            run()
        assert len(run(local_steps=30_000).summary.losses) == 30_000


def test_control_unit_may_blame_a_device_of_its_cluster(tmp_path: Path) -> None:
    device = hosts().clusters[0].devices[0].host_id
    told = PeerLostError(device, "gone")
    with telling(tmp_path, told) as (run, _), pytest.raises(PeerLostError) as raised:
        run()
    assert raised.value.host_id == device
