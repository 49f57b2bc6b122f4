"""Runs a job, injects a fault, and checks what the services kept: invariants I2 and I3."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from killed_processes import restart
from reference.tiny_jobs import make_job
from stored_jobs import num_rounds_stored, stored_commit

from collapipe.errors import CollapipeError
from collapipe.job import JobConfig
from collapipe.v1.plan_pb2 import Commit, Plan
from collapipe.v1.scheduler_pb2 import (
    JOB_STATE_CANCELLED,
    JOB_STATE_FAILED,
    JOB_STATE_SUCCEEDED,
    Incident,
    IncidentCode,
    JobState,
    RoundCommitted,
)
from collapipe_client import LocalTestbed

SILENCE_SECONDS = 5.0
PATIENT_SECONDS = 30.0
"""Silence deadline while many processes start at once and import modules on few cores."""
_LIMIT_SECONDS = 90.0
_MAX_TRIES = 4
"""How often a job is run if its moment passes before the fault is injected, as happens on a busy machine."""
_POLL_SECONDS = 0.002
_ENDED = (JOB_STATE_SUCCEEDED, JOB_STATE_FAILED, JOB_STATE_CANCELLED)


class MomentMissedError(Exception):
    """The moment of a fault has passed: the job was too fast for this machine to disturb it in time."""


@dataclass
class Run:
    """The state of a running job, from its events and the stores of the services."""

    job: JobConfig
    state: Path
    """Holds the state directory of each service."""
    job_id: str = ""
    round_index: int = -1
    steps_done: int = 0
    """Steps of cluster 0 in this round."""
    evaluates: bool = False
    """Whether a cluster has evaluated for at least a second in this round."""
    plans: Sequence[Plan] = ()
    blobs_before: dict[str, set[str]] = field(default_factory=dict)
    """Names of the blobs that each service had when the round began."""
    final_state: JobState = 0  # type: ignore[assignment]
    message: str = ""
    messages: list[str] = field(default_factory=list)
    """Messages of all states, without repetitions."""
    incidents: list[Incident] = field(default_factory=list)
    attempts: set[int] = field(default_factory=set)
    num_rounds_started: int = 0
    """Attempts at rounds that began."""
    commits: list[tuple[float, RoundCommitted]] = field(default_factory=list)
    """All commits, each with the time at which its event arrived, on the monotonic clock."""
    ended: bool = False

    def codes(self, host_id: str | None = None, after: int = 0) -> list[str]:
        """Returns the codes of the incidents so far, of all or of those about one host, without the first `after` incidents."""
        return [
            IncidentCode.Name(incident.code).removeprefix("INCIDENT_CODE_")
            for incident in self.incidents[after:]
            if host_id is None or host_id in incident.host_ids
        ]

    def new_blobs(self, service: str) -> int:
        """Returns the number of blobs that a service has stored in this round."""
        return len(self.blobs(service) - self.blobs_before.get(service, set()))

    def blobs(self, service: str) -> set[str]:
        """Returns the names of the complete blobs of a service."""
        folder = self.directory(service) / "blobs"
        if not folder.exists():
            return set()
        return {path.name for path in folder.iterdir() if path.suffix != ".partial"}

    def num_rounds_committed(self) -> int:
        """Returns the number of committed rounds in the database of the edge server."""
        return num_rounds_stored(self.state / "edge-server", self.job_id)

    def directory(self, service: str) -> Path:
        """Returns the folder of the job in the state directory of a service."""
        return self.state / service / "jobs" / self.job_id


Moment = Callable[[Run], bool]


def tried_again(run: Run) -> bool:
    """Returns whether the first attempt of a job failed."""
    return len(run.attempts) > 1


MOMENTS: dict[str, Moment] = {
    "plan": lambda run: run.round_index == 0 and len(run.commits) == 1,
    "configure": lambda run: run.round_index == 1,
    # Only a round that begins with an evaluation of some seconds has this moment.
    "evaluate": lambda run: run.round_index == 1 and run.evaluates,
    "step": lambda run: run.round_index == 1 and run.steps_done >= 1,
    "gather": lambda run: run.round_index == 1 and run.steps_done == run.job.training.local_steps,
    # The control unit has copied the moments of its own unit, and those of one unit of a device.
    "copy": lambda run: run.round_index == 1 and run.new_blobs("control-unit-0") >= 2,
    # The edge server has one average among its blobs.
    "commit": lambda run: run.round_index == 1 and run.new_blobs("edge-server") >= 1,
    "committed": lambda run: run.num_rounds_committed() == 2,
}
"""Conditions for moments in the second of three rounds, at which a fault is injected."""

SERVICES: dict[str, Callable[[Run], str]] = {
    "scheduler": lambda run: "scheduler",
    "edge server": lambda run: "edge-server",
    "control unit": lambda run: "control-unit-0",
    "middle device": lambda run: run.plans[0].stages[2].host_id,
}
"""One host of each service, given a run whose first round has begun."""


def make_interruptible_job(
    folder: Path, silence_seconds: float = SILENCE_SECONDS, **overrides: Any
) -> JobConfig:
    """Makes a job of three rounds and two clusters. Its phases are long enough for a fault during each."""
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
    moment: Moment | None = None,
    inject: Callable[[Run], object] = lambda run: None,
    *,
    hit: Callable[[Run], bool] = lambda run: True,
    resume: bool = False,
    limit_seconds: float = _LIMIT_SECONDS,
) -> Run:
    """Runs a job to its end, and calls `inject` once when `moment` holds. If the moment is missed, runs another job.

    Args:
        moment: Says whether the fault is to be injected now. By default there is no fault.
        inject: Raises `MomentMissedError` if it was called too late. Then it is called again with another job.
        hit: Says whether the fault had an effect on a job that succeeded. A device may die after it has done its last work.
        limit_seconds: Longest duration of the job.

    Raises:
        AssertionError: The job took longer.
        MomentMissedError: The moment was missed in all tries.
        Exception: `inject` raised it.
    """

    def attempt() -> Run:
        run = Run(job, testbed.workspace.state)
        was_injected = _run_once(testbed, run, moment, inject, resume, limit_seconds)
        is_hit = was_injected and hit(run)
        if moment and not is_hit and run.final_state == JOB_STATE_SUCCEEDED:
            mend(testbed, run)
            raise MomentMissedError(f"the job ended before the moment of the fault: {run}")
        return run

    return try_until_hit(attempt)


def try_until_hit(attempt: Callable[[], Run]) -> Run:
    """Calls `attempt` until it raises no `MomentMissedError`, at most `_MAX_TRIES` times, and returns its result."""
    for _ in range(_MAX_TRIES - 1):
        with suppress(MomentMissedError):
            return attempt()
    return attempt()


def _run_once(
    testbed: LocalTestbed,
    run: Run,
    moment: Moment | None,
    inject: Callable[[Run], object],
    resume: bool = False,
    limit_seconds: float = _LIMIT_SECONDS,
) -> bool:
    """Runs a job to its end, fills in `run` meanwhile, and returns whether the fault was injected."""
    injected: Future[object] = Future()

    def inject_once() -> None:
        while not run.ended:
            if run.job_id and moment and moment(run):
                try:
                    injected.set_result(inject(run))
                except MomentMissedError as error:
                    mend(testbed, run)  # Otherwise the end of the job may wait for what is dead.
                    injected.set_exception(error)
                except BaseException as error:
                    injected.set_exception(error)
                return
            time.sleep(_POLL_SECONDS)

    injector = threading.Thread(target=inject_once)
    injector.start()
    started = time.monotonic()
    try:
        with testbed.client() as client:
            run.job_id = client.submit(run.job, resume)
            for event in client.watch(run.job_id, signs_of_life=True):
                _take(run, event)
                assert time.monotonic() - started < limit_seconds, run
    finally:
        run.ended = True
        injector.join()
    error = injected.exception() if injected.done() else None
    has_failed = run.final_state == JOB_STATE_FAILED  # The caller judges that.
    if error and not (has_failed and isinstance(error, MomentMissedError)):
        raise error
    return injected.done()


def judge_interrupted(
    testbed: LocalTestbed,
    run: Run,
    undisturbed: Sequence[str],
    moment: Moment,
    inject: Callable[[Run], object],
    limit_seconds: float = _LIMIT_SECONDS,
) -> str:
    """Runs `run.job` with a fault. Returns "equal" if it ended with the undisturbed digests, otherwise what was wrong."""
    try:
        _run_once(testbed, run, moment, inject, limit_seconds=limit_seconds)
        if run.final_state != JOB_STATE_SUCCEEDED:
            return f"the job ended: {run.message}"
        return "equal" if final_digests(intact_commit(run)) == undisturbed else "other bits"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def mend(testbed: LocalTestbed, run: Run) -> None:
    """Starts all lost processes again, and cancels the job if it has not ended."""
    for name in testbed.lost():
        restart(testbed, name)
    testbed.wait_until_registered()
    if run.job_id and not run.final_state:
        with testbed.client() as client, suppress(CollapipeError):
            client.cancel(run.job_id)


def resume(testbed: LocalTestbed, broken: Run) -> Run:
    """Resumes a job that has ended, after all hosts have registered again."""
    testbed.wait_until_registered()
    schedule = broken.job.schedule.model_copy(update={"silence_seconds": PATIENT_SECONDS})
    job = broken.job.model_copy(update={"schedule": schedule})
    resumed = run_interrupted(testbed, job, resume=True)
    assert resumed.final_state == JOB_STATE_SUCCEEDED, resumed.message
    assert resumed.job_id == broken.job_id
    return resumed


def final_digests(commit: Commit) -> list[str]:
    """Returns the digests of all weights and moments of a commit."""
    return [
        digest
        for units in (commit.global_units, *(cluster.units for cluster in commit.clusters))
        for unit in units
        for digest in (unit.weights_digest, unit.optimizer_digest)
    ]


def intact_commit(run: Run) -> Commit:
    """Returns the last commit.

    Fails unless its weights, and everything that its restore point names, exist and have the right content.
    """
    commit = stored_commit(run.state / "edge-server", run.job_id)
    for unit in (*commit.global_units, *commit.restore_point.global_units):
        _check_blob(run, "edge-server", unit.weights_digest)
    for cluster in commit.restore_point.clusters:
        last = len(cluster.units) - 1
        for unit in cluster.units:
            if unit.optimizer_digest:
                is_head = unit.unit_index == last
                keeper = "edge-server" if is_head else f"control-unit-{cluster.cluster_index}"
                _check_blob(run, keeper, unit.optimizer_digest)
    return commit


def check_unfinished(run: Run) -> None:
    """Fails unless the last commit is intact. Raises `MomentMissedError` if it is that of the last round."""
    num_rounds = intact_commit(run).num_rounds
    assert num_rounds >= 1
    if num_rounds == run.job.training.rounds:
        raise MomentMissedError(f"all {num_rounds} rounds were committed before the fault")


def _check_blob(run: Run, service: str, digest: str) -> None:
    path = run.directory(service) / "blobs" / digest
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest, (
        f"blob {digest} of {service} has another digest"
    )


def _take(run: Run, event: Any) -> None:
    if event.HasField("status"):
        run.message = event.status.message
        if run.message not in run.messages:
            run.messages.append(run.message)
        if event.status.state in _ENDED:
            run.final_state = event.status.state
    elif event.HasField("round_started"):
        services = ("edge-server", "control-unit-0", "control-unit-1")
        run.blobs_before = {service: run.blobs(service) for service in services}
        run.plans = event.round_started.plans
        run.steps_done, run.evaluates = 0, False
        run.num_rounds_started += 1
        run.round_index = event.round_started.round_index
        run.attempts.add(event.round_started.attempt)
    elif event.HasField("incident"):
        run.incidents.append(event.incident)
    elif event.HasField("round_committed"):
        run.commits.append((time.monotonic(), event.round_committed))
    elif event.HasField("progress"):
        progress = event.progress
        if progress.cluster_index == 0:
            run.steps_done = progress.steps_done
        is_later = progress.training_began or progress.steps_done
        # While all stages wait, the text begins with the phase. Otherwise, some stage computes.
        run.evaluates |= not is_later and progress.waiting_for.partition(":")[0] in (
            "",
            "the evaluation",
        )


def undisturbed_digests(testbed: LocalTestbed, folder: Path, **overrides: Any) -> list[str]:
    """Runs the job without faults, and returns the digests in its last commit."""
    run = run_interrupted(testbed, make_interruptible_job(folder, PATIENT_SECONDS, **overrides))
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    return final_digests(intact_commit(run))
