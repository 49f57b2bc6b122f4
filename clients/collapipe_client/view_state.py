"""What a watcher of a job knows: events in, state out. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from collapipe.v1.job_pb2 import Evaluation, RoundProgress
from collapipe.v1.plan_pb2 import Plan
from collapipe.v1.scheduler_pb2 import JobState, JobStatus, RoundStarted, WatchJobResponse
from collapipe_client.documents import enum_word

_STALLED_REPORTS = 3
ENDED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Measurement:
    """The metric on the held-out data."""

    metric: str
    value: float
    num_rounds: int
    num_rows: int


@dataclass(frozen=True)
class StageView:
    """A host and what it runs."""

    host_id: str
    units: str
    busy_ratio: float = 0.0


@dataclass(frozen=True)
class ClusterView:
    """A cluster in its round.

    Args:
        cluster_index: The cluster.
        stages: Its pipeline, in order.
        steps_done: Steps done in this round.
        local_steps: Steps of this round; 0 until the cluster reports.
        loss: Loss of the last step; `None` before the first.
        samples_per_second: Rows trained a second in this round.
        waiting_for: What it waits for, in words; empty when it computes.
        stalled_reports: How many reports in a row said that it still waits for the same.
    """

    cluster_index: int
    stages: tuple[StageView, ...] = ()
    steps_done: int = 0
    local_steps: int = 0
    loss: float | None = None
    samples_per_second: float = 0.0
    waiting_for: str = ""
    stalled_reports: int = 0


@dataclass(frozen=True)
class JobView:
    """A job as seen by its events so far.

    Args:
        name: Of the job file.
        state: "queued" to "succeeded", "failed" or "cancelled"; empty before the first event.
        message: What is being waited for, or why it stopped.
        elapsed_seconds: Since it was submitted.
        num_rounds_committed: Rounds committed.
        num_rounds: Rounds of the job.
        round_index: The round in progress; `None` between rounds.
        attempt: The try at this round.
        clusters: The clusters, in order.
        measurement: The last measurement; `None` before the first.
        round_seconds: How long the last committed round took; `None` before.
    """

    name: str = ""
    state: str = ""
    message: str = ""
    elapsed_seconds: float = 0.0
    num_rounds_committed: int = 0
    num_rounds: int = 0
    round_index: int | None = None
    attempt: int = 0
    clusters: tuple[ClusterView, ...] = ()
    measurement: Measurement | None = None
    round_seconds: float | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ENDED


def apply(view: JobView, event: WatchJobResponse) -> JobView:
    """Takes an event into the view; an event without content moves only the time."""
    view = replace(view, elapsed_seconds=max(view.elapsed_seconds, event.elapsed_seconds))
    match event.WhichOneof("event"):
        case "status":
            return _apply_status(view, event.status)
        case "round_started":
            return _apply_round_started(view, event.round_started)
        case "progress":
            return _apply_progress(view, event.progress)
        case "evaluation":
            return replace(view, measurement=_measurement(event.evaluation))
        case "round_committed":
            return replace(
                view,
                num_rounds_committed=event.round_committed.num_rounds,
                round_seconds=event.round_committed.round_seconds,
                round_index=None,
            )
    return view


def unit_words(start_unit: int, stop_unit: int, num_units: int) -> str:
    """Names a range of units: "embedding", "blocks 0-1", "head", or several of them."""
    words = []
    if start_unit == 0 < stop_unit:
        words.append("embedding")
    first, last = max(start_unit, 1) - 1, min(stop_unit, num_units - 1) - 2
    if first == last:
        words.append(f"block {first}")
    elif first < last:
        words.append(f"blocks {first}-{last}")
    if start_unit < stop_unit == num_units:
        words.append("head")
    return ", ".join(words) or "nothing"


def plan_stages(plan: Plan) -> tuple[StageView, ...]:
    """Names the stages of a plan."""
    return _stages([(s.host_id, s.start_unit, s.stop_unit, 0.0) for s in plan.stages])


def _apply_status(view: JobView, status: JobStatus) -> JobView:
    state = enum_word(JobState.Name(status.state), "JobState")
    return replace(
        view,
        name=status.name or view.name,
        state=state,
        message=status.message,
        num_rounds_committed=max(status.num_rounds_committed, view.num_rounds_committed),
        num_rounds=status.num_rounds or view.num_rounds,
        measurement=_measurement(status.evaluation)
        if status.HasField("evaluation")
        else view.measurement,
        clusters=() if state == "queued" else view.clusters,
    )


def _apply_round_started(view: JobView, started: RoundStarted) -> JobView:
    plans = sorted(started.plans, key=lambda plan: plan.cluster_index)
    return replace(
        view,
        round_index=started.round_index,
        attempt=started.attempt,
        clusters=tuple(ClusterView(plan.cluster_index, plan_stages(plan)) for plan in plans),
    )


def _apply_progress(view: JobView, progress: RoundProgress) -> JobView:
    known = {cluster.cluster_index: cluster for cluster in view.clusters}
    before = known.get(progress.cluster_index, ClusterView(progress.cluster_index))
    stalled = (
        progress.waiting_for != ""
        and progress.waiting_for == before.waiting_for
        and progress.steps_done == before.steps_done
    )
    stages = _stages(
        [(s.host_id, s.start_unit, s.stop_unit, s.busy_ratio) for s in progress.stages]
    )
    known[progress.cluster_index] = ClusterView(
        progress.cluster_index,
        stages or before.stages,
        progress.steps_done,
        progress.local_steps,
        progress.loss if progress.HasField("loss") else before.loss,
        progress.samples_per_second,
        progress.waiting_for,
        before.stalled_reports + 1 if stalled else 0,
    )
    return replace(view, clusters=tuple(known[index] for index in sorted(known)))


def _measurement(evaluation: Evaluation) -> Measurement:
    return Measurement(
        evaluation.metric, evaluation.value, evaluation.num_rounds, evaluation.num_rows
    )


def _stages(ranges: Sequence[tuple[str, int, int, float]]) -> tuple[StageView, ...]:
    num_units = max((stop for _, _, stop, _ in ranges), default=0)
    return tuple(
        StageView(host_id, unit_words(start, stop, num_units), busy)
        for host_id, start, stop, busy in ranges
    )


def progress_lines(before: JobView, after: JobView) -> list[str]:
    """Says in plain lines what changed and matters to somebody who reads a log.

    Steps are told each quarter of a round, a wait when it lasts, a placement when it is new.
    """
    lines = []
    if (after.state, after.message) != (before.state, before.message):
        lines.append(f"{after.state}: {after.message}" if after.message else after.state)
    if after.round_index is not None and (after.round_index, after.attempt) != (
        before.round_index,
        before.attempt,
    ):
        again = f" (attempt {after.attempt + 1})" if after.attempt else ""
        lines.append(f"{_round(after)} starts{again}")
        lines += _placement_lines(before, after)
    known = {cluster.cluster_index: cluster for cluster in before.clusters}
    for cluster in after.clusters:
        lines += _cluster_lines(
            known.get(cluster.cluster_index), cluster, f"{_round(after)}, cluster"
        )
    if after.measurement is not None and after.measurement != before.measurement:
        lines.append(say_measurement(after.measurement))
    if after.round_index is None and before.round_index is not None:
        lines.append(f"{_round(before)} committed in {after.round_seconds or 0:.1f} s")
    return lines


def say_measurement(measurement: Measurement) -> str:
    """Says the metric in a line."""
    rounds = f"{measurement.num_rounds} round{'' if measurement.num_rounds == 1 else 's'}"
    return (
        f"{measurement.metric} {measurement.value:.4f} after {rounds} ({measurement.num_rows} rows)"
    )


def _round(view: JobView) -> str:
    return f"round {(view.round_index or 0) + 1}/{view.num_rounds}"


def _placement_lines(before: JobView, after: JobView) -> Iterable[str]:
    def placement(clusters: Iterable[ClusterView]) -> dict[int, list[tuple[str, str]]]:
        return {c.cluster_index: [(s.host_id, s.units) for s in c.stages] for c in clusters}

    known = placement(before.clusters)
    for index, stages in placement(after.clusters).items():
        if stages != known.get(index):
            yield f"  cluster {index}: " + " | ".join(f"{host} {units}" for host, units in stages)


def _cluster_lines(before: ClusterView | None, after: ClusterView, prefix: str) -> Iterable[str]:
    steps_before = before.steps_done if before else 0
    if after.local_steps and after.steps_done > steps_before:
        quarters = [4 * steps // after.local_steps for steps in (steps_before, after.steps_done)]
        if quarters[0] != quarters[1]:
            loss = "" if after.loss is None else f", loss {after.loss:.4f}"
            yield (
                f"{prefix} {after.cluster_index}: step "
                f"{after.steps_done}/{after.local_steps}{loss}, {after.samples_per_second:.1f} "
                "samples/s"
            )
    if (
        after.stalled_reports == _STALLED_REPORTS
        and before
        and before.stalled_reports < _STALLED_REPORTS
    ):
        yield f"{prefix} {after.cluster_index} stands still: {after.waiting_for}"
