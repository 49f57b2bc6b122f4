"""What a control unit starts, draws, refuses and reports in a round."""

import gc
import json
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from reference.comparison import first_difference
from reference.federated_job import train_job
from reference.tiny_jobs import make_job

from collapipe.control_unit import servicer
from collapipe.control_unit.cluster_pipeline import ClusterPipeline
from collapipe.control_unit.cluster_round import _one_ahead
from collapipe.errors import NotFoundError
from collapipe.stage_host import StageSession
from collapipe.stage_runtime.forward_stage import ForwardStage, Step
from collapipe.tasks import Task, load_task
from collapipe.tensors import Frame, FrameAssembler, FrameKind
from collapipe.tensors.frames import _check
from collapipe.v1 import stage_pb2
from collapipe.v1.control_unit_pb2 import PrepareDataRequest, RunRoundRequest
from collapipe.v1.job_pb2 import JobSpec
from collapipe.v1.plan_pb2 import Stage
from collapipe.weights.tensor_blob import TensorBlob

from . import clusters
from .clusters import JOB_ID, ON_THE_DEVICE, SECONDS, SPREAD, MakeCluster

ONE_STEP = {"local_steps": 1}

# --- data and steps


class SlowLoad:
    """Loads data, but not before a test lets it go on."""

    def __init__(self) -> None:
        self.begun, self.goes_on, self.ended = (threading.Event() for _ in range(3))

    def __call__(self, *arguments: Any) -> Task:
        self.begun.set()
        assert self.goes_on.wait(SECONDS)
        try:
            return load_task(*arguments)
        finally:
            self.ended.set()


def test_late_data_do_not_replace_those_of_the_next_job(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data of a large job are still being loaded when the next job has its own."""
    job = make_job(tmp_path, training={"rounds": 1})
    cluster = make_cluster(job)
    for code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.FAILED_PRECONDITION):
        slow = SlowLoad()
        monkeypatch.setattr(servicer, "load_task", slow)
        large = PrepareDataRequest(job=JobSpec(job_id="large", config_json=job.to_json()))
        call = cluster.control_unit().PrepareData(large, timeout=SECONDS)
        assert slow.begun.wait(SECONDS)
        if code is grpc.StatusCode.CANCELLED:
            call.cancel()
        monkeypatch.setattr(servicer, "load_task", load_task)
        cluster.prepare()
        slow.goes_on.set()
        assert slow.ended.wait(SECONDS)
        with pytest.raises(grpc.RpcError):
            list(call)  # The status comes after the signs of life.
        assert call.code() is code
    cluster.run_round(SPREAD)
    assert cluster.losses == train_job(job).losses[0]


@pytest.mark.parametrize("is_private", [False, True])
def test_counts_of_rows_of_a_private_job_are_not_told(
    make_cluster: MakeCluster, tmp_path: Path, is_private: bool
) -> None:
    privacy = {"privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0}} if is_private else {}
    job = make_job(tmp_path, **privacy)
    request = PrepareDataRequest(job=JobSpec(job_id="job", config_json=job.to_json()))
    *_, answer = make_cluster(job).control_unit().PrepareData(request, timeout=SECONDS)
    assert (answer.num_rows, answer.num_first_rows) == (21, 0)
    told = answer.findings, answer.held_out_labels
    assert [bool(each) for each in told] == [not is_private] * 2


@pytest.mark.parametrize("mistake", ["a strict job", "labels", "a row", "an appended row"])
def test_errors_about_rows_of_a_private_job_are_only_in_the_log(
    make_cluster: MakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, mistake: str
) -> None:
    job = make_job(tmp_path, privacy={"noise_multiplier": 1.0, "clip_norm": 1.0})
    cluster = make_cluster(job)
    rows = [{"text": f"text {n}", "label": f"secret {n // 2}"} for n in range(40)]
    if mistake == "a strict job":
        rows.append(rows[0] | {"label": "secret 9"})
        strict = job.data.model_copy(update={"strict": True})
        cluster.job = job.model_copy(update={"data": strict})
    elif mistake == "labels":
        rows = [row | {"label": f"secret {n}"} for n, row in enumerate(rows)]
    elif mistake == "a row":
        rows.append({"text": "secret"})
    file = tmp_path / "train-0.jsonl"
    if mistake == "an appended row":
        with file.open("a", encoding="utf-8") as appended:
            appended.write('{"secret": 1}\n')
    else:
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    with pytest.raises(grpc.RpcError) as raised:
        if mistake == "an appended row":
            cluster.run_round(SPREAD)
        else:
            cluster.prepare()
    told = str(raised.value)
    assert grpc.StatusCode.INVALID_ARGUMENT.name in told
    assert "log" in told
    assert not any(each in told for each in ("secret", file.name))
    assert file.name in caplog.text


@pytest.mark.parametrize(
    ("clip_norm", "order"),
    [
        (0.1, ["run 0", "collect 0", "run 1", "collect 1", "run 2", "collect 2"]),
        (0.0, ["run 0", "run 1", "collect 0", "run 2", "collect 1", "collect 2"]),
    ],
)
def test_next_step_waits_for_the_norms_of_this_one_only_with_clipping(
    make_cluster: MakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clip_norm: float,
    order: list[str],
) -> None:
    """Without clipping, the head keeps the result of the first step to itself until the next step has begun."""
    found: list[str] = []
    next_began = threading.Event()
    run_step, command, collect = (
        StageSession.run_step,
        ClusterPipeline._command,
        ClusterPipeline._collect,
    )

    def run_and_wait(session: StageSession, step: stage_pb2.RunStep) -> stage_pb2.StepDone:
        done = run_step(session, step)
        if session.stage_index == 2 and step.step_index == 0 and not clip_norm:
            assert next_began.wait(SECONDS)
        return done

    def note_command(
        pipeline: ClusterPipeline, request: stage_pb2.RunStageRequest, task: str
    ) -> None:
        found.append(f"run {request.run_step.step_index}")
        command(pipeline, request, task)
        if request.run_step.step_index:
            next_began.set()

    def note_collection(
        pipeline: ClusterPipeline, step_index: int, own: stage_pb2.StepDone
    ) -> tuple[float, float]:
        found.append(f"collect {step_index}")
        return collect(pipeline, step_index, own)

    monkeypatch.setattr(StageSession, "run_step", run_and_wait)
    monkeypatch.setattr(ClusterPipeline, "_command", note_command)
    monkeypatch.setattr(ClusterPipeline, "_collect", note_collection)
    job = make_job(tmp_path, training={"clip_norm": clip_norm, "rounds": 1, "local_steps": 3})
    cluster = make_cluster(job)
    cluster.run_round(SPREAD)
    assert found == order
    expected = train_job(job)
    assert cluster.losses == expected.losses[0]
    assert first_difference(expected.weights, cluster.weights()) is None


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
    with pytest.raises(ValueError, match="fourth"):
        next(items)
    assert list(_one_ahead(iter([1, 2]))) == [1, 2]


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
    with pytest.raises(grpc.RpcError, match=r"1e\+38 and clip_norm = 0"):
        cluster.run_round(SPREAD)
    cluster.start("edge-server")
    cluster.prepare()
    stored = cluster.last_commit
    assert (stored.num_rounds, list(stored.global_units)) == (num_rounds, weights)


# --- frames


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
    cluster = make_cluster(make_job(tmp_path, family, kind, training=ONE_STEP))
    cluster.run_round(SPREAD, evaluate=True)
    onward = (FrameKind.FORWARD, FrameKind.EVALUATE)
    assert {p: seen for p, seen in has_labels.items() if p[1] in onward} == {
        (stage, frame_kind): {stage == 2} for stage in range(3) for frame_kind in onward
    }


@pytest.mark.parametrize(
    ("kind", "family", "size"),
    [
        ("classification", "bert", "hidden_size"),
        ("ner", "distilbert", "dim"),
        ("translation", "marian", "d_model"),
        ("causal_lm", "gpt2", "n_embd"),
        ("instruction", "llama", "hidden_size"),
    ],
)
def test_frames_of_every_task_stay_below_limits_that_are_hardly_larger(
    make_cluster: MakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    family: str,
    size: str,
) -> None:
    shares: dict[FrameKind, float] = {}
    genuine = FrameAssembler.begin

    def begin(self: FrameAssembler, header: stage_pb2.FrameHeader) -> Frame | None:
        frame = genuine(self, header)  # It refuses a frame over the limit.
        frame_kind = FrameKind(header.kind)
        share = sum(map(_check, header.tensors)) / self._limits[frame_kind]
        shares[frame_kind] = max(share, shares.get(frame_kind, 0.0))
        return frame

    monkeypatch.setattr(FrameAssembler, "begin", begin)
    job = make_job(tmp_path, family, kind, model_config={size: 32}, training=ONE_STEP)
    if kind != "instruction":  # Its rows are never cut.
        job = job.model_copy(update={"task": job.task.model_copy(update={"max_length": 8})})
    cluster = make_cluster(job)
    for ranges in (ON_THE_DEVICE, SPREAD):
        shares.clear()
        cluster.run_round(ranges, evaluate=True)
        assert shares.keys() == {
            FrameKind.FORWARD,
            FrameKind.BACKWARD,
            FrameKind.EVALUATE,
            FrameKind.PREDICTION,
            FrameKind.LABELS,
        }
        assert max(shares.values()) <= 1
    if kind != "instruction":
        assert min(shares[FrameKind.FORWARD], shares[FrameKind.BACKWARD]) > 0.9


# --- wrong plans

TOO_MANY = 2**32 - 1


def spoil(plan: str, request: RunRoundRequest) -> None:
    if plan == "of cluster 7":
        request.plan.cluster_index = 7
    elif plan == "without stages":
        del request.plan.stages[:]
    elif plan == "without micro-batches":
        request.plan.num_micro_batches = 0
    elif plan == "with too many units":
        request.plan.stages[0].stop_unit = TOO_MANY
    else:  # Listing the units of the plan before would take all memory.
        request.previous_stages.append(Stage(host_id="device-0-0", stop_unit=TOO_MANY))


def test_plan_that_does_not_fit_is_refused(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(make_job(tmp_path, training=ONE_STEP))
    for plan in (
        *("of cluster 7", "without stages", "without micro-batches", "with too many units"),
        "after one with too many units",
    ):
        with pytest.raises(grpc.RpcError) as refused:
            cluster.run_round(SPREAD, change=partial(spoil, plan))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, plan
        cluster.prepare()  # A new attempt begins.
    cluster.run_round(SPREAD)
    assert cluster.commit.num_rounds == 1


# --- weights


def test_weights_move_once_and_are_read_from_files_where_another_job_may_change_the_memory(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(make_job(tmp_path, training=ONE_STEP))
    for _ in range(2):
        cluster.run_round(SPREAD)
    cluster.run_round(SPREAD, evaluate=True, train=False)
    blobs = cluster.folder / "edge-server" / "jobs" / JOB_ID / "blobs"
    sizes = [(blobs / u.weights_digest).stat().st_size for u in cluster.commit.global_units]
    moved = {"control-unit-0": sizes[0], "device-0-0": sum(sizes[1:4])}
    # The initial weights have the same sizes. Hosts that have their weights fetch nothing.
    assert cluster.fetched == [moved, {}, {}]
    assert cluster.pushed == [moved, moved, {}]
    assert not list(cluster.folder.rglob("cluster-0-unit-*")), "a committed round is still there"
    edge_server, head = cluster.resources["edge-server"], cluster.commit.global_units[-1]
    state = cluster.commit.clusters[0].units[-1].optimizer_digest
    assert isinstance(edge_server.held_blob(head.weights_digest), TensorBlob)
    assert not isinstance(edge_server.find_blob(head.weights_digest), TensorBlob)
    edge_server.held_blob(state, job_id=JOB_ID)
    with pytest.raises(NotFoundError):
        edge_server.held_blob(state, job_id="another job")


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    """Leaves only reference counts: cycles of a few objects may hold much memory for a long time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
def test_units_of_an_ended_job_are_freed_when_the_next_job_begins(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(make_job(tmp_path, training=ONE_STEP))
    for _ in range(2):
        cluster.run_round(SPREAD, evaluate=True)
    held = [
        weakref.ref(tensor)
        for resources in cluster.resources.values()
        for units in resources._units_of_clusters.values()
        for unit in units._units.values()
        for tensor in (unit, *unit.parameters, *unit.optimizer.state[unit.parameters[0]].values())
    ]
    assert len(held) > 20
    monkeypatch.setattr(clusters, "JOB_ID", "another-job")
    cluster.prepare()
    cluster.run_round(SPREAD)
    assert not [reference() for reference in held if reference() is not None]
