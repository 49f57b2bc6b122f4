"""What stays in memory of a job that has ended."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from reference.tiny_jobs import make_job

from . import clusters
from .clusters import MakeCluster, Ranges

SPREAD: Ranges = [("control-unit-0", 0, 1), ("device-0-0", 1, 4), ("edge-server", 4, 5)]


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
    cluster = make_cluster(make_job(tmp_path))
    cluster.run_round(SPREAD, evaluate=True)
    cluster.run_round(SPREAD)
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
