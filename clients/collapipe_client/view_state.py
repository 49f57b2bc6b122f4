"""Computes the state of a job from its events, and the lines of text that report its changes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from collapipe.evaluation import evaluation_delay
from collapipe.printable import indented
from collapipe.unit_names import unit_words
from collapipe.v1.job_pb2 import Evaluation, RoundProgress, StageReport
from collapipe.v1.plan_pb2 import Stage
from collapipe.v1.scheduler_pb2 import (
    JobState,
    JobStatus,
    JobTrouble,
    PrivacyLoss,
    RoundCommitted,
    RoundStarted,
    WatchJobResponse,
)
from collapipe_client.message_json import enum_word
from collapipe_client.quantities import count

_STALLED_REPORTS = 3
"""A wait is reported when this many reports in a row have repeated it."""
PREPARATION = ("looks for hosts", "loading data", "making the model", "profiling devices")
"""The steps of a preparation, as the messages of the scheduler name them, in order."""
_KEPT_ROUNDS = 5
_FINAL_STATES = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class StageView:
    """A stage of a pipeline.

    Args:
        units: In words, for example "embedding, blocks 0-1".
        busy_ratio: Share of the round so far in which the host computed, 0 to 1.
    """

    host_id: str
    units: str
    busy_ratio: float = 0.0


@dataclass(frozen=True)
class ClusterView:
    """A cluster in the current round.

    Args:
        stages: In the order of the pipeline.
        local_steps: Steps of the round; 0 until the cluster reports.
        loss: Loss of the last step; `None` before the first.
        waiting_for: The event that the cluster waits for, in words; empty while it computes.
        stalled_reports: How many reports in a row have repeated the same wait.
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
class RoundView:
    """A committed round.

    Args:
        loss: Mean over its steps and clusters; `None` if no cluster told one.
    """

    number: int
    seconds: float
    loss: float | None


@dataclass(frozen=True)
class JobView:
    """The state of a job after its events so far.

    Args:
        state: "queued" to "succeeded", "failed" or "cancelled"; empty before the first event.
        message: The reason for a wait or a failure.
        trouble: What the job lacks; `None` if nothing.
        elapsed_seconds: Time since the job was submitted.
        round_index: `None` between rounds.
        attempt: From 0.
        evaluation: The last one; `None` before the first.
        round_seconds: Duration of the last committed round; `None` before the first.
        evaluation_seconds: By how many seconds the evaluation delayed that round.
        late_clusters: The clusters without which it was committed.
        ended_early: The clusters that trained fewer mini-batches than others in it: index, trained mini-batches, and all.
        privacy_loss: What private updates have revealed; `None` if updates are not private.
        steps_began: When each step of the present preparation began, in `elapsed_seconds`, by its index in `PREPARATION`.
        change: The last change of the plans, with its round, in words; empty before the first one.
        rounds: The last committed rounds, in order.
    """

    name: str = ""
    state: str = ""
    message: str = ""
    trouble: JobTrouble | None = None
    elapsed_seconds: float = 0.0
    num_rounds_committed: int = 0
    num_rounds: int = 0
    round_index: int | None = None
    attempt: int = 0
    clusters: tuple[ClusterView, ...] = ()
    evaluation: Evaluation | None = None
    round_seconds: float | None = None
    evaluation_seconds: float = 0.0
    late_clusters: tuple[int, ...] = ()
    ended_early: tuple[tuple[int, int, int], ...] = ()
    privacy_loss: PrivacyLoss | None = None
    steps_began: Mapping[int, float] = field(default_factory=dict)
    change: str = ""
    rounds: tuple[RoundView, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the job has reached a final state."""
        return self.state in _FINAL_STATES


def apply_event(view: JobView, event: WatchJobResponse) -> JobView:
    """Returns the view after an event. An event without content changes only the time."""
    view = replace(view, elapsed_seconds=max(view.elapsed_seconds, event.elapsed_seconds))
    match event.WhichOneof("event"):
        case "status":
            return _apply_status(view, event.status)
        case "round_started":
            return _apply_round_started(view, event.round_started)
        case "progress":
            return _apply_progress(view, event.progress)
        case "evaluation":
            return replace(view, evaluation=event.evaluation)
        case "round_committed":
            committed = event.round_committed
            return replace(
                view,
                privacy_loss=committed.privacy_loss if committed.HasField("privacy_loss") else None,
                num_rounds_committed=event.round_committed.num_rounds,
                round_seconds=event.round_committed.round_seconds,
                evaluation_seconds=_evaluation_seconds(committed),
                late_clusters=tuple(event.round_committed.late_clusters),
                ended_early=_ended_early(event.round_committed),
                round_index=None,
                rounds=(*view.rounds, _round_view(committed))[-_KEPT_ROUNDS:],
            )
    return view


def _round_view(committed: RoundCommitted) -> RoundView:
    losses = [loss for summary in committed.summaries for loss in summary.losses]
    mean = sum(losses) / len(losses) if losses else None
    return RoundView(committed.num_rounds, committed.round_seconds, mean)


def _evaluation_seconds(committed: RoundCommitted) -> float:
    late = set(committed.late_clusters)
    in_time = [s for index, s in enumerate(committed.summaries) if index not in late]
    return evaluation_delay(in_time)


def _ended_early(committed: RoundCommitted) -> tuple[tuple[int, int, int], ...]:
    steps = {
        index: summary.local_steps
        for index, summary in enumerate(committed.summaries)
        if index not in committed.late_clusters
    }
    most = max(steps.values(), default=0)
    return tuple((index, trained, most) for index, trained in steps.items() if trained < most)


def _apply_status(view: JobView, status: JobStatus) -> JobView:
    state = enum_word(JobState.Name(status.state), "JobState")
    steps: dict[int, float] = {}
    if state == "preparing":
        # A new attempt may leave out steps, but looks for hosts again.
        step = next((i for i, name in enumerate(PREPARATION) if name in status.message), 0)
        known = {i: began for i, began in view.steps_began.items() if i <= step}
        steps = {step: view.elapsed_seconds} | known
    return replace(
        view,
        name=status.name or view.name,
        state=state,
        message=status.message,
        trouble=status.trouble if status.HasField("trouble") else None,
        num_rounds_committed=status.num_rounds_committed,
        num_rounds=status.num_rounds or view.num_rounds,
        evaluation=status.evaluation if status.HasField("evaluation") else view.evaluation,
        privacy_loss=status.privacy_loss if status.HasField("privacy_loss") else view.privacy_loss,
        clusters=() if state == "queued" else view.clusters,
        steps_began=steps,
    )


def _apply_round_started(view: JobView, started: RoundStarted) -> JobView:
    plans = sorted(started.plans, key=lambda plan: plan.cluster_index)
    change = f"round {started.round_index + 1}: {started.change}" if started.change else view.change
    return replace(
        view,
        round_index=started.round_index,
        attempt=started.attempt,
        change=change,
        clusters=tuple(ClusterView(plan.cluster_index, stage_views(plan.stages)) for plan in plans),
    )


def _apply_progress(view: JobView, progress: RoundProgress) -> JobView:
    clusters = {cluster.cluster_index: cluster for cluster in view.clusters}
    before = clusters.get(progress.cluster_index, ClusterView(progress.cluster_index))
    same_wait = (
        progress.waiting_for != ""
        and progress.waiting_for == before.waiting_for
        and progress.steps_done == before.steps_done
    )
    clusters[progress.cluster_index] = ClusterView(
        progress.cluster_index,
        stage_views(progress.stages) or before.stages,
        progress.steps_done,
        progress.local_steps,
        progress.loss if progress.HasField("loss") else before.loss,
        progress.samples_per_second,
        progress.waiting_for,
        before.stalled_reports + 1 if same_wait else 0,
    )
    return replace(view, clusters=tuple(clusters[index] for index in sorted(clusters)))


def stage_views(stages: Sequence[Stage] | Sequence[StageReport]) -> tuple[StageView, ...]:
    """Describes all stages of a pipeline, as a plan or a report has them."""
    num_units = max((stage.stop_unit for stage in stages), default=0)
    return tuple(
        StageView(
            stage.host_id,
            unit_words(stage.start_unit, stage.stop_unit, num_units),
            stage.busy_ratio if isinstance(stage, StageReport) else 0.0,
        )
        for stage in stages
    )


def progress_lines(before: JobView, after: JobView) -> list[str]:
    """Returns the lines that report a change in a log file.

    The lines report steps only every quarter of a round, a wait only if it lasts, and a placement only if it
    is new.
    """
    lines = []
    message = _without_failure(after)
    is_new = (after.state, message) != (before.state, _without_failure(before))
    # An incident tells a wait for hosts, too.
    if is_new and not (after.state == "preparing" and message.startswith("waits for ")):
        lines.append(f"{after.state}: {message}" if message else after.state)
    attempt_before = (before.round_index, before.attempt)
    if after.round_index is not None and (after.round_index, after.attempt) != attempt_before:
        attempt = f" (attempt {after.attempt + 1})" if after.attempt else ""
        lines.append(f"{_round_words(after)} starts{attempt}")
        lines += _placement_lines(before, after)
        if after.change != before.change:
            lines.append(f"  the plan has changed in {after.change}")
    clusters_before = {cluster.cluster_index: cluster for cluster in before.clusters}
    for cluster in after.clusters:
        cluster_before = clusters_before.get(
            cluster.cluster_index, ClusterView(cluster.cluster_index)
        )
        prefix = f"{_round_words(after)}, cluster {cluster.cluster_index}"
        lines += [f"{prefix}{line}" for line in _cluster_changes(cluster_before, cluster)]
    if after.evaluation is not None and after.evaluation != before.evaluation:
        lines.append(say_evaluation(after.evaluation))
    if after.round_index is None and before.round_index is not None:
        late = f" {late_words(after)}" if late_words(after) else ""
        evaluation = (
            f", of which {after.evaluation_seconds:.1f} s evaluated the model"
            if after.evaluation_seconds
            else ""
        )
        lines.append(
            f"{_round_words(before)} committed in {after.round_seconds or 0:.1f} s{evaluation}{late}"
        )
        if after.privacy_loss is not None:
            lines.append(say_privacy_loss(after.privacy_loss))
    return [indented(line) for line in lines]


def late_words(view: JobView) -> str:
    """Names the clusters that did not end the last round in time, or failed."""
    if view.late_clusters:
        plural = "s" if len(view.late_clusters) > 1 else ""
        return f"without cluster{plural} {', '.join(map(str, view.late_clusters))}"
    if view.ended_early:
        shares = [f"{done} of {most} steps of cluster {i}" for i, done, most in view.ended_early]
        return f"with {', '.join(shares)} (late)"
    return ""


def say_privacy_loss(loss: PrivacyLoss) -> str:
    """Writes what private updates have revealed as one line."""
    return f"privacy: epsilon {loss.epsilon:.3g} of the averages, {loss.update_epsilon:.3g} of single updates (delta {loss.delta:g})"


def say_evaluation(evaluation: Evaluation) -> str:
    """Writes an evaluation as one line."""
    metrics = [(evaluation.metric, evaluation.value), *sorted(evaluation.other_metrics.items())]
    values = ", ".join(f"{name} {value:.4f}" for name, value in metrics)
    rounds, rows = count(evaluation.num_rounds, "round"), count(evaluation.num_rows, "row")
    return f"{values} after {rounds} ({rows})"


def definition_lines(evaluation: Evaluation) -> list[str]:
    """Says in a line what each metric is, the main one first."""
    names = sorted(evaluation.definitions, key=lambda name: (name != evaluation.metric, name))
    return [f"  {name}: {evaluation.definitions[name]}" for name in names]


def say_one_answer(evaluation: Evaluation) -> str:
    """Warns of a model that always gives the same answer; "" for others."""
    if not evaluation.one_answer:
        return ""
    return "the model gives every row the same answer, and that is wrong for some of them"


def _without_failure(view: JobView) -> str:
    """Returns the message of the job without the reason of the last failure, which an incident tells once."""
    failure = view.trouble.failure if view.trouble is not None else ""
    return view.message.removesuffix(f": {failure}") if failure else view.message


def _round_words(view: JobView) -> str:
    return f"round {(view.round_index or 0) + 1}/{view.num_rounds}"


def _placement_lines(before: JobView, after: JobView) -> Iterable[str]:
    def placements(view: JobView) -> dict[int, str]:
        return {
            cluster.cluster_index: " | ".join(f"{s.host_id} {s.units}" for s in cluster.stages)
            for cluster in view.clusters
        }

    known = placements(before)
    for cluster_index, placement in placements(after).items():
        if placement != known.get(cluster_index):
            yield f"  cluster {cluster_index}: {placement}"


def _cluster_changes(before: ClusterView, after: ClusterView) -> Iterable[str]:
    if after.local_steps and after.steps_done > before.steps_done:
        quarter_before = 4 * before.steps_done // after.local_steps
        if 4 * after.steps_done // after.local_steps != quarter_before:
            loss = "" if after.loss is None else f", loss {after.loss:.4f}"
            yield (
                f": step {after.steps_done}/{after.local_steps}{loss}, "
                f"{after.samples_per_second:.1f} samples/s"
            )
    if before.stalled_reports < _STALLED_REPORTS == after.stalled_reports:
        verb = "stands still" if after.waiting_for.startswith("step ") else "waits"
        yield f" {verb}: {after.waiting_for}"
