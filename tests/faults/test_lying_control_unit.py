"""Tests that a control unit that lies about its rounds harms its own contribution only, and is named."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.running import run_job
from reference.tiny_jobs import make_job

from collapipe.job import AveragingConfig, JobConfig
from collapipe.v1.scheduler_pb2 import (
    INCIDENT_CODE_ATTEMPT_FAILED,
    INCIDENT_CODE_HOST_LEFT_OUT,
    JOB_STATE_FAILED,
    JOB_STATE_SUCCEEDED,
)
from collapipe_client import LocalTestbed
from faults.interrupted import run_interrupted
from faults.lying_service import FOR_EVER, NO_KEYS, OTHER_DIGEST, OTHER_UNITS, REFUSED

LIAR = "control-unit-1"
SILENCE_SECONDS = 5.0
_SCRIPT = Path(__file__).with_name("lying_service.py")


class TestbedWithLiar(LocalTestbed):
    """A testbed whose cluster 1 lies on demand. Its scheduler gives up clusters without progress after 30 s."""

    __test__ = False
    forks_hosts = False

    def lie(self, lie: str, *rounds: int) -> None:
        """Makes cluster 1 tell a lie in these rounds, of which the first is 0."""
        self._lie_file.write_text(f"{lie}\n{' '.join(map(str, rounds))}")

    @property
    def _lie_file(self) -> Path:
        return self.workspace.run / "lie"

    def _command_line(self, name: str, listen: str, line: list[str]) -> list[str]:
        if name not in (LIAR, "scheduler"):
            return line
        wrapped = [sys.executable, str(_SCRIPT), *line[line.index("-m") + 1 :]]
        return ["env", f"LIE_FILE={self._lie_file}", *wrapped]


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestbedWithLiar]:
    with TestbedWithLiar([1, 1, 1], tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.lie("")
        testbed.wait_until_registered()
        yield testbed


def job_of_three(folder: Path, name: str, rounds: int, **schedule: Any) -> JobConfig:
    return make_job(
        folder,
        name=name,
        num_rows=(21, 33, 27),
        devices_per_cluster=1,
        training={"rounds": rounds, "replicate_every": 20, "evaluate_every": 1},
        schedule={"silence_seconds": SILENCE_SECONDS, "retry_seconds": 300.0, **schedule},
    )


@pytest.mark.parametrize("lie", [OTHER_UNITS, OTHER_DIGEST, REFUSED, FOR_EVER])
def test_job_goes_on_without_the_liar_and_tries_it_again(
    testbed: TestbedWithLiar, tmp_path: Path, lie: str
) -> None:
    job = job_of_three(tmp_path, lie.replace(" ", "-"), 6, min_clusters=2)
    incidents = []

    def on_event(event: Any) -> None:
        if event.incident.code == INCIDENT_CODE_HOST_LEFT_OUT:
            incidents.append(event.incident)

    testbed.lie(lie, 1, 2)
    finished = run_job(testbed, job, on_event=on_event)
    # It is tried again in the next round, and then after a pause of one round.
    assert finished.late_clusters == {0: [], 1: [1], 2: [1], 3: [1], 4: [], 5: []}
    assert [list(incident.host_ids) for incident in incidents] == [[LIAR], [LIAR]]
    assert all(LIAR in incident.message for incident in incidents)
    assert [evaluation.num_rounds for evaluation in finished.evaluations] == [1, 2, 3, 4, 5, 6]
    assert [evaluation.num_rows for evaluation in finished.evaluations][-1] == 4
    if lie == REFUSED:
        assert 'late_rounds_total{cluster="1"}' in testbed.metrics("scheduler")
        testbed.lie("")
        longer = job.training.model_copy(update={"rounds": 7})
        again = run_job(testbed, job.model_copy(update={"training": longer}), resume=True)
        assert [started.round_index for started in again.started] == list(range(7))
        assert again.late_clusters == {**finished.late_clusters, 6: []}
        for cluster in range(3):
            losses = finished.losses(cluster)
            assert losses and again.losses(cluster)[: len(losses)] == losses


def test_secure_job_goes_on_without_a_cluster_that_makes_no_keys(
    testbed: TestbedWithLiar, tmp_path: Path
) -> None:
    job = job_of_three(tmp_path, "no-keys", 4, min_clusters=2)
    job = job.model_copy(update={"averaging": AveragingConfig(secure=True)})
    testbed.lie(NO_KEYS, 1)
    told, late = [], {}
    with testbed.client() as client:
        job_id = client.submit(job)
        for event in client.watch(job_id):
            if event.incident.code == INCIDENT_CODE_HOST_LEFT_OUT:
                told.append(list(event.incident.host_ids))
            if event.HasField("round_committed"):
                committed = event.round_committed
                late[committed.num_rounds] = list(committed.late_clusters)
        assert client.find_job(job_id).state == JOB_STATE_SUCCEEDED
    assert late == {1: [], 2: [1], 3: [], 4: []}
    assert told == [[LIAR]]


@pytest.mark.parametrize(("lie", "num_attempts"), [(OTHER_UNITS, 3), (REFUSED, 1), (FOR_EVER, 3)])
def test_job_that_needs_all_clusters_ends_and_names_the_liar(
    testbed: TestbedWithLiar, tmp_path: Path, lie: str, num_attempts: int
) -> None:
    job = job_of_three(tmp_path, f"all-{lie.replace(' ', '-')}", 4)
    testbed.lie(lie, 1, 2, 3)
    run = run_interrupted(testbed, job, limit_seconds=300)
    assert run.final_state == JOB_STATE_FAILED
    assert LIAR in run.message, run.message
    failed = [
        incident for incident in run.incidents if incident.code == INCIDENT_CODE_ATTEMPT_FAILED
    ]
    assert len(failed) == num_attempts - 1, run.incidents
