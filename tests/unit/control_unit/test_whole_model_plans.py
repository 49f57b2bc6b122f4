"""Plans in which one host runs every unit: a device that receives token ids, or the control unit itself."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from reference.comparison import first_difference
from reference.federated_job import train_job
from reference.tiny_jobs import make_job

from collapipe.control_unit import moment_copy
from collapipe.errors import PeerLostError
from collapipe.job import JobConfig
from collapipe.v1 import edge_server_pb2, edge_server_pb2_grpc
from collapipe.v1.plan_pb2 import Attempt
from collapipe.weights.transfer import store_blob

from .clusters import Cluster, MakeCluster, Ranges

ALL = 5
"""Units of the tiny models: embedding, 3 blocks, head."""
ON_THE_DEVICE: Ranges = [("control-unit-0", 0, 0), ("device-0-0", 0, ALL)]
ON_THE_CONTROL_UNIT: Ranges = [("control-unit-0", 0, ALL)]
SPREAD: Ranges = [
    ("control-unit-0", 0, 1),
    ("device-0-0", 1, ALL - 1),
    ("edge-server", ALL - 1, ALL),
]
PLANS = {"on the device": ON_THE_DEVICE, "on the control unit": ON_THE_CONTROL_UNIT}
KINDS: dict[str, dict[str, Any]] = {
    "classification": {},
    "ner": {"family": "distilbert", "kind": "ner"},
    "translation": {
        "family": "marian",
        "kind": "translation",
        "training": {"label_smoothing": 0.1},
    },
    "recompute": {"training": {"recompute": True}},
    "update per micro-batch": {"training": {"update_per": "micro_batch"}},
}


def check_equals_reference(cluster: Cluster, job: JobConfig, ranges: Ranges) -> None:
    cluster.run_round(ranges, train=False)  # waits for the copy of the optimizer states
    expected = train_job(job)
    assert cluster.losses == expected.losses[0]
    assert first_difference(expected.weights, cluster.weights()) is None
    assert first_difference(expected.optimizer_states[0], cluster.optimizer_state()) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_one_host_that_runs_everything_equals_the_reference(
    make_cluster: MakeCluster, tmp_path: Path, plan: str, kind: str
) -> None:
    job = make_job(tmp_path, **KINDS[kind])
    cluster = make_cluster(job)
    assert cluster.num_units == ALL
    for _ in range(job.training.rounds):
        cluster.run_round(PLANS[plan])
    check_equals_reference(cluster, job, PLANS[plan])


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_gives_the_metric_of_any_other_placement(
    make_cluster: MakeCluster, tmp_path: Path, plan: str
) -> None:
    cluster = make_cluster(make_job(tmp_path, kind="translation", family="marian"))
    cluster.run_round(PLANS[plan], evaluate=True)
    cluster.run_round(PLANS[plan], evaluate=True, train=False)
    cluster.start("control-unit-0")
    cluster.prepare()  # The restore point is the initial model.
    cluster.run_round(SPREAD, evaluate=True, train=False)
    initial, trained, elsewhere = cluster.evaluations
    assert initial["rows"] == 4
    assert elsewhere == initial != trained


@pytest.mark.parametrize("plan", PLANS)
def test_job_resumes_from_the_disks_of_control_unit_and_edge_server(
    make_cluster: MakeCluster, tmp_path: Path, plan: str
) -> None:
    job = make_job(tmp_path, training={"rounds": 4, "replicate_every": 2})
    cluster = make_cluster(job)
    for _ in range(3):
        cluster.run_round(PLANS[plan])
    cluster.run_round(PLANS[plan])  # waits for the copy of the second commit, unless it has ended
    assert cluster.commit.restore_point.num_rounds == 2
    for name in ("edge-server", "control-unit-0", "device-0-0"):
        cluster.start(name)
    cluster.prepare()
    assert cluster.commit.num_rounds == 2
    for _ in range(2):
        cluster.run_round(PLANS[plan])
    check_equals_reference(cluster, job, PLANS[plan])


def test_lost_device_costs_the_rounds_since_the_restore_point(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    job = make_job(tmp_path, training={"rounds": 3, "replicate_every": 10})
    cluster = make_cluster(job)
    for _ in range(2):
        cluster.run_round(SPREAD)
    before = cluster.weights()
    cluster.start("device-0-0")
    cluster.prepare()
    assert cluster.commit.num_rounds == 0
    with open(job.data.train[0], "a", encoding="utf-8") as file:
        file.write('{"text": "a new row", "label": "thing"}\n')  # repeated rounds do not use it
    for _ in range(2):
        cluster.run_round(SPREAD)
    assert first_difference(before, cluster.weights()) is None


def test_copy_that_failed_goes_on_in_the_next_round(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [PeerLostError("device-0-0", "the network is down")]

    def store(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        store_blob(*arguments)

    monkeypatch.setattr(moment_copy, "store_blob", store)
    cluster = make_cluster(make_job(tmp_path, training={"rounds": 6, "replicate_every": 3}))
    for _ in range(6):
        cluster.run_round(SPREAD)
    assert not failures
    assert cluster.commit.restore_point.num_rounds == 3


def test_pushes_of_another_job_are_refused_and_those_of_a_committed_round_are_deleted(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(make_job(tmp_path))
    stub = edge_server_pb2_grpc.EdgeServerServiceStub(
        cluster.channels.channel(cluster.addresses["edge-server"])
    )
    unit = edge_server_pb2.PushedUnit(attempt=Attempt(job_id="another"), total_bytes=1)
    call = stub.PushUnit(iter([edge_server_pb2.PushUnitRequest(unit=unit)]), timeout=20)
    with pytest.raises(grpc.RpcError, match="unit of job 'another' cannot be pushed"):
        next(call)
    cluster.run_round(SPREAD)
    assert not list(cluster.folder.rglob("cluster-0-unit-*"))


def test_whole_model_moves_from_the_pipeline_to_one_host_and_back(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    job = make_job(tmp_path, training={"rounds": 5})
    cluster = make_cluster(job)
    for ranges in (SPREAD, ON_THE_DEVICE, ON_THE_CONTROL_UNIT, SPREAD, ON_THE_DEVICE):
        cluster.run_round(ranges)
    check_equals_reference(cluster, job, ON_THE_DEVICE)


def test_last_stage_drops_units_that_are_not_in_its_plan(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(make_job(tmp_path, training={"rounds": 3}))
    cluster.run_round(SPREAD)
    cluster.run_round([("control-unit-0", 0, 3), ("device-0-0", 3, ALL)])
    assert cluster.held_units("control-unit-0") == [0, 1, 2]
    assert cluster.held_units("device-0-0") == [3, 4]
    cluster.run_round(ON_THE_DEVICE)
    assert cluster.held_units("control-unit-0") == []
    assert cluster.held_units("device-0-0") == list(range(ALL))
