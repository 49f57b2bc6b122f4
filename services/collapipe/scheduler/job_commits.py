"""Lets the edge server commit rounds, and finds the commit from which an attempt goes on."""

import logging
from collections.abc import Sequence

from collapipe.database import NOT_STORED
from collapipe.errors import InvalidInputError
from collapipe.job_life.commits import Beginning, Kept, can_catch_up, usable, where_to_begin
from collapipe.planning.decisions import RoundDecision
from collapipe.scheduler.attempt_facts import commits_of, name_of
from collapipe.scheduler.attempt_tools import AttemptTools
from collapipe.scheduler.catching_up import committed_rounds
from collapipe.scheduler.rollback import go_to_commit
from collapipe.v1 import (
    edge_server_pb2,
    plan_pb2,
    scheduler_pb2,
    secure_aggregation_pb2,
)

logger = logging.getLogger(__name__)


class JobCommits:
    """The commits of one job, as one attempt sees them."""

    def __init__(self, tools: AttemptTools) -> None:
        self._tools = tools
        self._job = tools.job
        self._progress = tools.progress

    def commit_round(
        self,
        attempt: plan_pb2.Attempt,
        states: Sequence[plan_pb2.ClusterState],
        *,
        candidate_copied: bool,
        is_candidate: bool = False,
        late_clusters: Sequence[int] = (),
        unmasking: secure_aggregation_pb2.Unmasking | None = None,
    ) -> edge_server_pb2.CommitRoundResponse:
        edge_server = self._tools.hosts.edge_server
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
        calls = self._tools.calls
        call = calls.edge_server(edge_server).CommitRound(request, wait_for_ready=True)
        answer = calls.last_answer(call, edge_server.host_id, "commit the round")
        self._progress.document.stored_bytes = answer.stored_bytes
        return answer

    def with_copied_candidate(self, last: plan_pb2.Commit) -> plan_pb2.Commit:
        """Returns the last commit. If all control units have copied its candidate, the candidate is the restore point."""
        document = self._progress.document
        document.num_rounds_reached = max(document.num_rounds_reached, last.num_rounds)
        if not last.HasField("candidate") or document.copied_candidate != name_of(last.candidate):
            return last
        attempt = plan_pb2.Attempt(
            job_id=document.job_id, round_index=last.num_rounds - 1, attempt=last.attempt
        )
        return self.commit_round(attempt, [], candidate_copied=True).commit

    def recover_result(self, last: plan_pb2.Commit) -> None:
        """Stores what the last commit has measured, if an earlier process or attempt did not learn of the commit."""
        jobs, job_id, round_index = self._progress.jobs, self._progress.job_id, last.num_rounds - 1
        try:
            if round_index < 0 or jobs.find_result(job_id, round_index, last.attempt) is not None:
                return
            recorded = jobs.find_round(job_id, round_index)
            if recorded is None or recorded.attempt != last.attempt or recorded.measured is None:
                return
            decision, measured = RoundDecision.from_json(recorded.decision), recorded.measured
            self._tools.planner.take_over_round(
                decision, measured.summaries, measured.round_seconds
            )
        except (*NOT_STORED, InvalidInputError, LookupError, ValueError, ArithmeticError):
            # It is damaged, and no later round depends on it.
            logger.exception("job %s: the result of round %d is lost", job_id, last.num_rounds)
            return
        self._progress.round_committed(measured, last, self._tools.planner.state())

    def where_to_begin(self, last: plan_pb2.Commit, kept: Kept | None) -> Beginning:
        """Decides from which commit this attempt goes on, and with which results of the attempt before."""
        commits, job, hosts = commits_of(last), self._job, self._tools.hosts
        most = job.training.rounds + 1
        rounds_left = self._progress.document.privacy.rounds_left(job, most)
        if kept is not None:
            present = {host_id: host.incarnation for host_id, host in hosts.by_id.items()}
            kept = usable(kept, commits.last, hosts.edge_server.incarnation, present)
        every = job.training.replicate_every
        if kept is not None and can_catch_up(commits, every, (), rounds_left):
            rounds = range(commits.restorable, commits.num_rounds)
            found = [self._progress.jobs.find_round(last.job_id, index) for index in rounds]
            recorded = [one.attempt if one else None for one in found]
            kept = kept if can_catch_up(commits, every, recorded, rounds_left) else None
        else:
            kept = None
        return where_to_begin(commits, kept, job.training.rounds, rounds_left)

    def go_to(self, last: plan_pb2.Commit, beginning: Beginning) -> plan_pb2.Commit:
        """Goes to the commit from which this attempt goes on, and returns it."""
        commit = plan_pb2.Commit()
        if beginning.kept is not None:
            commit.CopyFrom(last)
            commit.ClearField("candidate")
        elif beginning.is_trained:
            if beginning.num_rounds > last.num_rounds:
                last = self._go_to_kept(beginning.num_rounds)
            # Only the evaluation is missing, which needs no optimizer states.
            commit.CopyFrom(last)
            commit.ClearField("candidate")
            for unit in (unit for cluster in commit.clusters for unit in cluster.units):
                unit.optimizer_digest = ""
        else:
            commit.CopyFrom(last.restore_point)
            if beginning.num_repeated:
                self._progress.tell(
                    scheduler_pb2.INCIDENT_CODE_ROUNDS_REPEATED,
                    f"repeats {committed_rounds(beginning.num_repeated)}, because optimizer states were last copied after round "
                    f"{commit.num_rounds}",
                )
        return commit

    def _go_to_kept(self, num_rounds: int) -> plan_pb2.Commit:
        """Makes a kept commit the last one, and returns it."""
        document = self._progress.document
        request = edge_server_pb2.RollBackRequest(
            job_id=document.job_id, num_rounds=num_rounds, attempt=document.attempt
        )
        answer = go_to_commit(self._tools.hosts.edge_server, request, self._tools.calls)
        document.stored_bytes = answer.stored_bytes
        self._progress.committed(answer.commit)
        return answer.commit
