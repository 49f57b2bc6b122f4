"""Runs a job that something happens to, and checks what it left: invariants I2 and I3."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from reference.tiny_jobs import make_job

from collapipe.errors import PeerLostError
from collapipe.job import JobConfig
from collapipe.v1.plan_pb2 import Commit, Plan
from collapipe.v1.scheduler_pb2 import (
    JOB_STATE_CANCELLED,
    JOB_STATE_FAILED,
    JOB_STATE_SUCCEEDED,
    JobState,
)
from collapipe_client import LocalTestbed

SILENCE_SECONDS = 3.0
PATIENT_SECONDS = 30.0
"""Silence while processes that were just started import what they need, many at a time on few cores."""
_LIMIT_SECONDS = 90.0
_POLL_SECONDS = 0.002
_ENDED = (JOB_STATE_SUCCEEDED, JOB_STATE_FAILED, JOB_STATE_CANCELLED)


@dataclass
class Run:
    """A job that runs, as its events and the services' stores tell it so far."""

    job: JobConfig
    state: Path
    """Holds the state directory of each service."""
    job_id: str = ""
    round_index: int = -1
    steps_done: int = 0
    """Of cluster 0, in this round."""
    plans: Sequence[Plan] = ()
    blobs_before: dict[str, set[str]] = field(default_factory=dict)
    """What each service kept when the round began."""
    final_state: JobState = 0  # type: ignore[assignment]
    message: str = ""
    ended: bool = False

    def new_blobs(self, service: str) -> int:
        """Blobs that a service has stored in this round."""
        return len(self.blobs(service) - self.blobs_before.get(service, set()))

    def blobs(self, service: str) -> set[str]:
        """Names of the complete blobs of a service."""
        folder = self.directory(service) / "blobs"
        if not folder.exists():
            return set()
        return {path.name for path in folder.iterdir() if path.suffix != ".partial"}

    def num_rounds_committed(self) -> int:
        """What the edge server's own document says."""
        path = self.directory("edge-server") / "commit.json"
        return json.loads(path.read_text()).get("num_rounds", 0) if path.exists() else 0

    def directory(self, service: str) -> Path:
        """Of the job, at one service."""
        return self.state / service / "jobs" / self.job_id


Moment = Callable[[Run], bool]

MOMENTS: dict[str, Moment] = {
    "configure": lambda run: run.round_index == 1,
    "step": lambda run: run.round_index == 1 and run.steps_done >= 1,
    # the control unit has stored its own unit, weights and moments, and something of a device
    "gather": lambda run: run.round_index == 1 and run.new_blobs("control-unit-0") >= 3,
    # the edge server has stored each cluster's head, weights and moments, and something it fetched
    "commit": lambda run: run.round_index == 1 and run.new_blobs("edge-server") >= 5,
    "committed": lambda run: run.num_rounds_committed() == 2,
}
"""When something happens in the second of three rounds."""


def make_interruptible_job(
    folder: Path, silence_seconds: float = SILENCE_SECONDS, **overrides: Any
) -> JobConfig:
    """Three rounds of two clusters, large enough to be met in the middle of everything."""
    training = {"rounds": 3, "local_steps": 3, **overrides.pop("training", {})}
    return make_job(
        folder,
        num_rows=(21, 33),
        devices_per_cluster=[3, 1],
        model_config={"hidden_size": 64, "intermediate_size": 256},
        training=training,
        schedule={"silence_seconds": silence_seconds},
        **overrides,
    )


def run_interrupted(
    testbed: LocalTestbed,
    job: JobConfig,
    moment: Moment = lambda run: False,
    happens: Callable[[Run], object] = lambda run: None,
    *,
    resume: bool = False,
) -> Run:
    """Runs a job to whatever end it takes, and lets something happen to it once.

    The job must end within the silence deadline and some seconds for a loaded machine.
    """
    run = Run(job, testbed.workspace.state)
    happened: list[float] = []

    def sabotage() -> None:
        while not run.ended:
            if run.job_id and moment(run):
                happens(run)
                happened.append(time.monotonic())
                return
            time.sleep(_POLL_SECONDS)

    saboteur = threading.Thread(target=sabotage)
    saboteur.start()
    started = time.monotonic()
    try:
        with testbed.client() as client:
            run.job_id = client.submit(job, resume)
            for event in client.watch(run.job_id, signs_of_life=True):
                _take(run, event)
                assert time.monotonic() - started < _LIMIT_SECONDS, run
    except PeerLostError as error:  # the scheduler went
        run.message = str(error)
    finally:
        run.ended = True
        saboteur.join()
    if happened and run.final_state != JOB_STATE_SUCCEEDED:
        assert time.monotonic() - happened[0] < SILENCE_SECONDS + 5
    return run


def resume(testbed: LocalTestbed, broken: Run) -> Run:
    """Goes on with a job that failed, when all hosts are back."""
    testbed.wait_until_registered()
    schedule = broken.job.schedule.model_copy(update={"silence_seconds": PATIENT_SECONDS})
    job = broken.job.model_copy(update={"schedule": schedule})
    resumed = run_interrupted(testbed, job, resume=True)
    assert resumed.final_state == JOB_STATE_SUCCEEDED, resumed.message
    assert resumed.job_id == broken.job_id
    return resumed


def final_digests(commit: Commit) -> list[str]:
    """Names every parameter and every moment of a commit by content."""
    return [
        digest
        for units in (commit.global_units, *(cluster.units for cluster in commit.clusters))
        for unit in units
        for digest in (unit.weights_digest, unit.optimizer_digest)
    ]


def intact_commit(run: Run) -> Commit:
    """The last commit; fails unless all that it names is there, and is what its name says."""
    document = json.loads((run.directory("edge-server") / "commit.json").read_text())
    commit = json_format.ParseDict(document, Commit())
    for unit in commit.global_units:
        _check_blob(run, "edge-server", unit.weights_digest)
    for cluster in commit.clusters:
        last = len(cluster.units) - 1
        for unit in cluster.units:
            if unit.optimizer_digest:
                is_head = unit.unit_index == last
                keeper = "edge-server" if is_head else f"control-unit-{cluster.cluster_index}"
                _check_blob(run, keeper, unit.optimizer_digest)
    return commit


def _check_blob(run: Run, service: str, digest: str) -> None:
    path = run.directory(service) / "blobs" / digest
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest, f"{service} garbled {digest}"


def _take(run: Run, event: Any) -> None:
    if event.HasField("status"):
        run.message = event.status.message
        if event.status.state in _ENDED:
            run.final_state = event.status.state
    elif event.HasField("round_started"):
        services = ("edge-server", "control-unit-0", "control-unit-1")
        run.blobs_before = {service: run.blobs(service) for service in services}
        run.plans = event.round_started.plans
        run.steps_done = 0
        run.round_index = event.round_started.round_index
    elif event.HasField("progress") and event.progress.cluster_index == 0:
        run.steps_done = event.progress.steps_done
