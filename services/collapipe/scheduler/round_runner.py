"""Runs the rounds of a job on its present hosts: each round is a transaction (docs/architecture.md).

What happens in a round is decided by `job_life.attempt`. This module does what was decided, and tells what came of it.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from collapipe.allocation import ClusterPlan
from collapipe.database import NOT_STORED
from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    PeerLostError,
    WrongStateError,
)
from collapipe.job import JobConfig
from collapipe.job_life import attempt_events as life
from collapipe.job_life.attempt import Phase, begin_attempt, step
from collapipe.job_life.attempt_events import Because
from collapipe.job_life.commits import Kept
from collapipe.job_life.failing_clusters import FailingClusters
from collapipe.job_life.failures import failure_of
from collapipe.job_life.tries import Failure, Kind
from collapipe.planning.decisions import RoundDecision
from collapipe.planning.plan_change import say_change
from collapipe.scheduler.attempt_facts import attempt_rules, committed, name_of
from collapipe.scheduler.attempt_tools import AttemptTools
from collapipe.scheduler.catching_up import catch_up, forget_moments
from collapipe.scheduler.cluster_calls import ClusterCalls
from collapipe.scheduler.evaluations import Evaluations
from collapipe.scheduler.job_commits import JobCommits
from collapipe.scheduler.job_documents import RoundDocument
from collapipe.scheduler.masking_calls import MaskingCalls
from collapipe.scheduler.round_planning import RoundPlanning
from collapipe.scheduler.round_requests import RoundRequests
from collapipe.scheduler.unusual_changes import UnusualChanges
from collapipe.telemetry import metrics
from collapipe.telemetry.spans import SPANS
from collapipe.v1 import (
    control_unit_pb2,
    job_pb2,
    plan_pb2,
    scheduler_pb2,
)

logger = logging.getLogger(__name__)

_TRACK = "round"
"""The track of the phases of a round in a trace."""
_TICK_SECONDS = 0.2


@dataclass(frozen=True)
class ClusterResult:
    """The result of one cluster: its weights are on the edge server, its optimizer states in the memory of its hosts.

    Args:
        message: The plan by which the cluster ran its round.
        plan: The same plan, as the planner knows it.
    """

    prepared: control_unit_pb2.RoundPrepared
    message: plan_pb2.Plan
    plan: ClusterPlan


@dataclass(frozen=True)
class Reusable:
    """What the next attempt can use of one that failed.

    Args:
        results: Those of the clusters that have ended the round which failed, by their indices.
        evaluations: What clusters have counted at the beginning of that round.
    """

    kept: Kept | None
    results: Mapping[int, ClusterResult]
    evaluations: Evaluations


@dataclass
class _Round:
    """A round, as one attempt runs it.

    Args:
        local_steps: Mini-batches of each cluster; 0 for an evaluation.
        started: When it began, as `time.monotonic` says.
        document: The record of the attempt.
        masking: `None` unless the changes of the clusters are masked.
        kept: The clusters that have run this round in the attempt before.
        stages: What the stages of each cluster have told last.
        errors: Those with which clusters have failed.
        changes: How far each cluster has changed the weights.
    """

    attempt: plan_pb2.Attempt
    local_steps: int
    started: float
    document: RoundDocument
    decision: RoundDecision
    kept: Collection[int]
    masking: MaskingCalls | None = None
    stages: dict[int, job_pb2.RoundSummary] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    changes: Mapping[int, float] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """The round, from 0."""
        return self.attempt.round_index


class RoundRunner:
    """Runs the rounds of one attempt at a job, from the commit that `where_to_begin` chooses.

    Clusters with kept results repeat nothing.

    Args:
        before: What this attempt can use of the one before.
        failing: The clusters that have failed in earlier attempts.
    """

    def __init__(
        self,
        tools: AttemptTools,
        before: Reusable | None = None,
        failing: FailingClusters | None = None,
    ) -> None:
        self._tools = tools
        self._job = tools.job
        self._progress = progress = tools.progress
        self._planner = tools.planner
        self._calls = tools.calls
        self._planning = RoundPlanning(tools)
        self._unusual = UnusualChanges(progress)
        self._candidate_plans: list[plan_pb2.Plan | None] = []
        self._events: SimpleQueue[life.Event] = SimpleQueue()
        self._error: BaseException | None = None
        """Why the last phase of a round has failed."""
        self._work: list[Future[None]] = []
        """What runs the clusters of the present round."""
        self._round: _Round | None = None
        self.has_repeated = False
        """Whether clusters have repeated rounds. A control unit runs each round of an attempt once."""
        self._local_steps = 0
        self._started = self._run_began = self._next_tick = 0.0
        self._commits = JobCommits(tools)
        self._commits.recover_result(tools.prepared.commit)
        last = self._commits.with_copied_candidate(tools.prepared.commit)
        beginning = self._commits.where_to_begin(last, before.kept if before else None)
        usable = before if before and beginning.kept else None
        self._results = _of_clusters(usable.results, beginning.kept) if usable else {}
        """What clusters have kept from the attempt before, and what they have ended in this round, by their indices."""
        self._evaluations = (
            usable.evaluations if usable else Evaluations(self._job.task.kind, self._job.clusters)
        )
        self._clusters = ClusterCalls(tools, self._evaluations)
        self._requests = RoundRequests(tools, last.restore_point)
        for index, result in self._results.items():
            assert beginning.kept is not None
            self._requests.remember(result.message, beginning.kept.processes[index])
        self._commit = self._commits.go_to(last, beginning)
        self._is_trained = beginning.is_trained
        """Whether only the evaluation of the last commit is missing."""
        self.state = begin_attempt(
            attempt_rules(self._job, tools.hosts.edge_server, progress.document.attempt),
            name_of(self._commit),
            failing or FailingClusters(),
            beginning.kept,
        )

    @property
    def num_rounds(self) -> int:
        """Number of committed rounds."""
        return self.state.num_rounds

    @property
    def is_trained(self) -> bool:
        """Whether all rounds are committed, or no further one is allowed by `privacy.max_epsilon`."""
        return (
            self._is_trained
            or self.num_rounds >= self._job.training.rounds
            or not self._progress.document.privacy.allows_rounds(self._job, 1)
        )

    @property
    def for_next_attempt(self) -> Reusable:
        """What the next attempt can use if this one fails."""
        kept = self.state.kept
        return Reusable(kept, _of_clusters(self._results, kept), self._evaluations)

    @property
    def state_holders(self) -> dict[str, str]:
        """The processes whose memory has units of the last commit, by host id."""
        return self._requests.state_holders

    def store_copied(self) -> None:
        """Stores whether the candidate is copied, for the next attempt, which another process of the scheduler may begin."""
        document = self._progress.document
        if self.state.is_copied and self.state.candidate != document.copied_candidate:
            document.copied_candidate = self.state.candidate
            with suppress(*NOT_STORED):  # The next change of the job stores it, too.
                self._progress.save()

    def run(self, local_steps: int, *, decides_anew: bool = True) -> None:
        """Plans, runs and commits one round. Without local steps, it only evaluates: it commits no round, but may move
        the restore point.

        Args:
            decides_anew: Whether a repeated round may get other micro-batches, slices and codecs if no plan fits otherwise.

        Raises:
            CollapipeError: The round failed. Either nothing was committed, or the whole round was.
            OSError: A document could not be stored.
        """
        self._local_steps, self._started = local_steps, time.monotonic()
        self._events = SimpleQueue()
        self._events.put(life.RoundWanted(local_steps > 0, decides_anew))
        is_done = False
        try:
            while not is_done:
                self.state, actions = step(self.state, self._next_event(), time.monotonic())
                for action in actions:
                    self._do(action)
                    is_done = isinstance(action, life.Done)
        finally:
            if self._work:  # Something unexpected was raised while clusters were running.
                self._calls.end_all()
                self._join()
        if local_steps:
            self._learn()

    def _next_event(self) -> life.Event:
        """Returns the next event. While clusters run, `Ticked` comes several times a second."""
        if self.state.phase is not Phase.RUNNING:
            return self._events.get_nowait()  # What was done last has put it there.
        left = max(self._next_tick - time.monotonic(), 0.0)
        with suppress(Empty):  # A cluster that finished in time must not become late by this tick.
            return self._events.get(timeout=left)
        self._next_tick = time.monotonic() + _TICK_SECONDS
        self._calls.call_meanwhile()
        self.store_copied()
        return life.Ticked()

    def _do(self, action: life.Action) -> None:
        """Does what was decided. Puts the answer into the queue of events, if there is one.

        Raises:
            CollapipeError: The round fails.
            OSError: A document could not be stored.
        """
        match action:
            case life.CatchUp():
                self._ask(lambda: self._catch_up(action))
            case life.Plan():
                self._ask(lambda: self._plan(action))
            case life.AgreeOnMasks():
                self._ask(lambda: self._agree_on_masks(action))
            case life.SpendPrivacy():
                self._progress.begin_private_round()
            case life.Run():
                self._run_clusters(action.clusters)
            case life.EndTraining():
                self._clusters.end_training(sorted(action.clusters), self._now.attempt)
            case life.CancelCalls():
                self._clusters.stop(sorted(action.clusters))
            case life.CancelAll():
                self._calls.end_all()
            case life.CountNoRows():
                counted = job_pb2.EvaluationSums()
                self._clusters.count(action.cluster, counted, self.state.num_rounds)
            case life.ReportLeftOut():
                self._tell_left_out(action)
            case life.Commit():
                self._join()
                self._ask(lambda: self._commit_clusters(action))
            case life.MoveRestorePoint():
                self._join()
                self._ask(self._move_restore_point)
            case life.Done():
                self._join()
            case life.Fail():
                self._join()
                raise self._why(action)

    def _ask(self, work: Callable[[], life.Event]) -> None:
        """Does the work of a phase, and puts its answer or its failure into the queue of events."""
        try:
            answer = work()
        except CollapipeError as error:
            self._error = error
            answer = life.Failed(failure_of(error), self._cluster_of(error))
        self._events.put(answer)

    def _cluster_of(self, error: CollapipeError) -> int | None:
        """Returns the cluster because of which a phase has failed; `None` if it is none."""
        units = [cluster.control_unit.host_id for cluster in self._tools.hosts.clusters]
        if self.state.phase is Phase.MASKING:
            host_id = error.host_id if isinstance(error, PeerLostError) else ""
            return units.index(host_id) if host_id in units else None
        return error.cluster_index if error.cluster_index in range(len(units)) else None

    @property
    def _now(self) -> _Round:
        assert self._round is not None
        return self._round

    def _join(self) -> None:
        """Waits until no cluster runs any more."""
        wait(self._work)
        if self._work:
            SPANS.record(_TRACK, "run", self._run_began)
        self._work = []

    def _why(self, fail: life.Fail) -> BaseException:
        """Returns the error with which a round fails; raises `CancelledError` if the job was cancelled meanwhile."""
        match fail.because:
            case Because.CLUSTER_FAILED:
                assert fail.cluster is not None
                error = self._now.errors[fail.cluster]
                is_ended = self._calls.is_cancelled or isinstance(error, CancelledError)
                outcome = "cancelled" if is_ended else "aborted"
                seconds = time.monotonic() - self._now.started
                metrics.ROUND_SECONDS.labels(outcome).observe(seconds)
                self._calls.sleep(0)
                return error
            case Because.TOO_MANY_ROWS:
                assert fail.cluster is not None
                return self._too_many_rows(fail.cluster, fail.num_rows)
            case Because.DIFFERS:
                return AttemptFailedError(
                    f"cluster {fail.cluster} has repeated its rounds, but has other optimizer states than before: its hosts compute "
                    "differently, so all clusters repeat these rounds"
                )
            case Because.NEEDS_NEW_MASKS | Because.CANNOT_REPEAT:
                # The next attempt does without what has failed.
                error = AttemptFailedError(str(self._error))
                error.__cause__ = self._error
                return error
        assert self._error is not None
        return self._error

    def _too_many_rows(self, cluster: int, num_rows: int) -> WrongStateError:
        state = self.state
        error = WrongStateError(
            f"cluster {cluster} has trained on {state.samples[cluster]} rows, and all clusters on {num_rows}. The limit of this round "
            f"is {state.total_samples}, twice their rows before it: run the round again"
        )
        error.prepared_by = self._tools.control_unit(cluster).host_id
        return error

    def _tell_left_out(self, action: life.ReportLeftOut) -> None:
        cluster, error = action.cluster, self._error
        match action.because:
            case Because.CLUSTER_FAILED:
                error = self._now.errors.get(cluster, error)
            case Because.TOO_MANY_ROWS:
                error = self._too_many_rows(cluster, action.num_rows)
        self._progress.tell(
            scheduler_pb2.INCIDENT_CODE_HOST_LEFT_OUT,
            f"round {self.state.num_rounds + 1} goes on without cluster {cluster}, which is tried again in round {action.again + 1}: "
            f"{error}",
            self._tools.control_unit(cluster).host_id,
        )

    def _catch_up(self, action: life.CatchUp) -> life.Event:
        """Repeats the committed rounds with the clusters that kept no result."""
        differing = catch_up(
            self._tools,
            self._run_repeated,
            self._requests,
            self._commit,
            action.clusters,
        )
        return life.CaughtUp(tuple(differing))

    def _run_repeated(
        self, request: control_unit_pb2.RunRoundRequest
    ) -> control_unit_pb2.RoundPrepared:
        self.has_repeated = True
        try:
            return self._clusters.run(request)
        except CollapipeError as error:
            failed = life.ClusterFailed(request.plan.cluster_index, failure_of(error))
            self._events.put(failed)
            raise

    def _plan(self, action: life.Plan) -> life.Event:
        """Plans and publishes a round."""
        round_index, local_steps = self._commit.num_rounds, self._local_steps
        attempt = self._progress.attempt(round_index)
        SPANS.begin_round(attempt.job_id, round_index, attempt.attempt)
        self._results = {index: self._results[index] for index in sorted(action.kept)}
        with SPANS.span(_TRACK, "plan"):
            document, decision = self._planning.decide(
                self._commit,
                {index: result.message for index, result in self._results.items()},
                evaluation_only=not local_steps,
                decides_anew=action.decides_anew,
            )
        self._round = _Round(attempt, local_steps, self._started, document, decision, action.kept)
        if local_steps:
            self._planner.round_started(decision)
            self._progress.publish(
                round_started=scheduler_pb2.RoundStarted(
                    round_index=round_index,
                    attempt=attempt.attempt,
                    plans=document.plans,
                    change=say_change(decision),
                )
            )
        hosts, kept = self._tools.hosts.by_id, self.state.kept
        processes = dict(kept.processes) if kept else {}  # Their hosts may take no part any more.
        for plan in document.plans:
            if plan.cluster_index not in processes:
                stages = {stage.host_id: hosts[stage.host_id].incarnation for stage in plan.stages}
                processes[plan.cluster_index] = stages
        return life.Planned(
            processes,
            is_decided=self._planning.is_repeated(round_index) or document.is_revealed,
            left_out=frozenset(document.late_clusters),
            failed=frozenset(document.failed_clusters),
            is_revealed=document.is_revealed,
            total_samples=document.total_samples,
        )

    def _agree_on_masks(self, action: life.AgreeOnMasks) -> life.Event:
        round_ = self._now
        with SPANS.span(_TRACK, "exchange masking keys"):
            round_.masking = MaskingCalls(
                self._tools,
                round_.attempt,
                sorted(action.clusters),
                round_.document.total_samples,
            )
        return life.Masked()

    def _run_clusters(self, clusters: Collection[int]) -> None:
        """Begins the work of clusters, which put what happens into the queue of events."""
        plans = [plan for plan in self._now.document.plans if plan.cluster_index in clusters]
        self._run_began = time.perf_counter()
        executor = ThreadPoolExecutor(len(plans), "cluster")
        try:
            for plan in plans:
                self._work.append(executor.submit(self._run_and_tell, plan))
        except RuntimeError as error:  # The system has no more threads or memory.
            raise AttemptFailedError(
                f"the scheduler cannot start a thread for each of {len(plans)} clusters ({error}): raise its limit of threads, or its memory"
            ) from error
        finally:
            executor.shutdown(wait=False)

    def _run_and_tell(self, plan: plan_pb2.Plan) -> None:
        index, round_ = plan.cluster_index, self._now
        try:
            prepared = self._run_cluster(plan)
            result = ClusterResult(prepared, plan, round_.decision.plans[index])
            self._results[index] = result
            if prepared.candidate_copied:
                self._events.put(life.Copied(index))
            self._events.put(life.ClusterFinished(index, prepared.state.num_samples))
        except CollapipeError as error:
            round_.errors[index] = error
            self._events.put(life.ClusterFailed(index, failure_of(error)))
        except BaseException as error:  # It is not the fault of the cluster.
            logger.exception("job %s: the work for cluster %d failed", self._progress.job_id, index)
            round_.errors[index] = error
            self._events.put(life.ClusterFailed(index, Failure(Kind.BUG)))

    def _run_cluster(self, plan: plan_pb2.Plan) -> control_unit_pb2.RoundPrepared:
        """Runs the part of one cluster."""
        index, round_, told = plan.cluster_index, self._now, set[type]()

        def tell(event: life.TrainingBegan | life.Copied) -> None:
            if type(event) not in told:
                told.add(type(event))
                self._events.put(event)

        def on_progress(progress: job_pb2.RoundProgress) -> None:
            if progress.training_began:
                tell(life.TrainingBegan(index))
            if progress.candidate_copied:
                tell(life.Copied(index))
            round_.stages[index] = job_pb2.RoundSummary(stages=progress.stages)

        return self._clusters.run(self._request(plan), on_progress)

    def _request(self, plan: plan_pb2.Plan) -> control_unit_pb2.RunRoundRequest:
        """Returns the request that lets a cluster run its part."""
        index, round_, commit = plan.cluster_index, self._now, self._commit
        request = self._requests.make(
            plan,
            round_.decision,
            round_.index,
            commit.clusters[index],
            round_.document,
            commit.anew_since,
        )
        if not round_.local_steps:
            request.local_steps = 0
        if round_.masking is not None:
            request.masked.CopyFrom(round_.masking.masked_round(index))
        request.evaluate = self.state.evaluates
        if commit.HasField("candidate"):
            request.candidate.CopyFrom(commit.candidate.clusters[index])
            # A cluster that was always late has its optimizer states on the disks already.
            candidate_plan = self._candidate_plans[index]
            request.candidate_stages.extend(candidate_plan.stages if candidate_plan else ())
            request.wait_for_copy = not round_.local_steps or self.state.makes_candidate
        return request

    def _commit_clusters(self, action: life.Commit) -> life.Event:
        """Commits what the clusters have prepared."""
        round_, present = self._now, sorted(self.state.present)
        prepared = [self._prepared_by(index) for index in range(self._job.clusters)]
        self._store_before_commit(action, prepared)
        with SPANS.span(_TRACK, "commit"):
            try:
                answer = self._commits.commit_round(
                    round_.attempt,
                    [cluster.state for cluster in prepared],
                    candidate_copied=action.candidate_copied,
                    is_candidate=action.is_candidate,
                    late_clusters=sorted(action.left_out),
                    unmasking=round_.masking.reveal(present) if round_.masking else None,
                )
            except CollapipeError as error:
                if error.cluster_index in present:
                    error.prepared_by = self._tools.control_unit(error.cluster_index).host_id
                raise
        self._commit, round_.changes = answer.commit, answer.changes
        return committed(answer.commit)

    def _prepared_by(self, cluster: int) -> control_unit_pb2.RoundPrepared:
        """Returns what a commit has of a cluster. A late one keeps the state from which it began, and a failed one that without optimizer
        states."""
        clusters = self.state.clusters
        if cluster in clusters.ended and cluster not in clusters.failed:
            return self._results[cluster].prepared
        measured = self._now.stages.get(cluster)
        if cluster in clusters.ended:
            stages = self._results[cluster].prepared.summary.stages
            measured = job_pb2.RoundSummary(stages=stages)
        unprepared = control_unit_pb2.RoundPrepared(
            state=self._commit.clusters[cluster], summary=measured
        )
        if cluster in clusters.failed:
            forget_moments(unprepared.state)
        return unprepared

    def _move_restore_point(self) -> life.Event:
        attempt = self._progress.attempt(self._now.index - 1)
        commit = self._commits.commit_round(attempt, [], candidate_copied=True).commit
        self._progress.committed(commit)
        return committed(commit)

    def _store_before_commit(
        self, action: life.Commit, prepared: Sequence[control_unit_pb2.RoundPrepared]
    ) -> None:
        """Stores with which clusters a round is committed, and what they have measured, for the case that it is repeated."""
        round_ = self._now
        measured = scheduler_pb2.RoundCommitted(
            num_rounds=round_.index + 1,
            summaries=[cluster.summary for cluster in prepared],
            round_seconds=time.monotonic() - round_.started,
            late_clusters=sorted(action.left_out),
            privacy_loss=self._progress.document.privacy_loss,
        )
        result = {
            "late_clusters": sorted(action.left_out),
            "failed_clusters": sorted(action.failed),
            "ended_early": {
                index: cluster.summary.local_steps
                for index, cluster in enumerate(prepared)
                if 0 < cluster.summary.local_steps < round_.local_steps
            },
            "is_revealed": round_.masking is not None,
            "measured": measured,
        }
        round_.document = round_.document.model_copy(update=result)
        self._progress.jobs.save_round(round_.attempt.job_id, round_.index, round_.document)

    def _learn(self) -> None:
        """Takes over what a committed round has changed and measured, and stores it."""
        round_, document, clusters = self._now, self._now.document, self.state.clusters
        self._unusual.look_at(round_.index, round_.changes, document.plans)
        for index, plan in enumerate(document.plans):
            if index in clusters.failed:
                self._requests.forget(index)
            elif index not in clusters.late:
                self._requests.remember(plan, self.state.processes[index])
        self._requests.restore_point = self._commit.restore_point
        if self._commit.candidate.num_rounds == self._commit.num_rounds:
            self._candidate_plans = list(self._requests.previous_plans)
        measured = document.measured
        assert measured is not None
        measured.round_seconds = time.monotonic() - round_.started
        _export_phases(self._job, measured, {*document.late_clusters, *document.ended_early})
        ran = [
            self._results[index].plan if index in round_.kept else plan
            for index, plan in enumerate(round_.decision.plans)
        ]
        self._planner.round_committed(
            replace(round_.decision, plans=tuple(ran)),
            measured.summaries,
            measured.round_seconds,
            is_typical=not (document.late_clusters or document.ended_early or round_.kept),
        )
        self._progress.round_committed(measured, self._commit, self._planner.state())


def _of_clusters(
    results: Mapping[int, ClusterResult], kept: Kept | None
) -> dict[int, ClusterResult]:
    return {index: results[index] for index in kept.processes} if kept else {}


def _export_phases(
    job: JobConfig, measured: scheduler_pb2.RoundCommitted, late_clusters: Collection[int]
) -> None:
    metrics.ROUND_SECONDS.labels("committed").observe(measured.round_seconds)
    for index, summary in enumerate(measured.summaries):
        cluster = str(job.host_clusters[index])
        # The series exists from the first round on, so that Prometheus sees it grow.
        late_rounds = metrics.LATE_ROUNDS.labels(cluster)
        if index in late_clusters:
            late_rounds.inc()
        if not summary.local_steps:  # It was left out.
            continue
        for phase, phase_seconds in (
            ("configure", summary.configure_seconds),
            ("train", summary.training_seconds),
            ("gather", summary.gather_seconds),
            ("evaluate", summary.evaluation_seconds),
        ):
            metrics.ROUND_PHASE_SECONDS.labels(cluster, phase).set(phase_seconds)
