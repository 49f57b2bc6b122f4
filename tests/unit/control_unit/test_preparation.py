"""The scheduler prepares a job with real control units and a real edge server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.tiny_jobs import make_job

from collapipe.control_unit import servicer
from collapipe.errors import CollapipeError
from collapipe.job import JobConfig
from collapipe.planning.job_hosts import ClusterHosts, JobHosts
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.host_registry import CONTROL_UNIT, EDGE_SERVER
from collapipe.scheduler.job_preparation import JobPreparation
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.tasks import Task, load_task
from collapipe.v1.scheduler_pb2 import Host

from .clusters import SECONDS, Cluster

TWO = ("control-unit-0", "control-unit-1")


def shared(job: JobConfig, num_clusters: int, **data: Any) -> JobConfig:
    """All clusters read the training file of the first one, of which some rows are held out."""
    train = job.data.train
    assert isinstance(train, list)
    settings = {"train": train[0], "held_out": None, **data}
    changes = {"data": job.data.model_copy(update=settings), "clusters": num_clusters}
    return JobConfig.from_json(job.model_copy(update=changes).to_json())


class Prepared:
    """A job and the hosts that prepare it."""

    def __init__(self, job: JobConfig, folder: Path) -> None:
        self.cluster = Cluster(job, folder)
        self.hosts = ["edge-server", *TWO[: job.clusters]]
        for name in self.hosts:
            self.cluster.start(name)
        self.store = JobStore(folder / "scheduler")
        self.document = self.store.create(job)

    def prepare(self) -> None:
        """Prepares the job as a scheduler that was started again."""
        progress = JobProgress(self.document, self.store, EventLog())
        addresses = self.cluster.addresses
        units = [
            Host(host_id=name, role=CONTROL_UNIT, address=addresses[name], incarnation="first")
            for name in self.hosts[1:]
        ]
        clusters = tuple(ClusterHosts(unit, ()) for unit in units)
        edge = Host(host_id="edge-server", role=EDGE_SERVER, address=addresses["edge-server"])
        calls = HostCalls(self.cluster.channels, SECONDS)
        JobPreparation(progress, calls).prepare(JobHosts(edge, clusters))


@pytest.fixture
def opened() -> Iterator[list[Prepared]]:
    """The preparations whose hosts end with the test."""
    found: list[Prepared] = []
    yield found
    for each in found:
        each.cluster.close()


def append(job: JobConfig, num_rows: int) -> None:
    """Appends the first rows again to the shared file, with other texts."""
    path = Path(str(job.data.train))
    lines = path.read_text("utf-8").splitlines(keepends=True)[:num_rows]
    added = [line.replace('"text": "', '"text": "later ') for line in lines]
    path.write_text(path.read_text("utf-8") + "".join(added), "utf-8")


def test_shared_file_that_grows_meanwhile_gives_all_clusters_the_same_held_out_rows(
    tmp_path: Path, opened: list[Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = shared(make_job(tmp_path, num_rows=(80,)), 2, max_held_out_rows=3)
    loaded: list[Task] = []

    def load(*arguments: Any) -> Task:
        loaded.append(load_task(*arguments))
        append(job, 60)
        return loaded[-1]

    monkeypatch.setattr(servicer, "load_task", load)
    opened.append(Prepared(job, tmp_path / "state"))
    opened[0].prepare()
    assert opened[0].document.num_first_rows == [80, 80]
    alone = load_task(job.model_copy(update={"clusters": 1}), 0, None, 80)
    assert len(loaded) == 2
    rows = [{example.row for example in task._held_out} for task in (*loaded, alone)]
    assert rows[0] | rows[1] == rows[2]


def test_strict_job_that_has_begun_goes_on_after_a_restart(
    tmp_path: Path, opened: list[Prepared]
) -> None:
    made = make_job(tmp_path, num_rows=(80,), num_held_out=120)
    job = shared(made, 1, held_out=made.data.held_out, strict=True)
    train, held_out = Path(str(job.data.train)), Path(str(job.data.held_out))
    for path in (train, held_out):  # Random rows would repeat each other.
        labels = [("cold", "warm")[number % 2] for number in range(120)]
        rows = [{"text": f"{path.stem} {n}", "label": label} for n, label in enumerate(labels)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    opened.append(Prepared(job, tmp_path / "state"))
    opened[0].prepare()
    with train.open("a", encoding="utf-8") as file:  # Now a row is in both.
        file.write(held_out.read_text("utf-8").splitlines(keepends=True)[0])
    opened[0].prepare()
    opened.append(Prepared(job, tmp_path / "another"))
    with pytest.raises(CollapipeError, match=r"data\.strict"):
        opened[1].prepare()
