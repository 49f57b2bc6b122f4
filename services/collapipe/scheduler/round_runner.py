"""Runs the rounds of a job on its present hosts: each round is a transaction (docs/architecture.md)."""

import time
from collections.abc import Sequence
from typing import Any

from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    InfeasibleError,
)
from collapipe.job import JobConfig
from collapipe.rpc import ChannelPool
from collapipe.scheduler.decisions import RoundDecision
from collapipe.scheduler.evaluations import Evaluations
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_preparation import PreparedJob
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import RoundDocument
from collapipe.scheduler.late_clusters import LateClusters
from collapipe.scheduler.planner import Planner
from collapipe.telemetry import metrics
from collapipe.telemetry.spans import SPANS
from collapipe.v1 import (
    control_unit_pb2,
    control_unit_pb2_grpc,
    edge_server_pb2,
    edge_server_pb2_grpc,
    job_pb2,
    plan_pb2,
    scheduler_pb2,
)

_TRACK = "round"
"""The track of the phases of a round in a trace."""


class RoundRunner:
    """Runs rounds of one attempt at a job, from the restore point on.

    Args:
        planner: Has the hosts that take part. Its owner may change them between two rounds.
        copied_candidate: Number of committed rounds of the candidate whose optimizer states all control units had on
            their disks in an earlier attempt.
        decides_anew: Whether a repeated round may get other micro-batches, slices and codecs if no plan fits otherwise.
    """

    def __init__(
        self,
        progress: JobProgress,
        prepared: PreparedJob,
        planner: Planner,
        channels: ChannelPool,
        calls: HostCalls,
        copied_candidate: int | None = None,
        *,
        decides_anew: bool = True,
    ) -> None:
        self._progress = progress
        self._job = progress.job
        self._prepared = prepared
        self._planner = planner
        self._channels = channels
        self._calls = calls
        self._decides_anew = decides_anew
        self._evaluations = Evaluations(self._job.task.kind, self._job.clusters)
        self._previous_plans: list[plan_pb2.Plan | None] = [None] * self._job.clusters
        """The plan of the last round of each cluster for which it was not late: these hosts have its optimizer states."""
        self._candidate_plans: list[plan_pb2.Plan | None] = []
        self._round_calls: dict[int, Any] = {}
        """The call of each cluster in the present round, by its index."""
        self._has_copy: set[int] = set()
        """Indices of the clusters whose control units have the optimizer states of the present candidate."""
        self._begin_at(prepared.commit, copied_candidate)

    @property
    def num_rounds(self) -> int:
        """Number of committed rounds."""
        return self._commit.num_rounds

    @property
    def copied_candidate(self) -> int | None:
        """Number of committed rounds of the candidate, if all clusters have copied its optimizer states."""
        if self._commit.HasField("candidate") and len(self._has_copy) == self._job.clusters:
            return self._commit.candidate.num_rounds
        return None

    @property
    def state_holders(self) -> set[str]:
        """Ids of the hosts whose memory has units of the last commit."""
        return {stage.host_id for plan in self._previous_plans if plan for stage in plan.stages}

    def _begin_at(self, last: plan_pb2.Commit, copied_candidate: int | None) -> None:
        """Chooses the commit from which this attempt continues, given the last commit.

        If all control units have copied the candidate, it becomes the restore point first.
        """
        document = self._progress.document
        document.num_rounds_reached = max(document.num_rounds_reached, last.num_rounds)
        if last.HasField("candidate") and last.candidate.num_rounds == copied_candidate:
            last = self._commit_round(
                plan_pb2.Attempt(
                    job_id=document.job_id, round_index=last.num_rounds - 1, attempt=last.attempt
                ),
                [],
                candidate_copied=True,
            )
        self._restore_point = last.restore_point
        self._commit = plan_pb2.Commit()
        self._commit.CopyFrom(self._restore_point)
        if last.num_rounds >= self._job.training.rounds:
            # Only the evaluation is missing, which needs no optimizer states.
            self._commit.CopyFrom(last)
            self._commit.ClearField("candidate")
            for unit in (unit for cluster in self._commit.clusters for unit in cluster.units):
                unit.optimizer_digest = ""
        repeated = last.num_rounds - self._commit.num_rounds
        if repeated:
            self._progress.tell(
                scheduler_pb2.INCIDENT_CODE_ROUNDS_REPEATED,
                f"repeats {repeated} committed round{'' if repeated == 1 else 's'}, because optimizer states were last copied after round "
                f"{self._commit.num_rounds}",
            )

    def run(self, local_steps: int) -> None:
        """Plans, runs and commits one round. Without local steps, it only evaluates: it commits no round, but may move
        the restore point.

        Raises:
            CollapipeError: The round failed. Either nothing was committed, or the whole round was.
            OSError: A document could not be stored.
        """
        started = time.monotonic()
        round_index = self._commit.num_rounds
        attempt = self._progress.attempt(round_index)
        SPANS.begin_round(attempt.job_id, round_index, attempt.attempt)
        with SPANS.span(_TRACK, "plan"):
            document, decision = self._plan(round_index, evaluation_only=not local_steps)
        plans = document.plans
        recorded = document.late_clusters if self._is_repeated(round_index) else None
        # An evaluation waits for all clusters.
        late = LateClusters(self._job, recorded if local_steps else [])
        if local_steps:
            self._planner.round_started(decision)
            self._progress.publish(
                round_started=scheduler_pb2.RoundStarted(
                    round_index=round_index, attempt=attempt.attempt, plans=plans
                )
            )
        try:
            with SPANS.span(_TRACK, "run"):
                prepared = self._calls.in_parallel(
                    lambda plan: self._run_cluster(plan, local_steps, document.total_steps, late),
                    plans,
                    meanwhile=lambda: self._stop_calls(late.decide()),
                )
        except CollapipeError as error:
            outcome = "cancelled" if isinstance(error, CancelledError) else "aborted"
            metrics.ROUND_SECONDS.labels(outcome).observe(time.monotonic() - started)
            raise
        for plan in plans:
            if plan.cluster_index not in late.late:
                self._previous_plans[plan.cluster_index] = plan
        copied = self.copied_candidate is not None
        if not local_steps:
            if copied:  # The last commit is repeated with the new restore point.
                last = self._progress.attempt(round_index - 1)
                self._commit_round(last, [], candidate_copied=True)
            return
        late_clusters = sorted(late.late)
        if late_clusters != document.late_clusters:
            document.late_clusters = late_clusters
            self._progress.jobs.save_round(attempt.job_id, round_index, document)
        with SPANS.span(_TRACK, "commit"):
            self._commit = self._commit_round(
                attempt,
                [cluster.state for cluster in prepared],
                candidate_copied=copied,
                is_candidate=self._makes_candidate(),
                late_clusters=late_clusters,
            )
        self._restore_point = self._commit.restore_point
        if self._commit.candidate.num_rounds == self._commit.num_rounds:
            self._candidate_plans = list(self._previous_plans)
            self._has_copy = set()
        summaries = [cluster.summary for cluster in prepared]
        seconds = time.monotonic() - started
        _export_phases(self._job, summaries, seconds, late_clusters)
        self._planner.round_committed(decision, summaries, seconds, has_late=bool(late_clusters))
        self._progress.jobs.save_planner_state(attempt.job_id, self._planner.state())
        self._progress.committed(self._commit)
        self._progress.publish(
            round_committed=scheduler_pb2.RoundCommitted(
                num_rounds=self._commit.num_rounds,
                summaries=summaries,
                round_seconds=seconds,
                late_clusters=late_clusters,
            )
        )

    def _plan(
        self, round_index: int, *, evaluation_only: bool
    ) -> tuple[RoundDocument, RoundDecision]:
        """Decides and records a round. A repeated round keeps its recorded late clusters, and also its micro-batches, slices
        and upload codecs, if a plan with them fits the hosts. Attempts before the last return to a commit without optimizer
        states do not count."""
        job_id, jobs = self._progress.job_id, self._progress.jobs
        earlier = jobs.find_round(job_id, round_index)
        if earlier is not None and earlier.attempt < self._commit.anew_since:
            earlier = None
        repeated = earlier if self._is_repeated(round_index) else None
        try:
            plans, decision = self._planner.decide(
                round_index, earlier.plans if earlier else (), evaluation_only=evaluation_only
            )
        except InfeasibleError as error:
            if earlier is None or not self._decides_anew:
                raise
            self._progress.tell(
                scheduler_pb2.INCIDENT_CODE_PLAN_CHANGED,
                f"round {round_index + 1} cannot be repeated as it was, and is decided anew: {error}",
            )
            plans, decision = self._planner.decide(round_index, (), evaluation_only=evaluation_only)
        document = RoundDocument(
            attempt=self._progress.document.attempt,
            plans=plans,
            decision=decision.to_json(),
            total_steps=repeated.total_steps if repeated else self._job.total_steps,
            late_clusters=repeated.late_clusters if repeated else [],
        )
        jobs.save_round(job_id, round_index, document)
        return document, decision

    def _is_repeated(self, round_index: int) -> bool:
        """Returns whether an earlier attempt has committed a round."""
        return round_index < self._progress.document.num_rounds_reached

    def _stop_calls(self, late: frozenset[int]) -> None:
        """Ends the calls of late clusters, as far as they have begun."""
        for index in late:
            if (call := self._round_calls.get(index)) is not None:
                call.cancel()

    def _run_cluster(
        self, plan: plan_pb2.Plan, local_steps: int, total_steps: int, late: LateClusters
    ) -> control_unit_pb2.RoundPrepared:
        """Runs the part of one cluster. A late cluster returns the state from which it began."""
        index = plan.cluster_index
        unprepared = control_unit_pb2.RoundPrepared(state=self._commit.clusters[index])
        if index in late.late:
            return unprepared
        hosts = self._planner.hosts
        control_unit, edge_server = hosts.clusters[index].control_unit, hosts.edge_server
        previous = self._previous_plans[index]
        request = control_unit_pb2.RunRoundRequest(
            attempt=self._progress.attempt(self._commit.num_rounds, plan.plan_id),
            job=self._progress.spec,
            model=self._prepared.model,
            plan=plan,
            base=self._commit.clusters[index],
            labels=self._progress.document.labels,
            local_steps=local_steps,
            evaluate=self._evaluates(local_steps),
            previous_stages=previous.stages if previous else (),
            edge_address=edge_server.address,
            edge_host_id=edge_server.host_id,
            vocabulary=self._prepared.vocabulary,
            restore_point=self._restore_point.clusters[index],
            restore_num_rounds=self._restore_point.num_rounds,
            total_steps=total_steps,
            anew_since=self._commit.anew_since,
        )
        if self._commit.HasField("candidate"):
            request.candidate.CopyFrom(self._commit.candidate.clusters[index])
            # A cluster that was always late has its optimizer states on the disks already.
            candidate_plan = self._candidate_plans[index]
            request.candidate_stages.extend(candidate_plan.stages if candidate_plan else ())
            request.wait_for_copy = not local_steps or self._makes_candidate()
        channel = self._channels.channel(control_unit.address)
        stub = control_unit_pb2_grpc.ControlUnitServiceStub(channel)
        call = self._round_calls[index] = stub.RunRound(request, wait_for_ready=True)
        prepared = None
        try:
            for response in self._calls.answers(call, control_unit.host_id, "run its round"):
                event = response.WhichOneof("event")
                if event == "progress":
                    progress = response.progress
                    if progress.candidate_copied:
                        self._has_copy.add(index)
                    if progress.training_began:
                        late.training_began()
                    unprepared.summary.CopyFrom(job_pb2.RoundSummary(stages=progress.stages))
                    self._progress.publish(progress=progress)
                elif event == "evaluation":
                    evaluation = self._evaluations.add(
                        index, response.evaluation, self._commit.num_rounds
                    )
                    if evaluation is not None:
                        self._progress.document.evaluation = evaluation
                        self._progress.publish(evaluation=evaluation)
                elif event == "prepared":
                    prepared = response.prepared
                    if prepared.candidate_copied:
                        self._has_copy.add(index)
        except CollapipeError:
            if index in late.late:
                return unprepared
            raise
        if prepared is None:
            raise AttemptFailedError(f"{control_unit.host_id} ended its round without a result")
        return prepared if late.ended(index) else unprepared

    def _commit_round(
        self,
        attempt: plan_pb2.Attempt,
        states: Sequence[plan_pb2.ClusterState],
        *,
        candidate_copied: bool,
        is_candidate: bool = False,
        late_clusters: Sequence[int] = (),
    ) -> plan_pb2.Commit:
        edge_server = self._planner.hosts.edge_server
        request = edge_server_pb2.CommitRoundRequest(
            attempt=attempt,
            clusters=states,
            candidate_copied=candidate_copied,
            is_candidate=is_candidate,
            keep_commits=self._job.training.keep_commits,
            late_clusters=late_clusters,
        )
        channel = self._channels.channel(edge_server.address)
        stub = edge_server_pb2_grpc.EdgeServerServiceStub(channel)
        call = stub.CommitRound(request, wait_for_ready=True)
        return self._calls.last_answer(call, edge_server.host_id, "commit the round").commit

    def _evaluates(self, local_steps: int) -> bool:
        """Returns whether the round begins with an evaluation of the model that it starts from."""
        every = self._job.training.evaluate_every
        num_rounds = self._commit.num_rounds
        return not local_steps or bool(every and num_rounds and num_rounds % every == 0)

    def _makes_candidate(self) -> bool:
        """Returns whether the optimizer states of the next commit are to be copied."""
        return (self._commit.num_rounds + 1) % self._job.training.replicate_every == 0


def _export_phases(
    job: JobConfig,
    summaries: Sequence[job_pb2.RoundSummary],
    seconds: float,
    late_clusters: Sequence[int],
) -> None:
    metrics.ROUND_SECONDS.labels("committed").observe(seconds)
    for index, summary in enumerate(summaries):
        cluster = str(job.host_clusters[index])
        # The series exists from the first round on, so that Prometheus sees it grow.
        late_rounds = metrics.LATE_ROUNDS.labels(cluster)
        if index in late_clusters:
            late_rounds.inc()
            continue
        for phase, phase_seconds in (
            ("configure", summary.configure_seconds),
            ("train", summary.training_seconds),
            ("gather", summary.gather_seconds),
            ("evaluate", summary.evaluation_seconds),
        ):
            metrics.ROUND_PHASE_SECONDS.labels(cluster, phase).set(phase_seconds)
