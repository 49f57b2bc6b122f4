"""What the scheduler believes of what a control unit tells about its round, over real gRPC."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    DivergedError,
    InfeasibleError,
    InvalidInputError,
    NotPermittedError,
    PeerFaultyError,
    PeerLostError,
)
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.scheduler import round_progress
from collapipe.scheduler.cluster_calls import ClusterCalls
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_preparation import PreparedJob
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.v1 import control_unit_pb2, control_unit_pb2_grpc, job_pb2, plan_pb2

from .jobs import SIZES, hosts, job

Response = control_unit_pb2.RunRoundResponse
Told = Response | CollapipeError | Iterator[Response]


class ControlUnit(control_unit_pb2_grpc.ControlUnitServiceServicer):
    """A control unit that tells what a test chooses."""

    def __init__(self, told: Iterable[Told]) -> None:
        self._told = told

    def RunRound(
        self, request: control_unit_pb2.RunRoundRequest, context: grpc.ServicerContext
    ) -> Iterator[Response]:
        for message in self._told:
            if isinstance(message, Iterator):
                yield from message
            elif isinstance(message, CollapipeError):
                raise message
            else:
                yield message


@contextmanager
def telling(folder: Path, *told: Told) -> Iterator[tuple[Any, EventLog]]:
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
    prepared = PreparedJob(
        plan_pb2.ModelSpec(), SIZES, job_pb2.BlobSource(), plan_pb2.Commit(), [20], [4]
    )
    calls = ClusterCalls(progress, planner, channels, HostCalls(5.0), None, prepared)

    def run(local_steps: int = 1) -> control_unit_pb2.RoundPrepared:
        plan = plan_pb2.Plan(cluster_index=0, stages=[plan_pb2.Stage(host_id="device-0")])
        request = control_unit_pb2.RunRoundRequest(plan=plan, local_steps=local_steps)
        request.base.units.add()
        request.evaluate = True
        request.predicted_step_seconds = 0.001
        return calls.run(request)

    try:
        yield run, log
    finally:
        channels.close()
        server.drain(0)


def progress_of(cluster: int, **fields: Any) -> Response:
    return Response(progress=job_pb2.RoundProgress(cluster_index=cluster, **fields))


def prepared(**fields: Any) -> Response:
    found = Response(prepared=control_unit_pb2.RoundPrepared(**fields))
    if not found.prepared.state.units:
        found.prepared.state.units.add()
    return found


def state(**fields: Any) -> Response:
    return prepared(state=plan_pb2.ClusterState(**fields))


def summary(**fields: Any) -> Response:
    return prepared(summary=job_pb2.RoundSummary(**fields))


def counts(**sums: float) -> Response:
    return Response(evaluation=job_pb2.EvaluationSums(sums=sums))


def test_control_unit_speaks_for_its_own_cluster_and_in_few_words(tmp_path: Path) -> None:
    told = [progress_of(index, waiting_for="x" * 5000) for index in (7, 8, 2**32 - 1)]
    with telling(tmp_path, *told, prepared()) as (run, log):
        run()
    log.close()
    events = [event.progress for event in log.watch(1.0) if event and event.HasField("progress")]
    assert [event.cluster_index for event in events] == [0]
    assert len(events[0].waiting_for) == 1000


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (progress_of(0, waiting_for="x" * (1 << 19)), "a message of 5242"),
        (counts(rows=-4.0), "the counts "),
        (counts(rows=4.0, right=-1.0), "the counts "),
        (counts(rows=1e300, right=1e300), "the counts "),
        (counts(rows=4.0, right=float("nan")), "the counts "),
        (counts(rows=4.0), "the metric cannot be computed"),
        (state(num_samples=1 << 62), "training rows, but it has loaded 20"),
        (state(cursor=plan_pb2.DataCursor(num_rows=1 << 63)), "rows, but it has loaded 20"),
        (state(units=[plan_pb2.UnitState(unit_index=7)]), r"of cluster 0 with units \[7\]"),
        (state(units=[plan_pb2.UnitState()] * 2), r"of cluster 0 with units \[0, 0\]"),
        (state(cluster_index=1), "the state of cluster 1 with"),
        (state(units=[plan_pb2.UnitState(weights_digest="../x")]), "must be a SHA-256"),
        (summary(local_steps=2), "2 trained mini-batches, but the round has 1"),
        (summary(training_seconds=float("inf")), "a measurement of inf"),
        (summary(losses=[1.0, float("nan")]), "a measurement of nan"),
        (
            summary(pushed=[job_pb2.WeightsTransfer(host_id="device-of-others")]),
            "'device-of-others', which has no stage",
        ),
        (
            progress_of(0, stages=[job_pb2.StageReport(busy_ratio=float("nan"))]),
            "a measurement of nan",
        ),
        (progress_of(0, steps_done=1), "ended its round without a result"),
        (PeerLostError("device-of-others", "gone"), "blames device-of-others"),
        (DivergedError("not finite", "device-of-others"), "blames device-of-others"),
    ],
)
def test_control_unit_that_tells_what_cannot_be_is_to_blame(
    tmp_path: Path, told: Response | CollapipeError, words: str
) -> None:
    unit = hosts().clusters[0].control_unit.host_id
    with telling(tmp_path, told) as (run, _), pytest.raises(PeerFaultyError, match=words) as raised:
        run()
    assert raised.value.host_id == unit and unit in str(raised.value)
    assert not raised.value.refuses


@pytest.mark.parametrize("error", [InvalidInputError, InfeasibleError, NotPermittedError])
def test_control_unit_that_refuses_its_round_is_named(
    tmp_path: Path, error: type[CollapipeError]
) -> None:
    unit = hosts().clusters[0].control_unit.host_id
    words = f"{unit} refused its round: no file a.jsonl"
    told = error("no file a.jsonl")
    with telling(tmp_path, told) as (run, _), pytest.raises(PeerFaultyError, match=words) as raised:
        run()
    assert raised.value.refuses


@pytest.mark.parametrize(
    "told",
    [
        AttemptFailedError("it hangs"),
        CancelledError("it goes away"),
        DivergedError("the loss is nan"),
        PeerLostError("device-0", "device-0 is gone"),
    ],
)
def test_every_failure_names_the_control_unit_that_tells_it(
    tmp_path: Path, told: CollapipeError
) -> None:
    unit = hosts().clusters[0].control_unit.host_id
    with telling(tmp_path, told) as (run, _), pytest.raises(CollapipeError, match=unit) as raised:
        run()
    assert str(told) in str(raised.value)
    assert not isinstance(raised.value, (CancelledError, PeerFaultyError))


def test_signs_of_life_without_progress_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = hosts().clusters[0].control_unit.host_id
    monkeypatch.setattr(round_progress, "_LEAST_SILENCES", 0.0)  # 0.09 s are left.

    def signs() -> Iterator[Response]:
        while True:
            yield progress_of(0, steps_done=1, waiting_for="patience")
            time.sleep(0.01)

    with telling(tmp_path, signs()) as (run, _), pytest.raises(PeerFaultyError) as raised:
        run()
    assert f"{unit} has sent signs of life for 0 s without progress" in str(raised.value)
    assert "patience" in str(raised.value)


def test_losses_of_many_mini_batches_are_not_too_long(tmp_path: Path) -> None:
    told = summary(losses=[1.0] * 30_000, gradient_norms=[1.0] * 30_000)
    with telling(tmp_path, told) as (run, _):
        with pytest.raises(PeerLostError, match="over the limit of 262176"):
            run()
        assert len(run(local_steps=30_000).summary.losses) == 30_000


def test_control_unit_may_blame_a_device_of_its_cluster(tmp_path: Path) -> None:
    device = hosts().clusters[0].devices[0].host_id
    told = PeerLostError(device, "gone")
    with telling(tmp_path, told) as (run, _), pytest.raises(PeerLostError) as raised:
        run()
    assert raised.value.host_id == device
