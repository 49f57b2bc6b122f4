from pathlib import Path

import pytest

from collapipe.scheduler.events import EventLog
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.unusual_changes import UnusualChanges, unusual_clusters
from collapipe.v1.plan_pb2 import Plan, Stage
from collapipe.v1.scheduler_pb2 import INCIDENT_CODE_UNUSUAL_CHANGE

from .jobs import job

PLANS = [
    Plan(cluster_index=index, stages=[Stage(host_id=f"control-unit-{index}")]) for index in range(4)
]


@pytest.mark.parametrize(
    ("changes", "unusual"),
    [
        ({0: 1.0, 1: 1.0, 2: 4.0}, {2: 4.0}),
        ({0: 1.0, 1: 1.0, 2: 3.0}, {}),
        ({0: 8.0, 1: 2.0, 2: 2.0, 5: 8.0}, {0: 4.0, 5: 4.0}),
        ({0: 1.0, 1: 100.0}, {}),
        ({0: 0.0, 1: 0.0, 2: 1.0}, {}),
        ({}, {}),
    ],
)
def test_changes_are_compared_with_the_median(
    changes: dict[int, float], unusual: dict[int, float]
) -> None:
    assert unusual_clusters(changes) == unusual


def test_cluster_is_told_of_once_until_its_changes_are_usual_again(tmp_path: Path) -> None:
    events = EventLog()
    jobs = JobStore(tmp_path)
    looking = UnusualChanges(JobProgress(jobs.create(job()), jobs, events))
    usual, unusual = {0: 1.0, 1: 1.0, 2: 1.5}, {0: 1.0, 1: 1.0, 2: 5.2}
    for round_index, changes in enumerate([usual, unusual, unusual, {}, unusual]):
        looking.look_at(round_index, changes, PLANS)
    events.close()
    incidents = [event.incident for event in events.watch(20.0) if event is not None]
    assert {incident.code for incident in incidents} == {INCIDENT_CODE_UNUSUAL_CHANGE}
    assert [list(incident.host_ids) for incident in incidents] == [["control-unit-2"]] * 2
    said = "cluster 2 changed the model in round 2 by 5.2, 5.2 times the median"
    assert said in incidents[0].message and "in round 5" in incidents[1].message
