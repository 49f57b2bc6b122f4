"""A cluster of one device."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from collapipe.job import JobConfig

from .clusters import Cluster, MakeCluster


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """Starts an edge server, a control unit and a device for a job."""
    with ExitStack() as owned:

        def make(job: JobConfig, name: str = "state") -> Cluster:
            cluster = Cluster(job, tmp_path / name)
            owned.callback(cluster.close)
            for name in ("edge-server", "control-unit-0", "device-0-0"):
                cluster.start(name)
            cluster.prepare()
            return cluster

        yield make
