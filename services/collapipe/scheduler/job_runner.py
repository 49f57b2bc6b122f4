"""Runs a job from its queue entry to its last commit.

Start with `JobRunner.run`, which runs the whole job, and `JobRunner._run_round`, which runs one round as a
transaction: docs/architecture.md.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    InfeasibleError,
    InvalidInputError,
)
from collapipe.rpc import ChannelPool
from collapipe.scheduler.evaluations import Evaluations
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.host_registry import HostRegistry, JobHosts, choose_hosts
from collapipe.scheduler.job_store import JobDocument, JobStore, RoundDocument
from collapipe.scheduler.planner import Planner
from collapipe.scheduler.round_problem import ModelSizes
from collapipe.scheduler.telemetry_window import Telemetry
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

logger = logging.getLogger(__name__)

_TRACK = "round"
"""The track of the phases of a round in a trace."""


class JobRunner:
    """Runs one job. It stores the document of the job after every change."""

    def __init__(
        self,
        document: JobDocument,
        registry: HostRegistry,
        jobs: JobStore,
        channels: ChannelPool,
        events: EventLog,
        telemetry: Telemetry,
    ) -> None:
        self._document = document
        self._job = document.job
        self._spec = job_pb2.JobSpec(job_id=document.job_id, config_json=document.config_json)
        self._registry = registry
        self._jobs = jobs
        self._channels = channels
        self._events = events
        self._telemetry = telemetry
        self._planner: Planner | None = None
        self._calls = HostCalls(self._job.schedule.silence_seconds)
        self._evaluations = Evaluations(self._job.task.kind, self._job.clusters)

    @property
    def job_id(self) -> str:
        return self._document.job_id

    @property
    def description(self) -> str:
        """What others wait for, in words."""
        num_rounds = self._job.training.rounds
        return (
            f"job {self.job_id} to end ({self._document.num_rounds_committed} of {num_rounds} rounds are "
            "committed)"
        )

    def run(self) -> None:
        """Runs the job to its end. The document then holds the outcome."""
        try:
            self._set_state(scheduler_pb2.JOB_STATE_PREPARING, "looking for hosts")
            self._hosts = self._wait_for_hosts()
            self._prepare()
            self._set_state(scheduler_pb2.JOB_STATE_RUNNING, "")
            while self._commit.num_rounds < self._job.training.rounds:
                self._run_round(self._job.training.local_steps)
            self._run_round(local_steps=0)  # Evaluates the final model.
            self._end(scheduler_pb2.JOB_STATE_SUCCEEDED, "")
        except CancelledError as error:
            self._end(scheduler_pb2.JOB_STATE_CANCELLED, str(error))
        except CollapipeError as error:
            message = self._registry.explain(error)
            logger.warning("job %s failed: %s", self.job_id, message)
            self._end(scheduler_pb2.JOB_STATE_FAILED, message)
        except Exception as error:
            # A full disk or a bug must not end the thread that runs all jobs.
            logger.exception("job %s failed unexpectedly", self.job_id)
            message = f"the scheduler failed: {type(error).__name__}: {error}; see its log"
            self._end(scheduler_pb2.JOB_STATE_FAILED, message)
        finally:
            if self._planner is not None:
                self._planner.close()
            self._events.close()

    def cancel(self, reason: str) -> None:
        """Stops the job. Its last commit remains."""
        self._calls.cancel(reason)

    def _wait_for_hosts(self) -> JobHosts:
        limit = self._job.schedule.wait_for_hosts_seconds
        deadline = time.monotonic() + limit
        announced: list[str] = []
        while True:
            hosts, missing = choose_hosts(self._registry.alive(), self._job)
            if hosts is not None:
                return hosts
            if missing != announced:
                announced = missing
                message = f"waiting for {', '.join(missing)}"
                self._set_state(scheduler_pb2.JOB_STATE_PREPARING, message)
            self._calls.sleep()
            if time.monotonic() > deadline:
                raise InfeasibleError(
                    f"the job needs {', '.join(missing)}, and has waited for {limit:g} s "
                    "(schedule.wait_for_hosts_seconds): start them (`collapipe up` does so on a "
                    "local testbed); a new job may also ask for fewer"
                )

    def _prepare(self) -> None:
        """Loads the data in all clusters, agrees on labels and vocabulary, and creates or finds the model."""
        document, edge_server = self._document, self._hosts.edge_server
        self._set_state(scheduler_pb2.JOB_STATE_PREPARING, "loading data")
        vocabulary = None
        if document.vocabulary_digest:
            # A resumed job keeps its vocabulary, even if its data have grown.
            vocabulary = job_pb2.BlobSource(
                digest=document.vocabulary_digest, address=edge_server.address
            )
        first = self._prepare_data(0, vocabulary)
        self._vocabulary = first.vocabulary
        others = self._calls.in_parallel(
            lambda cluster_index: self._prepare_data(cluster_index, first.vocabulary),
            range(1, self._job.clusters),
        )
        if not any(data.num_held_out_rows for data in (first, *others)):
            raise InvalidInputError(
                "data.train has a file for each cluster, but none of their rows can be held out for evaluation (the hash of the "
                "text chooses): add rows, or name a file in data.held_out"
            )
        if not document.vocabulary_digest:
            labels = {label for data in (first, *others) for label in data.labels}
            # By convention "O", the label of a word outside all entities, comes first.
            document.labels = sorted(labels, key=lambda label: (label != "O", label))
            document.vocabulary_digest = first.vocabulary.digest
        self._set_state(scheduler_pb2.JOB_STATE_PREPARING, "making the model")
        request = edge_server_pb2.PrepareJobRequest(
            job=self._spec, labels=document.labels, vocabulary=self._vocabulary
        )
        call = self._edge_server_stub().PrepareJob(request, wait_for_ready=True)
        answer = self._calls.last_answer(call, edge_server.host_id, "make the model")
        self._model = answer.model
        self._begin_at(answer.commit)
        self._jobs.save(document)
        self._set_state(scheduler_pb2.JOB_STATE_PREPARING, "profiling devices")
        self._planner = self._calls.run_detached(
            lambda: Planner.for_job(
                self._job,
                answer.model,
                ModelSizes(
                    answer.num_blocks,
                    tuple(answer.unit_bytes),
                    tuple(answer.frozen_bytes),
                    answer.hidden_size,
                    period=2 if self._job.model.half_blocks else 1,
                    frozen_memory_share=answer.frozen_memory_share,
                ),
                self._hosts,
                self._channels,
                self._telemetry,
                self._jobs.planner_state(document.job_id),
            )
        )
        self._previous_plans: list[plan_pb2.Plan | None] = [None] * self._job.clusters
        self._candidate_plans: list[plan_pb2.Plan] = []

    def _begin_at(self, last: plan_pb2.Commit) -> None:
        """Chooses the commit from which this run continues, given the last commit."""
        reached = max(self._document.num_rounds_reached, last.num_rounds)
        self._document.num_rounds_reached = reached
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
            logger.info(
                "job %s repeats %d rounds, because optimizer states were last copied after round %d",
                self.job_id,
                repeated,
                self._commit.num_rounds,
            )

    def _prepare_data(
        self, cluster_index: int, vocabulary: job_pb2.BlobSource | None
    ) -> control_unit_pb2.PrepareDataResponse:
        host_id = self._hosts.clusters[cluster_index].control_unit.host_id
        request = control_unit_pb2.PrepareDataRequest(
            job=self._spec, cluster_index=cluster_index, vocabulary=vocabulary
        )
        call = self._control_unit_stub(cluster_index).PrepareData(request, wait_for_ready=True)
        data = self._calls.last_answer(call, host_id, "load its data")
        logger.info(
            "cluster %d has %d training rows and %d held-out rows",
            cluster_index,
            data.num_rows,
            data.num_held_out_rows,
        )
        return data

    def _run_round(self, local_steps: int) -> None:
        """Plans, runs and commits one round. Without local steps it only evaluates, and commits nothing."""
        started = time.monotonic()
        planner = self._planner
        assert planner is not None
        round_index = self._commit.num_rounds
        earlier = self._jobs.find_round(self.job_id, round_index)
        attempt = self._document.attempt
        SPANS.begin_round(self.job_id, round_index, attempt)
        with SPANS.span(_TRACK, "plan"):
            plans, decision = planner.decide(
                round_index,
                earlier.plans if earlier else (),
                evaluation_only=not local_steps,
            )
            is_repeated = round_index < self._document.num_rounds_reached
            total_steps = earlier.total_steps if earlier and is_repeated else self._job.total_steps
            document = RoundDocument(
                attempt=attempt, plans=plans, decision=decision.to_json(), total_steps=total_steps
            )
            self._jobs.save_round(self.job_id, round_index, document)
        if local_steps:
            planner.round_started(decision)
            self._publish(
                round_started=scheduler_pb2.RoundStarted(
                    round_index=round_index, attempt=attempt, plans=plans
                )
            )
        try:
            with SPANS.span(_TRACK, "run"):
                prepared = self._calls.in_parallel(
                    lambda plan: self._run_cluster(plan, local_steps, total_steps), plans
                )
        except CollapipeError as error:
            outcome = "cancelled" if isinstance(error, CancelledError) else "aborted"
            metrics.ROUND_SECONDS.labels(outcome).observe(time.monotonic() - started)
            raise
        self._previous_plans = list(plans)
        copied = self._commit.HasField("candidate") and all(p.candidate_copied for p in prepared)
        if not local_steps:
            if copied:  # The last commit is repeated with the new restore point.
                self._commit_round(round_index - 1, [], copied)
            return
        with SPANS.span(_TRACK, "commit"):
            self._commit = self._commit_round(
                round_index, [cluster.state for cluster in prepared], copied
            )
        self._restore_point = self._commit.restore_point
        if self._commit.candidate.num_rounds == self._commit.num_rounds:
            self._candidate_plans = list(plans)
        seconds = time.monotonic() - started
        metrics.ROUND_SECONDS.labels("committed").observe(seconds)
        summaries = [cluster.summary for cluster in prepared]
        for index, summary in enumerate(summaries):
            for phase, phase_seconds in (
                ("configure", summary.configure_seconds),
                ("train", summary.training_seconds),
                ("gather", summary.gather_seconds),
                ("evaluate", summary.evaluation_seconds),
            ):
                metrics.ROUND_PHASE_SECONDS.labels(str(index), phase).set(phase_seconds)
        planner.round_committed(decision, summaries, seconds)
        self._jobs.save_planner_state(self.job_id, planner.state())
        self._document.num_rounds_committed = self._commit.num_rounds
        reached = max(self._document.num_rounds_reached, self._commit.num_rounds)
        self._document.num_rounds_reached = reached
        self._jobs.save(self._document)
        self._publish(
            round_committed=scheduler_pb2.RoundCommitted(
                num_rounds=self._commit.num_rounds, summaries=summaries, round_seconds=seconds
            )
        )

    def _run_cluster(
        self, plan: plan_pb2.Plan, local_steps: int, total_steps: int
    ) -> control_unit_pb2.RoundPrepared:
        index = plan.cluster_index
        host_id = self._hosts.clusters[index].control_unit.host_id
        previous = self._previous_plans[index]
        request = control_unit_pb2.RunRoundRequest(
            attempt=self._attempt(self._commit.num_rounds, plan.plan_id),
            job=self._spec,
            model=self._model,
            plan=plan,
            base=self._commit.clusters[index],
            labels=self._document.labels,
            local_steps=local_steps,
            evaluate=self._evaluates(local_steps),
            previous_stages=previous.stages if previous else (),
            edge_address=self._hosts.edge_server.address,
            edge_host_id=self._hosts.edge_server.host_id,
            vocabulary=self._vocabulary,
            restore_point=self._restore_point.clusters[index],
            restore_num_rounds=self._restore_point.num_rounds,
            total_steps=total_steps,
        )
        if self._commit.HasField("candidate"):
            request.candidate.CopyFrom(self._commit.candidate.clusters[index])
            request.candidate_stages.extend(self._candidate_plans[index].stages)
            request.wait_for_copy = not local_steps or self._makes_candidate()
        call = self._control_unit_stub(index).RunRound(request, wait_for_ready=True)
        prepared = None
        for response in self._calls.answers(call, host_id, "run its round"):
            event = response.WhichOneof("event")
            if event == "progress":
                self._publish(progress=response.progress)
            elif event == "evaluation":
                evaluation = self._evaluations.add(
                    index, response.evaluation, self._commit.num_rounds
                )
                if evaluation is not None:
                    self._document.evaluation = evaluation
                    self._publish(evaluation=evaluation)
            elif event == "prepared":
                prepared = response.prepared
        if prepared is None:
            raise AttemptFailedError(f"{host_id} ended its round without a result")
        return prepared

    def _commit_round(
        self,
        round_index: int,
        states: Sequence[plan_pb2.ClusterState],
        candidate_copied: bool,
    ) -> plan_pb2.Commit:
        request = edge_server_pb2.CommitRoundRequest(
            attempt=self._attempt(round_index),
            clusters=states,
            candidate_copied=candidate_copied,
            is_candidate=self._makes_candidate(),
        )
        call = self._edge_server_stub().CommitRound(request, wait_for_ready=True)
        host_id = self._hosts.edge_server.host_id
        return self._calls.last_answer(call, host_id, "commit the round").commit

    def _evaluates(self, local_steps: int) -> bool:
        """Returns whether the round begins with an evaluation of the model that it starts from."""
        every = self._job.training.evaluate_every
        num_rounds = self._commit.num_rounds
        return not local_steps or bool(every and num_rounds and num_rounds % every == 0)

    def _makes_candidate(self) -> bool:
        """Returns whether the optimizer states of the next commit are to be copied."""
        return (self._commit.num_rounds + 1) % self._job.training.replicate_every == 0

    def _attempt(self, round_index: int, plan_id: str = "") -> plan_pb2.Attempt:
        return plan_pb2.Attempt(
            job_id=self.job_id,
            round_index=round_index,
            attempt=self._document.attempt,
            plan_id=plan_id,
        )

    def _control_unit_stub(
        self, cluster_index: int
    ) -> control_unit_pb2_grpc.ControlUnitServiceStub:
        control_unit = self._hosts.clusters[cluster_index].control_unit
        channel = self._channels.channel(control_unit.address)
        return control_unit_pb2_grpc.ControlUnitServiceStub(channel)

    def _edge_server_stub(self) -> edge_server_pb2_grpc.EdgeServerServiceStub:
        channel = self._channels.channel(self._hosts.edge_server.address)
        return edge_server_pb2_grpc.EdgeServerServiceStub(channel)

    def _set_state(self, state: scheduler_pb2.JobState, message: str) -> None:
        self._document.state, self._document.message = state, message
        self._publish(status=self._document.status())
        self._jobs.save(self._document)

    def _end(self, state: scheduler_pb2.JobState, message: str) -> None:
        """Sets the final state. Clients see it even if a full disk prevents storing it."""
        outcome = scheduler_pb2.JobState.Name(state).removeprefix("JOB_STATE_").lower()
        metrics.JOBS_ENDED.labels(outcome).inc()
        try:
            self._set_state(state, message)
        except OSError:
            logger.exception("the final state of job %s could not be stored", self.job_id)

    def _publish(self, **event: Any) -> None:
        self._events.publish(Event(**event))
