"""Whom a control unit believes to be lost, and which stages it leaves."""

import queue
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from collapipe.control_unit.cluster_pipeline import ClusterPipeline
from collapipe.control_unit.remote_stage import RemoteStage
from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    DivergedError,
    PeerLostError,
)
from collapipe.job_life import stage_progress
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.stage_runtime import Mailbox
from collapipe.tensors import Frame, FrameKind
from collapipe.v1 import stage_pb2, stage_pb2_grpc
from collapipe.v1.control_unit_pb2 import RunRoundRequest
from collapipe.v1.generation_pb2 import GenerationOptions
from collapipe.v1.job_pb2 import StageReport
from collapipe.v1.plan_pb2 import Plan, Stage, UnitState

from .clusters import SECONDS

PLAIN = Security.insecure()


class StageHost(stage_pb2_grpc.StageServiceServicer):
    """A host whose stage fails at once if a test says how, and else works on until its caller goes away."""

    def __init__(self) -> None:
        self.failed: stage_pb2.StageFailed | None = None
        self.answers: list[stage_pb2.RunStageResponse] = []
        self.has_begun, self.is_left = threading.Event(), threading.Event()
        self.channels = ChannelPool(PLAIN)
        self.server = serve("127.0.0.1:0", PLAIN, self._add)
        self.stage = Stage(host_id="stage", address=self.server.address, start_unit=1, stop_unit=2)

    def _add(self, server: grpc.Server, address: str) -> None:
        stage_pb2_grpc.add_StageServiceServicer_to_server(self, server)

    def close(self) -> None:
        self.is_left.set()
        self.channels.close()
        self.server.drain(0)

    def RunStage(
        self, request_iterator: Iterator[stage_pb2.RunStageRequest], context: grpc.ServicerContext
    ) -> Iterator[stage_pb2.RunStageResponse]:
        next(request_iterator)
        if self.failed is not None:
            yield stage_pb2.RunStageResponse(failed=self.failed)
            return
        yield from self.answers
        context.add_callback(self.is_left.set)
        self.has_begun.set()
        self.is_left.wait(SECONDS)


@pytest.fixture
def host() -> Iterator[StageHost]:
    with ExitStack() as stack:
        host = StageHost()
        stack.callback(host.close)
        yield host


@pytest.mark.parametrize("diverged", [False, True])
@pytest.mark.parametrize(
    ("blamed", "believed"),
    [
        ("neighbour", "neighbour"),
        ("127.0.0.1:9", "127.0.0.1:9"),
        ("10.0.0.9:7100", "10.0.0.9:7100"),
        ("device-of-others", "stage"),
    ],
    ids=["host of the plan", "address of the plan", "source of weights", "host of another cluster"],
)
def test_stage_may_blame_only_hosts_that_it_has_to_do_with(
    host: StageHost, blamed: str, believed: str, diverged: bool
) -> None:
    host.failed = stage_pb2.StageFailed(message="lost", blamed_host_id=blamed, diverged=diverged)
    has_failed = threading.Event()
    failures: list[CollapipeError] = []

    def on_failure(failure: CollapipeError) -> None:
        failures.append(failure)
        has_failed.set()

    plan = Plan(stages=[host.stage, Stage(host_id="neighbour", address="127.0.0.1:9")])
    source = stage_pb2.UnitSource(weights_addresses=["10.0.0.9:7100"])
    configure = stage_pb2.ConfigureStage(plan=plan, sources=[source])
    remote = RemoteStage(host.stage, configure, host.channels, SECONDS, on_failure)
    assert has_failed.wait(SECONDS)
    remote.close()
    (failure,) = failures
    assert isinstance(failure, DivergedError if diverged else PeerLostError)
    assert failure.host_id == believed


Answer = stage_pb2.RunStageResponse
UNIT = UnitState(unit_index=1, weights_digest="0" * 64)


def step_done(**fields: Any) -> Answer:
    return Answer(step_done=stage_pb2.StepDone(**fields))


def finished(*units: UnitState, **fields: Any) -> Answer:
    return Answer(finished=stage_pb2.RoundFinished(units=units, **fields))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([Answer()], "without a content"),
        ([Answer(configured={"fetched_bytes": 1 << 63})], f"{1 << 63} as fetched_bytes"),
        ([Answer(configured={"fetch_seconds": -1.0})], "-1.0 as fetch_seconds"),
        ([Answer(configured={"fetch_seconds": float("nan")})], "nan as fetch_seconds"),
        ([step_done(squared_gradient_norms=[-1.0])], "-1.0 as a squared norm"),
        ([step_done(squared_gradient_norms=[1e308])], "1e.308 as a squared norm"),
        ([step_done(squared_gradient_norms=[1.0] * 200_000)], "an answer of 1600008 bytes"),
        ([step_done(times={"forward_seconds": float("inf")})], "inf as forward_seconds"),
        ([step_done(times={"total_seconds": 1e300})], "1e.300 as total_seconds"),
        ([Answer(progress={"waiting_for": "x" * 1001})], "1001 characters as waiting_for"),
        ([Answer(progress={"moved_bytes": (1 << 64) - 1})], "as moved_bytes"),
        ([Answer(progress={"received_bytes": 1 << 60})], "as received_bytes"),
        ([finished()], r"the units \[\], but it has 1 to 1"),
        ([finished(UNIT, UNIT)], r"the units \[1, 1\]"),
        ([finished(UNIT, pushed_bytes=1 << 60)], "as pushed_bytes"),
        ([finished(UNIT, push_seconds=float("nan"))], "nan as push_seconds"),
        ([finished(UnitState(unit_index=1, weights_digest="x" * 1001))], "as weights_digest"),
        ([finished(UnitState(unit_index=1, largest_change=-1.0))], "-1.0 as largest_change"),
        ([step_done()] * 17, "more than 16 answers of the kind step_done"),
        ([Answer(evaluation_done={})] * 1000, "more than 16 answers of the kind evaluation_done"),
    ],
)
def test_stage_that_tells_what_cannot_be_is_blamed(
    host: StageHost, answers: list[Answer], words: str
) -> None:
    host.answers = answers
    failed: queue.SimpleQueue[CollapipeError] = queue.SimpleQueue()
    configure = stage_pb2.ConfigureStage(plan=Plan(stages=[host.stage]))
    remote = RemoteStage(host.stage, configure, host.channels, SECONDS, failed.put)
    failure = failed.get(timeout=SECONDS)
    remote.close()
    assert isinstance(failure, PeerLostError)
    assert failure.host_id == "stage"
    assert re.search(f"stage sent .*{words}", str(failure))


def test_values_that_are_not_finite_reach_the_control_unit_which_tells_a_divergence(
    host: StageHost,
) -> None:
    infinite = step_done(loss=float("nan"), squared_gradient_norms=[float("inf"), float("nan")])
    host.answers = [infinite, finished(UNIT)]
    configure = stage_pb2.ConfigureStage(plan=Plan(stages=[host.stage]))
    remote = RemoteStage(host.stage, configure, host.channels, SECONDS, lambda failure: None)
    assert remote.expect("step_done").step_done.squared_gradient_norms[0] == float("inf")
    assert remote.expect("finished").finished.units == [UNIT]
    remote.close()


def test_failure_of_a_stage_is_told_in_few_harmless_words(host: StageHost) -> None:
    host.failed = stage_pb2.StageFailed(message="\x1b[2J" + "x" * 1_000_000)
    failed: queue.SimpleQueue[CollapipeError] = queue.SimpleQueue()
    configure = stage_pb2.ConfigureStage(plan=Plan(stages=[host.stage]))
    remote = RemoteStage(host.stage, configure, host.channels, SECONDS, failed.put)
    failure = failed.get(timeout=SECONDS)
    remote.close()
    assert str(failure).startswith("stage: \\x1b[2Jx")
    assert len(str(failure)) < 2100


def test_stage_is_left_if_the_round_ends_before_the_abort_has_reached_it(host: StageHost) -> None:
    pipeline = ClusterPipeline.__new__(ClusterPipeline)
    # The round ends as soon as its local stage is aborted.
    local = SimpleNamespace(abort=lambda reason: pipeline.close(), close=lambda: None)
    configure = stage_pb2.ConfigureStage(plan=Plan(stages=[host.stage]))
    remote = RemoteStage(host.stage, configure, host.channels, SECONDS, lambda failure: None)
    vars(pipeline).update(
        _abort_lock=threading.Lock(), _aborted=None, _local=local, _remotes=[remote]
    )
    assert host.has_begun.wait(SECONDS)
    pipeline.abort(CancelledError("the job was cancelled"))
    assert host.is_left.wait(SECONDS)


def test_host_whose_own_session_broke_is_blamed_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    first, aborted = AttemptFailedError("a stream ended"), AttemptFailedError("the disk is full")
    noticed, own = PeerLostError("dead", "its neighbour waits"), PeerLostError("dead", "it broke")
    pipeline = ClusterPipeline.__new__(ClusterPipeline)
    works = SimpleNamespace(host_id="works", failure=None)
    neighbour = SimpleNamespace(host_id="neighbour", failure=noticed)
    dead = SimpleNamespace(host_id="dead", failure=own)
    for aborted_by, remotes, cause in (
        (aborted, [works, neighbour, dead], own),
        (aborted, [works, neighbour], noticed),
        (aborted, [works], aborted),
        (None, [works], first),
    ):
        vars(pipeline).update(_aborted=aborted_by, _remotes=remotes)
        assert pipeline.failure_cause(first) is cause


def test_value_that_is_not_finite_explains_the_failure_with_the_settings_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    pipeline = ClusterPipeline.__new__(ClusterPipeline)
    value = SimpleNamespace(host_id="b", failure=DivergedError("a value is nan in step 3", "a"))
    training = SimpleNamespace(learning_rate=0.5, clip_norm=1.0)
    vars(pipeline).update(
        _aborted=None,
        _remotes=[value],
        _job=SimpleNamespace(training=training),
        _request=RunRoundRequest(),
    )
    cause = pipeline.failure_cause(PeerLostError("c", "it ended"))
    assert isinstance(cause, DivergedError) and cause.host_id == "a"
    assert "a value is nan in step 3" in str(cause) and "learning_rate" in str(cause)


def pipeline_that_gets(kind: str, *frames: Frame) -> ClusterPipeline:
    """Returns a pipeline of one host, whose stage sends these frames when it is told to run."""
    pipeline = ClusterPipeline.__new__(ClusterPipeline)

    def run(command: object) -> None:
        for frame in frames:
            pipeline._receive_backward(frame)

    local = SimpleNamespace(mailbox=Mailbox(None), run_evaluation=run, run_generation=run)
    vars(pipeline).update(
        _local=local,
        _remotes=[],
        _progress=stage_progress.begin(SECONDS, 0.0, 0.0),
        _progress_lock=threading.Lock(),
        _stages=[Stage(in_flight=2)],
        _job=SimpleNamespace(task=SimpleNamespace(kind=kind)),
        _request=RunRoundRequest(),
    )
    return pipeline


def predictions(*values: Any, sequence: int = 0) -> Frame:
    return Frame(FrameKind.PREDICTION, 0, sequence, {"predictions": torch.tensor(values)})


def test_stages_work_only_while_the_control_unit_waits_for_them() -> None:
    pipeline = pipeline_that_gets("classification")
    worked = list[bool]()

    def run(command: object) -> stage_pb2.StepDone:
        worked.append(pipeline._progress.is_working)
        return stage_pb2.StepDone(loss=1.0, squared_gradient_norms=[1.0])

    local = pipeline._local
    vars(local).update(run_step=run, run_evaluation=run, run_generation=run)
    training = SimpleNamespace(clip_norm=0.0)
    vars(pipeline).update(_job=SimpleNamespace(training=training), _pending_scale=1.0)
    vars(pipeline).update(_reports=[StageReport()])
    rested = [pipeline._progress.is_working for _ in pipeline.train([(), ()])]
    pipeline.evaluate([])
    pipeline.generate([], GenerationOptions(), lambda number, token: True, feeds_back=True)
    assert worked == [True] * 4 and rested == [False] * 2
    assert not pipeline._progress.is_working and pipeline._progress.step_index == 1


def test_stages_rest_after_a_failure() -> None:
    pipeline = pipeline_that_gets("causal_lm", predictions([5], sequence=7))
    with pytest.raises(AttemptFailedError):
        pipeline.generate(
            [torch.tensor([[1, 2]])],
            GenerationOptions(),
            lambda number, token: True,
            feeds_back=True,
        )
    assert not pipeline._progress.is_working


@pytest.mark.parametrize("found", [predictions([5], sequence=7), predictions([5, 5])])
def test_tokens_of_no_answer_under_way_are_refused(found: Frame) -> None:
    with pytest.raises(AttemptFailedError, match=r"one of the sequences \[0\]"):
        pipeline_that_gets("causal_lm", found).generate(
            [torch.tensor([[1, 2]])],
            GenerationOptions(),
            lambda number, token: True,
            feeds_back=True,
        )


def test_attempt_that_was_aborted_before_it_is_configured_opens_no_session() -> None:
    pipeline = ClusterPipeline.__new__(ClusterPipeline)
    local = SimpleNamespace(abort=lambda reason: None, close=lambda: None)
    first, other = Stage(host_id="control-unit"), Stage(host_id="device")
    vars(pipeline).update(
        _aborted=None,
        _abort_lock=threading.Lock(),
        _local=local,
        _remotes=[],
        _stages=[first, other],
    )
    pipeline.abort(CancelledError("the caller went away"))
    with pytest.raises(CancelledError, match="went away"):
        pipeline.configure()
    assert pipeline._remotes == []
    pipeline.close()
