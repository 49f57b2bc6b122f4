"""Tests that clusters can be averaged without the edge server seeing what one cluster has trained."""

import time
from pathlib import Path
from typing import Any

import pytest
from reference.comparison import first_difference
from reference.federated_job import train_job
from reference.tiny_jobs import make_job

from collapipe.errors import NotFoundError
from collapipe.job import JobConfig
from collapipe.rpc import ChannelPool
from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe.weights.transfer import fetch_blob
from collapipe_client import LocalTestbed
from integration.exactness import check_equals_reference
from integration.running import FinishedJob, run_job
from integration.secured import SecuredDeployment
from integration.test_late_clusters import run_with_a_slow_cluster


def secure_job(folder: Path, name: str, **schedule: Any) -> JobConfig:
    return make_job(
        folder,
        name=name,
        num_rows=(21, 33, 14),
        devices_per_cluster=2,
        averaging={"secure": True},
        schedule={"strategy": "manual", **schedule},
    )


@pytest.mark.parametrize("segments", [[[1, 2], [2, 1]], [[2, 1]]])
def test_masked_average_equals_the_fixed_point_average_for_any_placement(
    emulated_testbed: LocalTestbed, tmp_path: Path, segments: list[list[int]]
) -> None:
    job = secure_job(tmp_path, "secure", segments=segments)
    check_equals_reference(job, run_job(emulated_testbed, job))


def test_late_cluster_is_left_out_with_shares_of_its_key_and_takes_part_again(
    emulated_testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(
        tmp_path,
        name="late",
        num_rows=(21, 33, 14),
        devices_per_cluster=2,
        averaging={"secure": True},
        training={"rounds": 6, "local_steps": 4, "replicate_every": 2, "decay": "constant"},
        schedule={
            "strategy": "manual",
            "segments": [[1, 2], [2, 1]],
            "round_deadline_seconds": 4,
            "min_clusters": 2,
        },
    )
    finished = run_with_a_slow_cluster(emulated_testbed, job, times=1)
    assert [1] in finished.late_clusters.values(), finished.late_clusters
    assert finished.late_clusters[5] == [], finished.late_clusters
    check_equals_reference(job, finished)


def test_job_over_mutual_tls_hides_optimizer_states_from_the_edge_server(tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "data",
        num_rows=(21, 33, 14),
        devices_per_cluster=1,
        averaging={"secure": True},
        # Devices keep the optimizer states, because no control unit has copied them.
        training={"replicate_every": 10},
    )
    with SecuredDeployment(tmp_path, num_clusters=3) as deployment, deployment.client() as client:
        deadline = time.monotonic() + 60
        while sum(host.alive for host in client.hosts()) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        finished = FinishedJob(job, client.submit(job), tmp_path / "state")
        last: Any = None
        for event in client.watch(finished.job_id):
            last = event.status if event.HasField("status") else last
        assert last.state == JOB_STATE_SUCCEEDED, last.message
        difference = first_difference(train_job(job).weights, finished.weights())
        assert difference is None, difference
        (plan, *_) = client.plans(finished.job_id, 1)
        device = next(stage for stage in plan.stages if stage.host_id.startswith("device"))
        digest = finished.commit.clusters[0].units[device.start_unit].optimizer_digest
        asking = {
            name: ChannelPool(deployment.security(name))
            for name in ("edge-server", "control-unit-0")
        }
        try:
            assert fetch_blob(asking["control-unit-0"], digest, [device.address])
            with pytest.raises(NotFoundError, match="is not held"):
                fetch_blob(asking["edge-server"], digest, [device.address])
        finally:
            for pool in asking.values():
                pool.close()
