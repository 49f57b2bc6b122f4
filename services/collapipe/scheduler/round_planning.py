"""Decides and records the rounds of an attempt at a job, new ones and repeated ones."""

from collections.abc import Mapping, Sequence

from collapipe.errors import InfeasibleError, InvalidInputError
from collapipe.planning.decisions import RoundDecision
from collapipe.scheduler.attempt_tools import AttemptTools
from collapipe.scheduler.job_documents import RoundDocument
from collapipe.v1 import plan_pb2, scheduler_pb2


class RoundPlanning:
    """The decisions of one attempt."""

    def __init__(self, tools: AttemptTools) -> None:
        self._progress = tools.progress
        self._job = tools.job
        self._num_rows = tools.prepared.num_rows
        self._planner = tools.planner

    def is_repeated(self, round_index: int) -> bool:
        """Returns whether an earlier attempt has committed a round."""
        return round_index < self._progress.document.num_rounds_reached

    def decide(
        self,
        commit: plan_pb2.Commit,
        kept: Mapping[int, plan_pb2.Plan],
        *,
        evaluation_only: bool,
        decides_anew: bool,
    ) -> tuple[RoundDocument, RoundDecision]:
        """Decides and records the round after a commit.

        A repeated round keeps its recorded late clusters and mini-batches, and also its micro-batches, slices and upload
        codecs, if a plan with them fits the hosts. Attempts before the last return to a commit without optimizer states do not
        count.

        Args:
            kept: The plans by which clusters have run this round already, by cluster index.
            decides_anew: Whether a repeated round may get other micro-batches, slices and codecs if no plan fits otherwise.

        Raises:
            InfeasibleError: No plan fits the hosts.
            InvalidInputError: With secure averaging, the edge server would train more of a cluster than its head.
        """
        job_id, jobs, round_index = self._progress.job_id, self._progress.jobs, commit.num_rounds
        earlier = jobs.find_round(job_id, round_index)
        if earlier is not None and earlier.attempt < commit.anew_since:
            earlier = None
        is_decided = earlier is not None and earlier.is_revealed
        repeated = earlier if self.is_repeated(round_index) or is_decided else None
        try:
            plans, decision = self._planner.decide(
                round_index, earlier.plans if earlier else (), evaluation_only=evaluation_only
            )
        except InfeasibleError as error:
            if earlier is None or not decides_anew:
                raise
            self._progress.tell(
                scheduler_pb2.INCIDENT_CODE_PLAN_CHANGED,
                f"round {round_index + 1} cannot be repeated as it was, and is decided anew: {error}",
            )
            plans, decision = self._planner.decide(round_index, (), evaluation_only=evaluation_only)
        if self._job.averaging.secure:
            self._check_edge_server(plans)
        plans = [kept.get(index, plan) for index, plan in enumerate(plans)]
        document = RoundDocument(
            attempt=self._progress.document.attempt,
            plans=plans,
            decision=decision.to_json(),
            total_steps=repeated.total_steps if repeated else self._job.total_steps,
            late_clusters=repeated.late_clusters if repeated else [],
            failed_clusters=repeated.failed_clusters if repeated else [],
            ended_early=repeated.ended_early if repeated else {},
            is_revealed=repeated.is_revealed if repeated else False,
        )
        if self._job.averaging.secure and not evaluation_only:
            recorded = repeated.total_samples if self.is_repeated(round_index) and repeated else 0
            document.total_samples = recorded or self._total_samples(commit)
        jobs.save_round(job_id, round_index, document)
        return document, decision

    def _check_edge_server(self, plans: Sequence[plan_pb2.Plan]) -> None:
        """Refuses plans in which the edge server would train more of a cluster than its head; raises `InvalidInputError`."""
        edge_server = self._planner.hosts.edge_server.host_id
        for stage in (stage for plan in plans for stage in plan.stages):
            if stage.host_id == edge_server and stage.stop_unit - stage.start_unit > 1:
                raise InvalidInputError(
                    f"the plan has units {stage.start_unit} to {stage.stop_unit - 1} on {edge_server}, which would then see what each "
                    "cluster has trained in them: end the lists of schedule.segments with 0, or remove averaging.secure"
                )

    def _total_samples(self, commit: plan_pb2.Commit) -> int:
        """Returns twice the rows that the clusters have now, because their files may grow until they train.

        Clusters with private updates count as one row each.
        """
        if self._job.privacy.is_on:
            return self._job.clusters
        states = zip(self._num_rows, commit.clusters, strict=True)
        return 2 * sum(max(num_rows, state.cursor.num_rows) for num_rows, state in states)
