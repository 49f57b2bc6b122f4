"""Where the units of a cluster run: the placement changes no bit, and hosts that restart find their units again."""

import itertools
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.comparison import first_difference
from reference.federated_job import train_job
from reference.tiny_jobs import CLASSES, WORDS, make_job

from collapipe.control_unit import moment_copy
from collapipe.errors import PeerLostError
from collapipe.job import JobConfig
from collapipe.v1 import plan_pb2
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.transfer import store_blob

from .clusters import (
    ALL,
    JOB_ID,
    ON_FOUR_HOSTS,
    ON_THE_CONTROL_UNIT,
    ON_THE_DEVICE,
    ON_TWO_HOSTS,
    SPREAD,
    Cluster,
    MakeCluster,
)

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ner": ("distilbert", "ner", {}),
    "translation": ("marian", "translation", {"label_smoothing": 0.1}),
    "recompute": ("bert", "classification", {"recompute": True}),
    "update per micro-batch": ("bert", "classification", {"update_per": "micro_batch"}),
}


def check_equals_reference(cluster: Cluster, job: JobConfig) -> None:
    cluster.run_round(SPREAD, train=False)  # waits for the copy of the optimizer states
    expected = train_job(job)
    assert cluster.losses == expected.losses[0]
    assert first_difference(expected.weights, cluster.weights()) is None
    assert first_difference(expected.optimizer_states[0], cluster.optimizer_state()) is None


@pytest.mark.parametrize("kind", KINDS)
def test_one_host_that_runs_everything_equals_the_reference(
    make_cluster: MakeCluster, tmp_path: Path, kind: str
) -> None:
    family, task, training = KINDS[kind]
    job = make_job(tmp_path, family, task, training={"local_steps": 1, **training})
    cluster = make_cluster(job)
    assert cluster.num_units == ALL
    for ranges in (ON_THE_DEVICE, ON_THE_CONTROL_UNIT):
        cluster.run_round(ranges)
    check_equals_reference(cluster, job)


def test_model_moves_between_placements_and_leaves_no_unit_behind(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    moves = [SPREAD, ON_TWO_HOSTS, *(2 * [ON_THE_DEVICE]), *(2 * [ON_THE_CONTROL_UNIT])]
    job = make_job(tmp_path, training={"rounds": len(moves), "local_steps": 1})
    cluster = make_cluster(job)
    for ranges in moves:
        cluster.run_round(ranges)
        for host, start, stop in ranges:
            assert cluster.held_units(host) == list(range(start, stop))
    check_equals_reference(cluster, job)


def test_first_layer_of_a_stage_computes_like_a_later_one(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    # A product of so few rows has other bits with more threads. Torch tells a new thread their number late.
    job = make_job(tmp_path, model_config={"hidden_size": 64, "intermediate_size": 256})
    rows = [
        f'{{"text": "{word}", "label": "{label}"}}\n'
        for word, label in zip(WORDS, itertools.cycle(CLASSES))
    ]
    Path(job.data.train[0]).write_text("".join(rows), encoding="utf-8")
    cluster = make_cluster(job)
    for ranges in (SPREAD, ON_THE_CONTROL_UNIT):
        cluster.run_round(ranges)
    check_equals_reference(cluster, job)


def test_evaluation_gives_the_metric_of_any_other_placement(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(make_job(tmp_path, "marian", "translation"))
    cluster.run_round(ON_THE_DEVICE, evaluate=True)
    cluster.run_round(ON_THE_CONTROL_UNIT, evaluate=True, train=False)
    cluster.start("control-unit-0")
    for ranges in (SPREAD, ON_THE_CONTROL_UNIT):
        cluster.prepare()  # The restore point is the initial model.
        cluster.run_round(ranges, evaluate=True, train=False)
    initial, trained, *others = cluster.evaluations
    assert initial["rows"] == 4
    assert trained != initial
    assert others == [initial, initial]


# --- restore points


def test_job_resumes_from_the_disks_of_control_unit_and_edge_server(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    job = make_job(tmp_path, training={"rounds": 4, "replicate_every": 2, "local_steps": 1})
    cluster = make_cluster(job)
    for _ in range(4):  # The last round waits for the copy of the second commit.
        cluster.run_round(ON_TWO_HOSTS)
    assert cluster.commit.restore_point.num_rounds == 2
    for name in ("edge-server", "control-unit-0", "device-0-0"):
        cluster.start(name)
    cluster.prepare()
    assert cluster.commit.num_rounds == 2
    for _ in range(2):
        cluster.run_round(ON_TWO_HOSTS)
    check_equals_reference(cluster, job)


def test_copy_that_failed_goes_on_in_the_next_round(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [PeerLostError("device-0-0", "the network is down")]

    def store(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        store_blob(*arguments)

    monkeypatch.setattr(moment_copy, "store_blob", store)
    training = {"rounds": 6, "replicate_every": 3, "local_steps": 1}
    cluster = make_cluster(make_job(tmp_path, training=training))
    for _ in range(6):
        cluster.run_round(ON_THE_DEVICE)
    assert not failures
    assert cluster.commit.restore_point.num_rounds == 3


# --- private updates


def private_job(folder: Path, noise_multiplier: float = 0.5, **training: Any) -> JobConfig:
    privacy = {"noise_multiplier": noise_multiplier, "clip_norm": 0.25}
    return make_job(folder, privacy=privacy, training=training)


def secret_file(cluster: Cluster) -> Path:
    return cluster.folder / "control-unit-0" / "jobs" / JOB_ID / "noise-secret"


def test_placement_changes_no_bit_of_a_private_job(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    job = private_job(tmp_path)
    spread, moving = (make_cluster(job, name) for name in ("spread", "moving"))
    for cluster, placements in (
        (spread, (SPREAD, SPREAD)),
        (moving, (ON_THE_CONTROL_UNIT, ON_FOUR_HOSTS)),
    ):
        cluster.start("device-0-1")
        secret_file(cluster).write_bytes(bytes(range(32)))
        for ranges in placements:
            cluster.run_round(ranges)
    assert moving.losses == spread.losses
    assert first_difference(spread.weights(), moving.weights()) is None


def test_repeated_rounds_of_a_private_job_push_the_same_bytes(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    job = private_job(tmp_path, replicate_every=10, local_steps=1)
    cluster = make_cluster(job)
    for _ in range(2):
        cluster.run_round(SPREAD)
    secret = secret_file(cluster)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(secret.read_bytes()) == 32
    first = cluster.commit
    for name in ("control-unit-0", "device-0-0", "device-0-1", "edge-server"):
        cluster.start(name)
    cluster.prepare()
    assert cluster.commit.num_rounds == 0, "the rounds are repeated"
    with open(job.data.train[0], "a", encoding="utf-8") as file:
        file.write('{"text": "a new row", "label": "thing"}\n')  # repeated rounds do not use it
    for _ in range(2):
        cluster.run_round(ON_FOUR_HOSTS)
    assert list(cluster.commit.global_units) == list(first.global_units)


def test_whole_change_of_a_round_has_the_bound(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(private_job(tmp_path, noise_multiplier=4e-9))
    before = cluster.weights()
    cluster.run_round(SPREAD)
    after = cluster.weights()
    changes = [(after[name] - before[name]).double().reshape(-1) for name in after]
    # Each unit would change by more than its share of the bound.
    assert float(torch.cat(changes).norm()) == pytest.approx(0.25, rel=1e-4)


def test_copy_that_was_cancelled_inside_a_blob_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_copying, may_end = threading.Event(), threading.Event()

    def store(*arguments: Any) -> None:
        is_copying.set()
        assert may_end.wait(60)

    monkeypatch.setattr(moment_copy, "store_blob", store)
    resources = SimpleNamespace(host_id="control-unit", channels=None)
    candidate = plan_pb2.ClusterState(units=[plan_pb2.UnitState(optimizer_digest="1" * 64)] * 2)
    stages = [plan_pb2.Stage(host_id="device", address="127.0.0.1:1", stop_unit=2)]
    copy = moment_copy.MomentCopy(
        candidate,
        stages,
        "127.0.0.1:2",
        resources,
        BlobStore(tmp_path),
        1.0,  # type: ignore[arg-type]
    )
    copy.start()
    assert is_copying.wait(60)
    copy.cancel()
    assert copy.has_failed
    may_end.set()
    assert copy.wait(60)
    assert copy.has_failed and not copy.is_complete
