"""Runs the rounds of a job on its present hosts: each round is a transaction (docs/architecture.md)."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from collapipe.database import NOT_STORED
from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    InfeasibleError,
    InvalidInputError,
    PeerFaultyError,
    PeerLostError,
    WrongStateError,
)
from collapipe.job import JobConfig
from collapipe.job_life import round_clusters
from collapipe.job_life.failing_clusters import FailingClusters, after_round
from collapipe.job_life.round_clusters import RoundClusters, RoundRules
from collapipe.rpc import ChannelPool
from collapipe.scheduler.catching_up import (
    can_catch_up,
    catch_up,
    committed_rounds,
)
from collapipe.scheduler.cluster_calls import ClusterCalls
from collapipe.scheduler.decisions import RoundDecision
from collapipe.scheduler.going_on import GoingOn, without_result
from collapipe.scheduler.held import Held
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_preparation import PreparedJob
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import RoundDocument
from collapipe.scheduler.kept_results import KeptResult, KeptResults, furthest_rounds
from collapipe.scheduler.masking_calls import MaskingCalls
from collapipe.scheduler.plan_change import say_change
from collapipe.scheduler.planner import Planner
from collapipe.scheduler.restore_points import becomes_candidate
from collapipe.scheduler.rollback import go_to_commit
from collapipe.scheduler.round_planning import RoundPlanning
from collapipe.scheduler.round_requests import RoundRequests
from collapipe.scheduler.unusual_changes import UnusualChanges
from collapipe.telemetry import metrics
from collapipe.telemetry.spans import SPANS
from collapipe.v1 import (
    control_unit_pb2,
    edge_server_pb2,
    edge_server_pb2_grpc,
    job_pb2,
    plan_pb2,
    scheduler_pb2,
    secure_aggregation_pb2,
)

logger = logging.getLogger(__name__)

_TRACK = "round"
"""The track of the phases of a round in a trace."""


class RoundRunner:
    """Runs rounds of one attempt at a job, from the restore point on.

    If clusters had ended the next round when the attempt before failed, only the others repeat rounds.

    Args:
        planner: Has the hosts that take part. Its owner may change them between two rounds.
        kept: What clusters have kept from the attempt before.
        failing: The clusters that have failed in this and in earlier attempts.
        decides_anew: Whether a repeated round may get other micro-batches, slices and codecs if no plan fits otherwise.
    """

    def __init__(
        self,
        progress: JobProgress,
        prepared: PreparedJob,
        planner: Planner,
        channels: ChannelPool,
        calls: HostCalls,
        kept: KeptResults | None = None,
        failing: Held[FailingClusters] | None = None,
        *,
        decides_anew: bool = True,
    ) -> None:
        self._progress = progress
        self._job = progress.job
        self._prepared = prepared
        self._planner = planner
        self._channels = channels
        self._calls = calls
        self._failing = failing or Held(FailingClusters())
        self._going_on = GoingOn(progress, planner, self._failing)
        self._decides_anew = decides_anew
        self._planning = RoundPlanning(progress, prepared, planner)
        self._unusual = UnusualChanges(progress)
        self._candidate_plans: list[plan_pb2.Plan | None] = []
        self._recover_result(prepared.commit)
        last = self._with_copied_candidate(prepared.commit)
        self._kept = (
            kept.usable(last, planner.hosts) if kept and can_catch_up(progress, last) else None
        )
        """The results of the next round that clusters have kept."""
        self._num_failures_before = self._kept.num_failures if self._kept else 0
        self._is_behind = self._kept is not None
        """Whether the other clusters have to repeat committed rounds alone."""
        self._clusters = ClusterCalls(progress, planner, channels, calls, self._kept, prepared)
        self._requests = RoundRequests(
            progress, prepared, planner, channels.security, last.restore_point
        )
        self.has_plan = True
        """Whether the last round that was begun got a plan."""
        self._is_trained = False
        """Whether only the evaluation of the last commit is missing."""
        self._commit = self._beginning(last)
        self._began_with = self._commit.num_rounds

    @property
    def num_rounds(self) -> int:
        """Number of committed rounds."""
        return self._commit.num_rounds

    @property
    def is_trained(self) -> bool:
        """Whether all rounds are committed, or no further one is allowed by `privacy.max_epsilon`."""
        return (
            self._is_trained
            or self.num_rounds >= self._job.training.rounds
            or not self._progress.document.privacy.allows_rounds(self._job, 1)
        )

    @property
    def _is_copied(self) -> bool:
        """Whether all clusters have copied the optimizer states of the candidate."""
        has_candidate = self._commit.HasField("candidate")
        return has_candidate and len(self._clusters.has_copy) == self._job.clusters

    def store_copied(self) -> None:
        """Stores whether the candidate is copied, for the next attempt, which another process of the scheduler may begin."""
        candidate, document = self._commit.candidate, self._progress.document
        copied = (candidate.attempt, candidate.num_rounds) if self._is_copied else None
        if copied not in (None, document.copied_candidate):
            document.copied_candidate = copied
            with suppress(*NOT_STORED):  # The next change of the job stores it, too.
                self._progress.save()

    @property
    def kept_results(self) -> KeptResults | None:
        """What the clusters that have ended the next round keep if this attempt fails."""
        return self._kept

    @property
    def state_holders(self) -> set[str]:
        """Ids of the hosts whose memory has units of the last commit."""
        return {
            stage.host_id for plan in self._requests.previous_plans if plan for stage in plan.stages
        }

    def _with_copied_candidate(self, last: plan_pb2.Commit) -> plan_pb2.Commit:
        """Returns the last commit. If all control units have copied its candidate, the candidate is the restore point."""
        document, candidate = self._progress.document, last.candidate
        document.num_rounds_reached = max(document.num_rounds_reached, last.num_rounds)
        if document.copied_candidate != (candidate.attempt, candidate.num_rounds):
            return last
        attempt = plan_pb2.Attempt(
            job_id=document.job_id, round_index=last.num_rounds - 1, attempt=last.attempt
        )
        return self._commit_round(attempt, [], candidate_copied=True).commit

    def _recover_result(self, last: plan_pb2.Commit) -> None:
        """Stores what the last commit has measured, if an earlier process or attempt did not learn of the commit."""
        jobs, job_id, round_index = self._progress.jobs, self._progress.job_id, last.num_rounds - 1
        try:
            if round_index < 0 or jobs.find_result(job_id, round_index) is not None:
                return
            recorded = jobs.find_round(job_id, round_index)
            if recorded is None or recorded.attempt != last.attempt or recorded.measured is None:
                return
            decision, measured = RoundDecision.from_json(recorded.decision), recorded.measured
            self._planner.take_over_round(decision, measured.summaries, measured.round_seconds)
        except (*NOT_STORED, InvalidInputError, LookupError, ValueError, ArithmeticError):
            # It is damaged, and no later round depends on it.
            logger.exception("job %s: the result of round %d is lost", job_id, last.num_rounds)
            return
        self._progress.round_committed(measured, last, self._planner.state())

    def _beginning(self, last: plan_pb2.Commit) -> plan_pb2.Commit:
        """Returns the commit from which this attempt goes on."""
        commit = plan_pb2.Commit()
        if self._kept is not None:
            commit.CopyFrom(last)
            commit.ClearField("candidate")
            for index, result in self._kept.results.items():
                self._requests.previous_plans[index] = result.message
            return commit
        commit.CopyFrom(self._requests.restore_point)
        # An attempt that failed while it repeated rounds has left the commit that it did not reach.
        furthest = furthest_rounds(last)
        repeated = furthest - commit.num_rounds
        account = self._progress.document.privacy
        # Repeated rounds count, too. If no other round may follow them, the furthest commit stays as it is.
        self._is_trained = furthest >= self._job.training.rounds or not account.allows_rounds(
            self._job, repeated + 1
        )
        if self._is_trained:
            if furthest > last.num_rounds:
                last = self._go_to(furthest)
            # Only the evaluation is missing, which needs no optimizer states.
            commit.CopyFrom(last)
            commit.ClearField("candidate")
            for unit in (unit for cluster in commit.clusters for unit in cluster.units):
                unit.optimizer_digest = ""
        elif repeated:
            self._progress.tell(
                scheduler_pb2.INCIDENT_CODE_ROUNDS_REPEATED,
                f"repeats {committed_rounds(repeated)}, because optimizer states were last copied after round "
                f"{commit.num_rounds}",
            )
        return commit

    def _go_to(self, num_rounds: int) -> plan_pb2.Commit:
        """Makes a kept commit the last one, and returns it."""
        document = self._progress.document
        request = edge_server_pb2.RollBackRequest(
            job_id=document.job_id, num_rounds=num_rounds, attempt=document.attempt
        )
        edge_server = self._planner.hosts.edge_server
        answer = go_to_commit(edge_server, request, self._channels, self._calls)
        document.stored_bytes = answer.stored_bytes
        self._progress.committed(answer.commit)
        return answer.commit

    def _catch_up(self) -> None:
        """Repeats the committed rounds with the clusters that kept no result; raises `CollapipeError` if that fails."""
        assert self._kept is not None
        differing = catch_up(
            self._progress,
            self._planner,
            self._calls,
            self._run_repeated,
            self._requests,
            self._commit,
            self._kept.results,
        )
        if differing:
            self._kept = None
            raise AttemptFailedError(
                f"cluster {differing[0]} has repeated its rounds, but has other optimizer states than before: its hosts compute "
                "differently, so all clusters repeat these rounds"
            )
        self._is_behind = False

    def _run_repeated(
        self, request: control_unit_pb2.RunRoundRequest
    ) -> control_unit_pb2.RoundPrepared:
        try:
            return self._clusters.run(request)
        except CollapipeError as error:
            is_its_own = not isinstance(error, CancelledError)
            if is_its_own and self._kept:
                # Once for each attempt, though several clusters may fail at the same time.
                self._kept.num_failures = self._num_failures_before + 1
            cluster = request.plan.cluster_index
            if is_its_own and self._going_on.has_no_patience(cluster, error):
                # If all clusters repeat the rounds, they can go on without this one.
                self._kept = None if self._job.may_leave_out_clusters else self._kept
            raise

    def run(self, local_steps: int, *, decides_anew: bool = True) -> None:
        """Plans, runs and commits one round. Without local steps, it only evaluates: it commits no round, but may move
        the restore point.

        Args:
            decides_anew: `False` if a repeated round must stay as it was, although this object might decide it anew.

        Raises:
            CollapipeError: The round failed. Either nothing was committed, or the whole round was.
            OSError: A document could not be stored.
        """
        started = time.monotonic()
        decides_anew = decides_anew and self._decides_anew
        if self._is_behind:
            try:
                self._catch_up()
            except InfeasibleError:
                # The next attempt may change the rounds, but then all clusters repeat them.
                if decides_anew:
                    self._kept = None
                raise
        round_ = self._begin(local_steps, started, decides_anew=decides_anew)
        # Masked results are of no use without all other clusters.
        keeps = local_steps > 0 and not self._job.averaging.secure
        try:
            with SPANS.span(_TRACK, "run"):
                prepared = self._calls.in_parallel(
                    lambda plan: self._run_or_reuse(round_, plan),
                    round_.document.plans,
                    meanwhile=lambda: self._meanwhile(round_),
                    ends_all=lambda error: self._ends_all(error) or not keeps,
                )
        except CollapipeError as error:
            if keeps:
                self._keep(round_)
            outcome = "cancelled" if isinstance(error, CancelledError) else "aborted"
            metrics.ROUND_SECONDS.labels(outcome).observe(time.monotonic() - started)
            raise
        self._kept = None
        if local_steps:
            changes = self._commit_with_whom_it_can(round_, prepared)
            self._unusual.look_at(round_.index, changes, round_.document.plans)
            self._learn(round_)
        elif self._is_copied:  # The last commit is repeated with the new restore point.
            self._commit_round(self._progress.attempt(round_.index - 1), [], candidate_copied=True)

    def _begin(self, local_steps: int, started: float, *, decides_anew: bool) -> "_Round":
        """Plans and publishes a round. What it may reveal of rows is counted, and its masks are agreed on."""
        round_index = self._commit.num_rounds
        attempt = self._progress.attempt(round_index)
        SPANS.begin_round(attempt.job_id, round_index, attempt.attempt)
        self.has_plan = False
        with SPANS.span(_TRACK, "plan"):
            earlier = self._kept.results if self._kept else {}
            document, decision = self._planning.decide(
                self._commit,
                earlier,
                evaluation_only=not local_steps,
                decides_anew=decides_anew,
            )
        self.has_plan = True
        is_decided = self._planning.is_repeated(round_index) or document.is_revealed
        recorded = document.late_clusters if is_decided else None
        # An evaluation waits for all clusters.
        late = Held(
            round_clusters.begin(
                round_rules(self._job),
                recorded if local_steps else [],
                failed=document.failed_clusters if local_steps else (),
                may_fail=not document.is_revealed,
            )
        )
        for index in self._failing.now.pausing(round_index):
            late.decide(round_clusters.fail, index)
        round_ = _Round(attempt, local_steps, started, document, decision, earlier, late)
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
        if document.total_samples:
            with SPANS.span(_TRACK, "exchange masking keys"):
                round_.masking = self._agree_on_masks(round_)
        if local_steps and self._job.privacy.is_on:
            self._progress.begin_private_round()
        return round_

    def _run_or_reuse(
        self, round_: "_Round", plan: plan_pb2.Plan
    ) -> control_unit_pb2.RoundPrepared:
        """Runs the part of one cluster, unless the cluster has kept its result from the attempt before."""
        index = plan.cluster_index
        if index in round_.earlier and round_.late.decide(round_clusters.end, index):
            result = round_.earlier[index].prepared
        else:
            result = self._run_cluster(round_, plan)
        round_.results[index] = result
        return result

    def _commit_with_whom_it_can(
        self, round_: "_Round", prepared: list[control_unit_pb2.RoundPrepared]
    ) -> Mapping[int, float]:
        """Commits a round without the clusters that are late, and without those because of which it cannot be committed.

        Returns how far each cluster has changed the weights.

        Raises:
            CollapipeError: It cannot be committed.
        """
        while True:
            for index in round_.late.now.failed:
                prepared[index] = without_result(self._commit.clusters[index], prepared[index])
            try:
                if round_.masking is not None:
                    _check_rows(prepared, round_.late.now.late, round_.document.total_samples)
                self._store_before_commit(round_, prepared)
                with SPANS.span(_TRACK, "commit"):
                    late = round_.late.now.late
                    present = [i for i in range(self._job.clusters) if i not in late]
                    answer = self._commit_round(
                        round_.attempt,
                        [cluster.state for cluster in prepared],
                        candidate_copied=self._is_copied,
                        is_candidate=self._makes_candidate(),
                        late_clusters=round_.document.late_clusters,
                        unmasking=None
                        if round_.masking is None
                        else round_.masking.reveal(present),
                    )
            except CollapipeError as error:
                if round_.document.is_revealed or not self._going_on.commits_without(
                    error, round_.late, round_.index
                ):
                    raise
            else:
                self._commit = answer.commit
                return answer.changes

    def _store_before_commit(
        self, round_: "_Round", prepared: Sequence[control_unit_pb2.RoundPrepared]
    ) -> None:
        """Stores with which clusters a round is committed, and what they have measured. A repeated round has the same clusters."""
        clusters = round_.late.now
        measured = scheduler_pb2.RoundCommitted(
            num_rounds=round_.index + 1,
            summaries=[cluster.summary for cluster in prepared],
            round_seconds=time.monotonic() - round_.started,
            late_clusters=sorted(clusters.late),
            privacy_loss=self._progress.document.privacy_loss,
        )
        result = {
            "late_clusters": sorted(clusters.late),
            "failed_clusters": sorted(clusters.failed),
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

    def _learn(self, round_: "_Round") -> None:
        """Takes over what a committed round has changed and measured, and stores it."""
        clusters, document = round_.late.now, round_.document
        for index, plan in enumerate(document.plans):
            if index in clusters.failed:
                self._requests.previous_plans[index] = None
            elif index not in clusters.late:
                self._requests.previous_plans[index] = plan
                self._failing.change(after_round, index, round_.index)
        self._requests.restore_point = self._commit.restore_point
        if self._commit.candidate.num_rounds == self._commit.num_rounds:
            self._candidate_plans = list(self._requests.previous_plans)
            self._clusters.has_copy = set(clusters.failed)
        measured = document.measured
        assert measured is not None
        measured.round_seconds = time.monotonic() - round_.started
        _export_phases(self._job, measured, {*document.late_clusters, *document.ended_early})
        ran = [
            round_.earlier[index].plan if index in round_.earlier else plan
            for index, plan in enumerate(round_.decision.plans)
        ]
        self._planner.round_committed(
            replace(round_.decision, plans=tuple(ran)),
            measured.summaries,
            measured.round_seconds,
            is_typical=not (document.late_clusters or document.ended_early or round_.earlier),
        )
        self._progress.round_committed(measured, self._commit, self._planner.state())

    def _agree_on_masks(self, round_: "_Round") -> MaskingCalls:
        """Returns the masks of the clusters that take part.

        Raises:
            AttemptFailedError: A cluster has failed. The next attempt begins without it, because control units make keys once in
                an attempt.
        """
        units = [c.control_unit.host_id for c in self._planner.hosts.clusters]
        try:
            return self._masking(round_)
        except PeerLostError as error:
            index = units.index(error.host_id)
            if self._going_on.without(index, error, round_.late, round_.index):
                raise AttemptFailedError(str(error)) from error
            raise

    def _masking(self, round_: "_Round") -> MaskingCalls:
        """Lets the clusters that are to run a round agree on masks."""
        late = round_.late.now.late
        indices = [plan.cluster_index for plan in round_.document.plans]
        return MaskingCalls(
            self._progress,
            self._planner,
            self._channels,
            self._calls,
            round_.attempt,
            [index for index in indices if index not in late],
            round_.document.total_samples,
        )

    def _ends_all(self, error: BaseException) -> bool:
        """Returns whether a failure of one cluster ends the round of the others at once. Otherwise they end their round first."""
        if isinstance(error, PeerLostError):
            refuses = isinstance(error, PeerFaultyError) and error.refuses
            return refuses or error.host_id == self._planner.hosts.edge_server.host_id
        return not isinstance(error, CollapipeError) or isinstance(error, CancelledError)

    def _keep(self, round_: "_Round") -> None:
        """Keeps the results of the clusters that have ended a round which failed."""
        hosts = self._planner.hosts
        if round_.late.now.failed:  # They could not catch up alone.
            self._kept = None
            return
        kept = KeptResults(
            last_commit=(self._commit.attempt, self._commit.num_rounds),
            edge_server=hosts.edge_server.incarnation,
            evaluations=self._clusters.evaluations,
            num_failures=self._num_failures_before + 1 if self._kept else 0,
        )
        for index, prepared in round_.results.items():
            if index in round_.earlier:
                kept.results[index] = round_.earlier[index]
            elif index not in round_.late.now.late:
                plan = round_.document.plans[index]
                ids = [stage.host_id for stage in plan.stages]
                incarnations = {host_id: hosts.by_id[host_id].incarnation for host_id in ids}
                kept.results[index] = KeptResult(
                    prepared, plan, round_.decision.plans[index], incarnations
                )
        self._kept = kept

    def _run_cluster(self, round_: "_Round", plan: plan_pb2.Plan) -> control_unit_pb2.RoundPrepared:
        """Runs the part of one cluster. A late cluster returns the state from which it began."""
        index, late = plan.cluster_index, round_.late
        unprepared = control_unit_pb2.RoundPrepared(state=self._commit.clusters[index])
        evaluates = self._evaluates(round_.local_steps)
        if index in late.now.late:
            if evaluates and index in late.now.failed:
                self._count_nothing(index)
            return unprepared
        commit = self._commit
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
        request.evaluate = evaluates
        if self._commit.HasField("candidate"):
            request.candidate.CopyFrom(self._commit.candidate.clusters[index])
            # A cluster that was always late has its optimizer states on the disks already.
            candidate_plan = self._candidate_plans[index]
            request.candidate_stages.extend(candidate_plan.stages if candidate_plan else ())
            request.wait_for_copy = not round_.local_steps or self._makes_candidate()

        def on_progress(progress: job_pb2.RoundProgress) -> None:
            if progress.training_began:
                late.change(round_clusters.train, time.monotonic())
            unprepared.summary.CopyFrom(job_pb2.RoundSummary(stages=progress.stages))

        try:
            prepared = self._clusters.run(request, on_progress)
        except CollapipeError as error:
            if index in late.now.late:
                return unprepared
            if not self._going_on.without(index, error, late, round_.index):
                raise
            if evaluates:
                self._count_nothing(index)
            return unprepared
        return prepared if late.decide(round_clusters.end, index) else unprepared

    def _count_nothing(self, index: int) -> None:
        """Lets the evaluation go on without a cluster that fails."""
        self._clusters.count(index, job_pb2.EvaluationSums(), self._commit.num_rounds)

    def _meanwhile(self, round_: "_Round") -> None:
        """Ends late clusters, and stores when the candidate is copied."""
        self.store_copied()
        round_.late.change(round_clusters.look, time.monotonic())
        if self._job.may_leave_out_clusters:
            self._clusters.stop(round_.late.now.to_end)
        else:
            self._clusters.end_training(round_.late.now.to_end, round_.attempt)

    def _commit_round(
        self,
        attempt: plan_pb2.Attempt,
        states: Sequence[plan_pb2.ClusterState],
        *,
        candidate_copied: bool,
        is_candidate: bool = False,
        late_clusters: Sequence[int] = (),
        unmasking: secure_aggregation_pb2.Unmasking | None = None,
    ) -> edge_server_pb2.CommitRoundResponse:
        edge_server = self._planner.hosts.edge_server
        request = edge_server_pb2.CommitRoundRequest(
            attempt=attempt,
            clusters=states,
            candidate_copied=candidate_copied,
            is_candidate=is_candidate,
            keep_commits=self._job.training.keep_commits,
            # The privacy account may end the job while it repeats rounds.
            keep_furthest=self._job.privacy.max_epsilon is not None,
            late_clusters=late_clusters,
            unmasking=unmasking,
        )
        channel = self._channels.channel(edge_server.address)
        stub = edge_server_pb2_grpc.EdgeServerServiceStub(channel)
        call = stub.CommitRound(request, wait_for_ready=True)
        answer = self._calls.last_answer(call, edge_server.host_id, "commit the round")
        self._progress.document.stored_bytes = answer.stored_bytes
        return answer

    def _evaluates(self, local_steps: int) -> bool:
        """Returns whether the round begins with an evaluation of the model that it starts from."""
        every = self._job.training.evaluate_every
        num_rounds = self._commit.num_rounds
        return not local_steps or bool(every and num_rounds and num_rounds % every == 0)

    def _makes_candidate(self) -> bool:
        """Returns whether the optimizer states of the next commit are to be copied."""
        return becomes_candidate(
            self._commit.num_rounds + 1,
            self._job.training.replicate_every,
            self._began_with,
            has_failed=self._progress.document.attempt > 0,
        )


@dataclass
class _Round:
    """One attempt at a round.

    Args:
        local_steps: Mini-batches of each cluster; 0 for an evaluation.
        started: When it began, as `time.monotonic` says.
        document: The record of the attempt.
        earlier: What clusters have kept from the attempt before, by their indices.
        late: The clusters without which it is committed.
        masking: `None` unless the changes of the clusters are masked.
        results: Those of the clusters that have ended, by their indices.
    """

    attempt: plan_pb2.Attempt
    local_steps: int
    started: float
    document: RoundDocument
    decision: RoundDecision
    earlier: Mapping[int, KeptResult]
    late: Held[RoundClusters]
    masking: MaskingCalls | None = None
    results: dict[int, control_unit_pb2.RoundPrepared] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """The round, from 0."""
        return self.attempt.round_index


def round_rules(job: JobConfig) -> RoundRules:
    """Returns what a job says about late clusters."""
    schedule = job.schedule
    return RoundRules(
        job.clusters,
        schedule.min_clusters,
        schedule.round_deadline_seconds if job.has_deadline else None,
        may_leave_out=job.may_leave_out_clusters,
        ends_early=schedule.late_clusters == "end_early",
    )


def _check_rows(
    prepared: Sequence[control_unit_pb2.RoundPrepared], late: Collection[int], total_samples: int
) -> None:
    """Refuses a masked round with more rows than it has room for, before anything is revealed; raises `WrongStateError`."""
    rows = {i: one.state.num_samples for i, one in enumerate(prepared) if i not in late}
    if sum(rows.values()) > total_samples:
        most = max(rows, key=rows.__getitem__)
        error = WrongStateError(
            f"the clusters have trained on {sum(rows.values())} rows, cluster {most} alone on {rows[most]}, but the limit of this round "
            f"is {total_samples}, twice the rows of all clusters before it: run the round again"
        )
        error.cluster_index = most
        raise error


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
