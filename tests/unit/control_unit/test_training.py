"""The order in which the control unit starts steps, collects their results and draws mini-batches."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from reference.comparison import first_difference
from reference.federated_job import train_job
from reference.tiny_jobs import make_job

from collapipe.control_unit import servicer
from collapipe.control_unit.cluster_round import _one_ahead
from collapipe.errors import NotFoundError
from collapipe.stage_host import StageSession
from collapipe.stage_runtime.forward_stage import ForwardStage, Step
from collapipe.tasks import Task, load_task
from collapipe.tensors import Frame, FrameKind
from collapipe.v1 import stage_pb2
from collapipe.v1.control_unit_pb2 import PrepareDataRequest
from collapipe.v1.job_pb2 import JobSpec
from collapipe.weights.tensor_blob import TensorBlob

from .clusters import JOB_ID, Cluster, MakeCluster
from .test_whole_model_plans import SPREAD


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.FAILED_PRECONDITION])
def test_late_data_do_not_replace_those_of_the_next_job(
    make_cluster: MakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: grpc.StatusCode,
) -> None:
    """The data of a large job are still being loaded when the next job has its own."""
    job = make_job(tmp_path, training={"rounds": 1})
    cluster = make_cluster(job)
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def load_slowly(*arguments: Any) -> Task:
        begun.set()
        assert goes_on.wait(60)
        try:
            return load_task(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(servicer, "load_task", load_slowly)
    large = PrepareDataRequest(job=JobSpec(job_id="large", config_json=job.to_json()))
    call = cluster.control_unit().PrepareData(large, timeout=60)
    assert begun.wait(60)
    if code is grpc.StatusCode.CANCELLED:
        call.cancel()
    monkeypatch.setattr(servicer, "load_task", load_task)
    cluster.prepare()
    goes_on.set()
    assert ended.wait(60)
    assert call.code() is code
    cluster.run_round(SPREAD)
    assert cluster.losses == train_job(job).losses[0]


def test_file_is_preferred_to_memory_that_another_job_may_change(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(make_job(tmp_path, training={"rounds": 1}))
    cluster.run_round(SPREAD)
    edge_server = cluster.resources["edge-server"]
    head = cluster.commit.global_units[-1].weights_digest
    state = cluster.commit.clusters[0].units[-1].optimizer_digest
    assert isinstance(edge_server.held_blob(head), TensorBlob)
    assert not isinstance(edge_server.find_blob(head), TensorBlob)
    edge_server.held_blob(state, job_id=JOB_ID)
    with pytest.raises(NotFoundError):
        edge_server.held_blob(state, job_id="another job")


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_next_step_waits_for_the_norms_of_this_one_only_with_clipping(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip_norm: float
) -> None:
    """The head keeps the result of the first step to itself until micro-batches of the next step arrive."""
    arrived: list[bool] = []
    run_step = StageSession.run_step

    def run_and_wait(session: StageSession, command: stage_pb2.RunStep) -> stage_pb2.StepDone:
        done = run_step(session, command)
        if session.stage_index == 2 and command.step_index == 0:
            queue: Any = session.mailbox._towards_head
            deadline = time.monotonic() + (1 if clip_norm else 60)
            while not queue and time.monotonic() < deadline:
                time.sleep(0.01)
            arrived.append(bool(queue))
        return done

    monkeypatch.setattr(StageSession, "run_step", run_and_wait)
    job = make_job(tmp_path, training={"clip_norm": clip_norm, "rounds": 1, "local_steps": 3})
    cluster = make_cluster(job)
    cluster.run_round(SPREAD)
    assert arrived == [not clip_norm]
    expected = train_job(job)
    assert cluster.losses == expected.losses[0]
    assert first_difference(expected.weights, cluster.weights()) is None


@pytest.mark.parametrize(
    ("family", "kind"), [("bert", "classification"), ("marian", "translation")]
)
def test_only_the_stage_with_the_head_gets_labels(
    make_cluster: MakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    kind: str,
) -> None:
    has_labels: dict[tuple[int, FrameKind], set[bool]] = defaultdict(set)
    take = ForwardStage._take

    def take_and_look(stage: ForwardStage, step: Step) -> Frame:
        frame = take(stage, step)
        place = stage._context.stage_index, frame.kind
        has_labels[place].add("labels" in frame.tensors)
        return frame

    monkeypatch.setattr(ForwardStage, "_take", take_and_look)
    cluster = make_cluster(
        make_job(tmp_path, family, kind, training={"rounds": 1, "local_steps": 2})
    )
    cluster.run_round(SPREAD, evaluate=True)
    onward = (FrameKind.FORWARD, FrameKind.EVALUATE)
    assert {p: seen for p, seen in has_labels.items() if p[1] in onward} == {
        (stage, frame_kind): {stage == 2} for stage in range(3) for frame_kind in onward
    }


@pytest.mark.parametrize("local_steps", [1, 3])
def test_loss_that_is_not_finite_ends_the_round_without_clipping(
    make_cluster: MakeCluster, tmp_path: Path, local_steps: int
) -> None:
    training = {"clip_norm": 0.0, "optimizer": "sgd", "learning_rate": 1e38, "warm_up_steps": 0}
    job = make_job(tmp_path, training={**training, "rounds": 2, "local_steps": local_steps})
    cluster = make_cluster(job)
    if (
        local_steps == 1
    ):  # The loss of the first step is finite, and only the next one shows the update.
        cluster.run_round(SPREAD)
    num_rounds, weights = cluster.commit.num_rounds, list(cluster.commit.global_units)
    with pytest.raises(grpc.RpcError, match="the model of the last commit is intact"):
        cluster.run_round(SPREAD)
    stored = _stored(cluster)
    assert (stored.num_rounds, list(stored.global_units)) == (num_rounds, weights)


def test_items_are_made_one_ahead_and_errors_arrive_in_their_place() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(1, 4):
            made.append(number)
            yield number
        raise ValueError("the fourth is bad")

    items = _one_ahead(numbers())
    for number in range(1, 4):
        assert next(items) == number
        assert len(made) <= number + 1
    with pytest.raises(ValueError, match="the fourth is bad"):
        next(items)
    assert list(_one_ahead(iter([1, 2]))) == [1, 2]


def _stored(cluster: Cluster) -> Any:
    cluster.start("edge-server")
    cluster.prepare()
    return cluster.last_commit
