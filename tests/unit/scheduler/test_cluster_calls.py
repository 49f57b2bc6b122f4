"""How the calls of a job end, and what the scheduler believes of what a control unit tells about its round."""

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from planned_jobs import SIZES, Clock, hosts, published, serving

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
from collapipe.rpc import ChannelPool
from collapipe.scheduler import cluster_calls, host_calls
from collapipe.scheduler.attempt_tools import AttemptTools
from collapipe.scheduler.cluster_calls import ClusterCalls
from collapipe.scheduler.evaluations import Evaluations
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_preparation import PreparedJob
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.round_progress import RoundProgress, limit_seconds
from collapipe.v1 import control_unit_pb2, control_unit_pb2_grpc, job_pb2, plan_pb2

LIMIT_SECONDS = 60.0


def test_job_looks_around_while_it_waits_for_calls(
    monkeypatch: pytest.MonkeyPatch, channels: ChannelPool
) -> None:
    monkeypatch.setattr(host_calls, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(host_calls, "_MEANWHILE_SECONDS", 0.01)
    looked = threading.Event()
    calls = HostCalls(channels, 5.0, looked.set)
    found = calls.in_parallel(lambda item: (item, looked.wait(LIMIT_SECONDS)), [1, 2])
    assert found == [(1, True), (2, True)]
    looked.clear()
    assert calls.run_detached(lambda: looked.wait(LIMIT_SECONDS))


def test_first_failure_is_raised_although_others_have_succeeded_before(
    channels: ChannelPool,
) -> None:
    looked = threading.Event()

    def work(item: int) -> int:
        if item:
            assert looked.wait(LIMIT_SECONDS)
            raise AttemptFailedError(f"call {item} failed")
        return item

    with pytest.raises(AttemptFailedError, match="call 2 failed"):
        HostCalls(channels, 5.0, looked.set).in_parallel(work, [0, 2])


LIMIT = 90.0
STEPS = 4


class Round:
    """A round of a model of 1 MB with 5,000 held-out rows, and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        request = control_unit_pb2.RunRoundRequest(local_steps=STEPS)
        self.progress = RoundProgress(request, LIMIT, 1_000_000, 0, 5000, self.clock)

    def tell(self, seconds: float = 0.0, **fields: Any) -> bool:
        """Tells something after some seconds. Returns whether nothing has risen for too long."""
        self.clock.now += seconds
        told = job_pb2.RoundProgress(**fields)
        return self.progress.take(control_unit_pb2.RunRoundResponse(progress=told))


@pytest.fixture
def round_() -> Round:
    return Round()


@pytest.mark.parametrize(
    ("silence", "predicted", "seconds"), [(10, 0.1, 180), (10, 10, 900), (5, 0, 10_800)]
)
def test_limit_is_thrice_that_of_the_unit(silence: float, predicted: float, seconds: float) -> None:
    assert limit_seconds(silence, predicted) == seconds


@pytest.mark.parametrize(
    "rising",
    [
        {"steps_done": 1},
        {"training_began": True},
        {"candidate_copied": True},
        {"moved_bytes": 7000},
        {"evaluated_rows": 5},
    ],
)
def test_only_values_that_rise_are_progress(round_: Round, rising: dict[str, Any]) -> None:
    assert not round_.tell(LIMIT - 1)
    assert not round_.tell(**rising)
    assert not round_.tell(LIMIT - 1, **rising)
    assert round_.tell(2, **rising)


@pytest.mark.parametrize(
    "told",
    [
        {"steps_done": STEPS + 1},
        {"moved_bytes": 1 << 63},
        {"evaluated_rows": 1 << 63},
        {"loss": 0.5, "samples_per_second": 1e9, "waiting_for": "more time"},
    ],
)
def test_values_beyond_their_largest_are_no_progress(round_: Round, told: dict[str, Any]) -> None:
    round_.tell(steps_done=STEPS, moved_bytes=0)
    round_.tell(steps_done=STEPS, moved_bytes=6_000_000, evaluated_rows=5000)
    assert round_.tell(LIMIT + 1, **told)


def test_first_evaluation_is_progress(round_: Round) -> None:
    evaluation = control_unit_pb2.RunRoundResponse(evaluation=job_pb2.EvaluationSums())
    found = []
    for seconds in (LIMIT, LIMIT, 1):
        round_.clock.now += seconds
        found.append(round_.progress.take(evaluation))
    assert found == [False, False, True]


def test_bytes_of_earlier_rounds_and_single_bytes_are_no_progress(round_: Round) -> None:
    round_.tell(moved_bytes=5_000_000)
    assert [round_.tell(LIMIT / 9, moved_bytes=5_000_000 + step) for step in range(10)][-1]


def test_slowest_possible_round_ends_after_the_bound(round_: Round) -> None:
    began = round_.clock.now
    told: dict[str, Any] = {"steps_done": 0, "moved_bytes": 0, "evaluated_rows": 0}
    round_.tell(**told)
    over, rises = False, 0
    while not over:
        rises += 1
        if rises == 1:
            told["training_began"] = True
        elif rises == 2:
            told["candidate_copied"] = True
        elif told["steps_done"] < STEPS:
            told["steps_done"] += 1
        elif told["moved_bytes"] < 6_000_000:
            told["moved_bytes"] += 6000
        else:
            told["evaluated_rows"] += 5
        over = round_.tell(LIMIT, **told)
        round_.clock.now += 0.001 * (rises > 2000 + STEPS)
    assert round_.clock.now - began <= (STEPS + 2004) * LIMIT + 1


UNIT = "control-unit"
Response = control_unit_pb2.RunRoundResponse
Told = Response | CollapipeError
Run = Callable[..., control_unit_pb2.RoundPrepared]


class ControlUnit(control_unit_pb2_grpc.ControlUnitServiceServicer):
    """A control unit that tells what a test chooses."""

    told: tuple[Told, ...] = ()
    address = ""

    def RunRound(
        self, request: control_unit_pb2.RunRoundRequest, context: grpc.ServicerContext
    ) -> Iterator[Response]:
        for message in self.told:
            if isinstance(message, CollapipeError):
                raise message
            yield message


@pytest.fixture(scope="module")
def unit() -> Iterator[ControlUnit]:
    served = ControlUnit()
    add = control_unit_pb2_grpc.add_ControlUnitServiceServicer_to_server
    with serving(served, add) as served.address:
        yield served


@pytest.fixture
def run(unit: ControlUnit, progress: JobProgress, channels: ChannelPool) -> Run:
    """Runs a round in which the control unit tells something."""
    found = hosts()
    cluster = found.clusters[0]
    cluster.control_unit.address = unit.address
    planner: Any = SimpleNamespace(hosts=replace(found, clusters=(cluster,)))
    prepared = PreparedJob(
        plan_pb2.ModelSpec(), SIZES, job_pb2.BlobSource(), plan_pb2.Commit(), [20], [4]
    )
    evaluations = Evaluations("classification", 1)
    tools = AttemptTools(progress, prepared, planner, HostCalls(channels, 60.0))
    calls = ClusterCalls(tools, evaluations)

    def run_round(*told: Told, local_steps: int = 1) -> control_unit_pb2.RoundPrepared:
        unit.told = told
        plan = plan_pb2.Plan(cluster_index=0, stages=[plan_pb2.Stage(host_id="device-0")])
        request = control_unit_pb2.RunRoundRequest(plan=plan, local_steps=local_steps)
        request.base.units.add()
        request.evaluate = True
        request.predicted_step_seconds = 0.001
        return calls.run(request)

    return run_round


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


def test_control_unit_speaks_for_its_cluster_and_in_few_words(run: Run, events: EventLog) -> None:
    words = "\x1b[2J" + "x" * 5000
    run(*[progress_of(index, waiting_for=words) for index in (7, 8, 2**32 - 1)], prepared())
    (told,) = [event.progress for event in published(events) if event.HasField("progress")]
    assert (told.cluster_index, len(told.waiting_for)) == (0, 1003)
    assert told.waiting_for.startswith("\\x1b[2Jx")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (progress_of(0, waiting_for="x" * (1 << 19)), "a message of 5242"),
        (counts(rows=-4.0), "the counts "),
        (counts(rows=4.0, right=-1.0), "the counts "),
        (counts(rows=1e300, right=1e300), "the counts "),
        (counts(rows=4.0, right=float("nan")), "the counts "),
        (counts(rows=4.0), "metric"),
        (state(num_samples=1 << 62), f"{1 << 62} training rows.* 20"),
        (state(cursor=plan_pb2.DataCursor(num_rows=1 << 63)), f"{1 << 63} .*rows.* 20"),
        (state(units=[plan_pb2.UnitState(unit_index=7)]), r"cluster 0 .*\[7\]"),
        (state(units=[plan_pb2.UnitState()] * 2), r"cluster 0 .*\[0, 0\]"),
        (state(cluster_index=1), "cluster 1"),
        (state(units=[plan_pb2.UnitState(weights_digest="../x")]), "SHA-256"),
        (summary(local_steps=2), "2 .* has 1"),
        (summary(training_seconds=float("inf")), "inf"),
        (summary(losses=[1.0, float("nan")]), "nan"),
        (summary(losses=[-1e300]), "-1e.300 as losses"),
        (summary(training_seconds=-1.0), "-1.0 as training_seconds"),
        (summary(gather_seconds=1e300), "1e.300 as gather_seconds"),
        (summary(fetched_bytes=1 << 63), f"{1 << 63} as fetched_bytes"),
        (
            summary(stages=[job_pb2.StageReport(host_id="device-0", busy_ratio=-2.0)]),
            "-2.0 as busy",
        ),
        (state(step_index=(1 << 64) - 1), f"{(1 << 64) - 1} optimizer steps"),
        (state(units=[plan_pb2.UnitState(largest_change=float("inf"))]), "inf as largest_change"),
        (progress_of(0, moved_bytes=1 << 63), f"{1 << 63} as moved_bytes"),
        (progress_of(0, samples_per_second=-1.0), "-1.0 as samples_per_second"),
        (summary(pushed=[job_pb2.WeightsTransfer(host_id="another")]), "'another'"),
        (progress_of(0, stages=[job_pb2.StageReport(busy_ratio=float("nan"))]), "nan"),
        (progress_of(0, steps_done=1), "without a result"),
        (PeerLostError("another", "gone"), "blames another"),
        (DivergedError("not finite", "another"), "blames another"),
    ],
)
def test_control_unit_that_tells_what_cannot_be_is_blamed(run: Run, told: Told, words: str) -> None:
    with pytest.raises(PeerFaultyError, match=f"{UNIT} .*{words}") as raised:
        run(told)
    assert raised.value.host_id == UNIT
    assert not raised.value.refuses


@pytest.mark.parametrize("error", [InvalidInputError, InfeasibleError, NotPermittedError])
def test_control_unit_that_refuses_a_round_is_named(run: Run, error: type[CollapipeError]) -> None:
    with pytest.raises(PeerFaultyError, match=f"{UNIT} .*a.jsonl") as raised:
        run(error("no file a.jsonl"))
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
def test_every_failure_names_the_control_unit_that_tells_it(run: Run, told: CollapipeError) -> None:
    with pytest.raises(CollapipeError, match=UNIT) as raised:
        run(told)
    assert str(told) in str(raised.value)
    assert not isinstance(raised.value, (CancelledError, PeerFaultyError))
    # It may blame a device of its cluster.
    assert getattr(raised.value, "host_id", "") == getattr(told, "host_id", "")


def test_signs_of_life_without_progress_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 120.0).__next__  # The limit is 180 s.
    monkeypatch.setattr(cluster_calls, "RoundProgress", partial(RoundProgress, clock=clock))
    signs = [progress_of(0, steps_done=1, waiting_for="patience")] * 3
    with pytest.raises(PeerFaultyError, match=f"{UNIT} .*180 s.*patience"):
        run(*signs)
    assert run(signs[0], prepared())


def test_losses_of_many_mini_batches_are_not_too_long(run: Run) -> None:
    told = summary(losses=[1.0] * 30_000, gradient_norms=[1.0] * 30_000)
    with pytest.raises(PeerLostError, match="262176"):
        run(told)
    assert len(run(told, local_steps=30_000).summary.losses) == 30_000
