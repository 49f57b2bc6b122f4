"""Runs a job on a testbed, and reads its results from the stores of the services."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from stored_jobs import stored_commit
from torch import Tensor

from collapipe.job import JobConfig
from collapipe.v1.job_pb2 import Evaluation, RoundSummary
from collapipe.v1.plan_pb2 import ClusterState, Commit, Plan
from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED, RoundStarted
from collapipe_client import LocalTestbed

_LIMIT_SECONDS = 120.0


@dataclass
class FinishedJob:
    """The events of a job that succeeded, and its results in the stores of the services."""

    job: JobConfig
    job_id: str
    state: Path
    """Holds the state directory of each service."""
    started: list[RoundStarted] = field(default_factory=list)
    """The start of each attempt at a round."""
    summaries: list[list[RoundSummary]] = field(default_factory=list)
    """The summary of each cluster, for each round."""
    late_clusters: dict[int, list[int]] = field(default_factory=dict)
    """The clusters without which a round was committed, by the index of the round."""
    ended_early: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of mini-batches of the clusters that trained fewer than others, by the indices of round and cluster."""
    evaluations: list[Evaluation] = field(default_factory=list)

    @cached_property
    def commit(self) -> Commit:
        """The last commit of the edge server."""
        return stored_commit(self.state / "edge-server", self.job_id)

    def plans(self, cluster_index: int) -> list[Plan]:
        """Returns the plan of each trained round."""
        plans = [started.plans[cluster_index] for started in self.started]
        return plans[: self.job.training.rounds]

    def losses(self, cluster_index: int) -> list[float]:
        """Returns the loss of each optimizer step."""
        return [loss for clusters in self.summaries for loss in clusters[cluster_index].losses]

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights of the global model, the frozen ones included."""
        units = self.commit.global_units
        digests = [unit.weights_digest for unit in units]
        return self._load(digests + [unit.frozen_digest for unit in units if unit.frozen_digest])

    def optimizer_state(self, cluster_index: int) -> dict[str, Tensor]:
        """Returns the optimizer state of a cluster."""
        units = self._cluster(cluster_index).units
        return self._load([unit.optimizer_digest for unit in units if unit.optimizer_digest])

    def unit_bytes(self, unit_index: int, cluster_index: int = 0) -> int:
        """Returns the size of the weights and the optimizer state of a unit."""
        unit = self._cluster(cluster_index).units[unit_index]
        digests = (unit.weights_digest, unit.optimizer_digest)
        return sum(self._blob(digest).stat().st_size for digest in digests)

    def _cluster(self, cluster_index: int) -> ClusterState:
        return self.commit.clusters[cluster_index]

    def _load(self, digests: list[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for digest in digests:
            for name, tensor in load_file(self._blob(digest)).items():
                assert name not in tensors, f"{name} is in the state of two units"
                tensors[name] = tensor
        return tensors

    def _blob(self, digest: str) -> Path:
        keepers = ["edge-server", *(f"control-unit-{i}" for i in self.job.host_clusters)]
        paths = [self._directory(keeper) / "blobs" / digest for keeper in keepers]
        paths.append(self.state / "edge-server" / "frozen" / digest)
        found = [path for path in paths if path.is_file()]
        assert found, f"no service has blob {digest}, which the last commit names"
        return found[0]

    def _directory(self, service: str) -> Path:
        return self.state / service / "jobs" / self.job_id


def run_job(
    testbed: LocalTestbed,
    job: JobConfig,
    *,
    resume: bool = False,
    on_event: Callable[[Any], None] = lambda event: None,
    limit_seconds: float = _LIMIT_SECONDS,
) -> FinishedJob:
    """Runs a job to its end, or continues the last job of its name. Fails if the job fails."""
    deadline = time.monotonic() + limit_seconds
    with testbed.client() as client:
        finished = FinishedJob(job, client.submit(job, resume), testbed.workspace.state)
        last: Any = None
        for event in client.watch(finished.job_id, signs_of_life=True):
            if event.HasField("status"):
                last = event.status
            elif event.HasField("round_started"):
                finished.started.append(event.round_started)
            elif event.HasField("evaluation"):
                finished.evaluations.append(event.evaluation)
            elif event.HasField("round_committed"):
                finished.summaries.append(list(event.round_committed.summaries))
                committed = event.round_committed
                finished.late_clusters[committed.num_rounds - 1] = list(committed.late_clusters)
                for index, summary in enumerate(committed.summaries):
                    if 0 < summary.local_steps < job.training.local_steps:
                        name = committed.num_rounds - 1, index
                        finished.ended_early[name] = summary.local_steps
            on_event(event)
            if time.monotonic() > deadline:
                client.cancel(finished.job_id)
                raise AssertionError(
                    f"the job did not end in {limit_seconds:g} s; last status: {last}"
                )
    assert last.state == JOB_STATE_SUCCEEDED, last.message
    assert len({started.attempt for started in finished.started}) <= 1, "a failure was tried again"
    return finished
