"""Takes one job from its hosts to its last commit.

Reading order: `run` is the whole life of a job, `_run_round` one transaction of design/architecture.md, 3.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    InfeasibleError,
    PeerLostError,
)
from collapipe.rpc import ChannelPool, within_silence
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.host_registry import JobHosts
from collapipe.scheduler.hosts import Hosts
from collapipe.scheduler.job_store import JobDocument, JobStore
from collapipe.scheduler.planner import Planner, Telemetry
from collapipe.scheduler.round_problem import ModelFacts
from collapipe.telemetry import metrics
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

T = TypeVar("T")

_POLL_SECONDS = 0.2


class JobRunner:
    """Runs one job; its document tells a restarted scheduler how to go on.

    Args:
        document: The job so far.
        hosts: Who is registered.
        jobs: Keeps the document and the plans.
        channels: To the hosts.
        events: Told what happens.
        telemetry: What rounds measure.
    """

    def __init__(
        self,
        document: JobDocument,
        hosts: Hosts,
        jobs: JobStore,
        channels: ChannelPool,
        events: EventLog,
        telemetry: Telemetry,
    ) -> None:
        self._document = document
        self._job = document.job
        self._spec = job_pb2.JobSpec(job_id=document.job_id, config_json=document.config_json)
        self._registered = hosts
        self._jobs = jobs
        self._channels = channels
        self._events = events
        self._telemetry = telemetry
        self._planner: Planner | None = None
        self._cancelled = threading.Event()
        self._cancel_reason = ""
        self._giving_up = threading.Event()
        self._calls: set[Any] = set()
        self._calls_lock = threading.Lock()
        self._silence_seconds = self._job.schedule.silence_seconds

    @property
    def job_id(self) -> str:
        """The job."""
        return self._document.job_id

    def run(self) -> None:
        """Runs the job to its end; the document tells which."""
        try:
            self._set_state(scheduler_pb2.JOB_STATE_PREPARING, "looking for hosts")
            self._hosts = self._wait_for_hosts()
            self._prepare()
            self._set_state(scheduler_pb2.JOB_STATE_RUNNING, "")
            while self._commit.num_rounds < self._job.training.rounds:
                self._run_round(self._job.training.local_steps)
            self._run_round(local_steps=0)  # measures the final model
            self._end(scheduler_pb2.JOB_STATE_SUCCEEDED, "")
        except CancelledError as error:
            self._end(scheduler_pb2.JOB_STATE_CANCELLED, str(error))
        except CollapipeError as error:
            message = self._explain(error)
            logger.warning("job %s failed: %s", self._document.job_id, message)
            self._end(scheduler_pb2.JOB_STATE_FAILED, message)
        except Exception as error:  # a full disk or a bug ends this job, not the thread of all jobs
            logger.exception("job %s failed unexpectedly", self._document.job_id)
            message = f"the scheduler failed: {type(error).__name__}: {error}; see its log"
            self._end(scheduler_pb2.JOB_STATE_FAILED, message)
        finally:
            if self._planner is not None:
                self._planner.close()
            self._events.close()

    def _explain(self, error: CollapipeError) -> str:
        """Names a lost host that whoever lost it knows by its address only."""
        if isinstance(error, PeerLostError):
            for status in self._registered.statuses():
                if error.host_id == status.host.address:
                    return f"{status.host.host_id} is lost: {error}"
        return str(error)

    def cancel(self, reason: str) -> None:
        """Stops the job; its last commit stays."""
        self._cancel_reason = reason
        self._cancelled.set()
        self._cancel_calls()

    def _wait_for_hosts(self) -> JobHosts:
        deadline = time.monotonic() + self._job.schedule.wait_for_hosts_seconds
        announced: list[str] = []
        while True:
            hosts, missing = self._registered.for_job(self._job)
            if hosts is not None:
                return hosts
            if missing != announced:
                announced = missing
                message = f"waiting for {', '.join(missing)}"
                self._set_state(scheduler_pb2.JOB_STATE_PREPARING, message)
            if self._cancelled.wait(_POLL_SECONDS):
                raise CancelledError(self._cancel_reason)
            if time.monotonic() > deadline:
                raise InfeasibleError(
                    f"the job needs {', '.join(missing)}, and has waited for "
                    f"{self._job.schedule.wait_for_hosts_seconds:g} s "
                    "(schedule.wait_for_hosts_seconds): start them, or ask for fewer"
                )

    def _prepare(self) -> None:
        """Loads data everywhere, agrees on labels and vocabulary, and makes or finds the model."""
        document = self._document
        self._set_state(scheduler_pb2.JOB_STATE_PREPARING, "loading data")
        vocabulary = None
        if (
            document.vocabulary_digest
        ):  # a resumed job keeps its vocabulary, though its data may have grown
            vocabulary = job_pb2.BlobSource(
                digest=document.vocabulary_digest, address=self._hosts.edge_server.address
            )
        first = self._prepare_data(0, vocabulary)
        self._vocabulary = first.vocabulary
        others = self._in_parallel(
            lambda cluster_index: self._prepare_data(cluster_index, first.vocabulary),
            range(1, self._job.clusters),
        )
        if not document.vocabulary_digest:
            labels = {label for data in (first, *others) for label in data.labels}
            # "O", which marks what is no entity, comes first by custom
            document.labels = sorted(labels, key=lambda label: (label != "O", label))
            document.vocabulary_digest = first.vocabulary.digest
        self._set_state(scheduler_pb2.JOB_STATE_PREPARING, "making the model")
        edge_server = self._hosts.edge_server
        stub = edge_server_pb2_grpc.EdgeServerServiceStub(
            self._channels.channel(edge_server.address)
        )
        request = edge_server_pb2.PrepareJobRequest(
            job=self._spec,
            labels=document.labels,
            vocabulary=self._vocabulary,
        )
        answer = self._last(
            stub.PrepareJob(request, wait_for_ready=True), edge_server.host_id, "make the model"
        )
        self._commit, self._model = answer.commit, answer.model
        self._jobs.save(document)
        self._set_state(scheduler_pb2.JOB_STATE_PREPARING, "profiling devices")
        self._planner = self._unless_cancelled(
            lambda: Planner.for_job(
                self._job,
                answer.model,
                ModelFacts(answer.num_blocks, tuple(answer.unit_bytes), answer.hidden_size),
                self._hosts,
                self._channels,
                self._telemetry,
                self._jobs.planner(document.job_id),
            )
        )
        self._previous_plans: list[plan_pb2.Plan | None] = [None] * self._job.clusters

    def _prepare_data(
        self, cluster_index: int, vocabulary: job_pb2.BlobSource | None
    ) -> control_unit_pb2.PrepareDataResponse:
        control_unit = self._hosts.clusters[cluster_index].control_unit
        stub = self._control_unit_stub(control_unit)
        request = control_unit_pb2.PrepareDataRequest(
            job=self._spec, cluster_index=cluster_index, vocabulary=vocabulary
        )
        data: control_unit_pb2.PrepareDataResponse = self._last(
            stub.PrepareData(request, wait_for_ready=True), control_unit.host_id, "load its data"
        )
        logger.info(
            "cluster %d has %d training rows and %d held-out rows",
            cluster_index,
            data.num_rows,
            data.num_held_out_rows,
        )
        return data

    def _run_round(self, local_steps: int) -> None:
        """One round, from its plans to its commit; without local steps it measures, and commits nothing."""
        started = time.monotonic()
        planner = self._planner
        assert planner is not None
        round_index = self._commit.num_rounds

        def make_plans(
            replayed: list[int] | None,
        ) -> tuple[Sequence[plan_pb2.Plan], dict[str, Any]]:
            plans, decision = planner.decide(round_index, replayed, evaluation_only=not local_steps)
            return plans, decision.to_json()

        recorded = self._jobs.begin_attempt(self._document.job_id, round_index, make_plans)
        planner.begin()
        if local_steps:
            self._publish(
                round_started=scheduler_pb2.RoundStarted(
                    round_index=round_index, attempt=recorded.attempt, plans=recorded.plans
                )
            )
        try:
            prepared = self._in_parallel(
                lambda plan: self._run_cluster(plan, recorded.attempt, local_steps), recorded.plans
            )
        except CollapipeError as error:
            outcome = "cancelled" if isinstance(error, CancelledError) else "aborted"
            metrics.ROUND_SECONDS.labels(outcome).observe(time.monotonic() - started)
            raise
        self._previous_plans = list(recorded.plans)
        if not local_steps:
            return
        self._commit = self._commit_round(recorded.attempt, [p.state for p in prepared])
        seconds = time.monotonic() - started
        metrics.ROUND_SECONDS.labels("committed").observe(seconds)
        for plan, prep in zip(recorded.plans, prepared, strict=True):
            for phase, phase_seconds in _phases(prep.summary).items():
                labels = (str(plan.cluster_index), phase)
                metrics.ROUND_PHASE_SECONDS.labels(*labels).set(phase_seconds)
        planner.observe([p.summary for p in prepared], seconds)
        self._jobs.save_planner(self._document.job_id, planner.to_json())
        self._document.num_rounds_committed = self._commit.num_rounds
        self._jobs.save(self._document)
        self._publish(
            round_committed=scheduler_pb2.RoundCommitted(
                num_rounds=self._commit.num_rounds,
                summaries=[p.summary for p in prepared],
                round_seconds=seconds,
            )
        )

    def _run_cluster(
        self, plan: plan_pb2.Plan, attempt: int, local_steps: int
    ) -> control_unit_pb2.RoundPrepared:
        """Runs one cluster's part of a round."""
        index = plan.cluster_index
        control_unit = self._hosts.clusters[index].control_unit
        previous = self._previous_plans[index]
        request = control_unit_pb2.RunRoundRequest(
            attempt=self._attempt(plan, attempt),
            job=self._spec,
            model=self._model,
            plan=plan,
            base=self._commit.clusters[index],
            labels=self._document.labels,
            local_steps=local_steps,
            evaluate=index == 0 and self._evaluates(local_steps),
            previous_stages=previous.stages if previous else (),
            edge_address=self._hosts.edge_server.address,
            vocabulary=self._vocabulary,
        )
        call = self._control_unit_stub(control_unit).RunRound(request, wait_for_ready=True)
        prepared = None
        for response in self._answers(call, control_unit.host_id, "run its round"):
            event = response.WhichOneof("event")
            if event == "progress":
                self._publish(progress=response.progress)
            elif event == "evaluation":
                self._document.evaluation = response.evaluation
                self._publish(evaluation=response.evaluation)
            elif event == "prepared":
                prepared = response.prepared
        if prepared is None:
            raise AttemptFailedError(f"{control_unit.host_id} ended its round without a result")
        return prepared

    def _commit_round(
        self, attempt: int, states: Sequence[plan_pb2.ClusterState]
    ) -> plan_pb2.Commit:
        edge_server = self._hosts.edge_server
        stub = edge_server_pb2_grpc.EdgeServerServiceStub(
            self._channels.channel(edge_server.address)
        )
        request = edge_server_pb2.CommitRoundRequest(
            attempt=plan_pb2.Attempt(
                job_id=self._document.job_id,
                round_index=self._commit.num_rounds,
                attempt=attempt,
            ),
            clusters=[
                edge_server_pb2.PreparedCluster(state=state, address=cluster.control_unit.address)
                for state, cluster in zip(states, self._hosts.clusters, strict=True)
            ],
        )
        return self._last(
            stub.CommitRound(request, wait_for_ready=True), edge_server.host_id, "commit the round"
        ).commit

    def _evaluates(self, local_steps: int) -> bool:
        """Whether this round begins by measuring the model that it starts from."""
        every = self._job.training.evaluate_every
        num_rounds = self._commit.num_rounds
        return not local_steps or bool(every and num_rounds and num_rounds % every == 0)

    def _attempt(self, plan: plan_pb2.Plan, attempt: int) -> plan_pb2.Attempt:
        return plan_pb2.Attempt(
            job_id=self._document.job_id,
            round_index=self._commit.num_rounds,
            attempt=attempt,
            plan_id=plan.plan_id,
        )

    def _control_unit_stub(
        self, control_unit: scheduler_pb2.Host
    ) -> control_unit_pb2_grpc.ControlUnitServiceStub:
        return control_unit_pb2_grpc.ControlUnitServiceStub(
            self._channels.channel(control_unit.address)
        )

    def _in_parallel(self, work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """Does the same for each item; the first failure cancels the others and is raised."""
        if not items:
            return []
        with ThreadPoolExecutor(len(items), "cluster") as executor:
            futures = [executor.submit(work, item) for item in items]
            done, _ = wait(futures, return_when="FIRST_EXCEPTION")
            failed = next((future for future in done if future.exception()), None)
            if failed is not None:
                self._giving_up.set()  # also for those that have not called yet
                self._cancel_calls()
                failed.result()
            return [future.result() for future in futures]

    def _unless_cancelled(self, work: Callable[[], T]) -> T:
        """Does what cannot be interrupted in a thread of its own, which is left behind when the job is cancelled."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # raised again where it is waited for
                done.set_exception(error)

        threading.Thread(target=run, name="uninterrupted", daemon=True).start()
        while not done.done():
            wait([done], timeout=_POLL_SECONDS)
            if self._cancelled.is_set():
                raise CancelledError(self._cancel_reason)
        return done.result()

    def _answers(self, call: Iterable[T], host_id: str, task: str) -> Iterator[T]:
        """The answers of a streaming call, while the job is wanted and the peer speaks."""
        with self._calls_lock:
            self._calls.add(call)
        if self._cancelled.is_set():
            self._cancel_calls()
        try:
            yield from within_silence(call, self._silence_seconds, host_id, lambda: task)
        except CancelledError as error:
            raise CancelledError(self._cancel_reason or str(error)) from error
        finally:
            with self._calls_lock:
                self._calls.discard(call)

    def _last(self, call: Iterable[T], host_id: str, task: str) -> T:
        """The last answer of a streaming call, whose others are signs of life."""
        last = deque(self._answers(call, host_id, task), maxlen=1)
        if not last:
            raise AttemptFailedError(f"{host_id} answered nothing when it was to {task}")
        return last[0]

    def _cancel_calls(self) -> None:
        with self._calls_lock:
            for call in self._calls:
                call.cancel()

    def _set_state(self, state: scheduler_pb2.JobState, message: str) -> None:
        self._document.state, self._document.message = state, message
        self._publish(status=self._document.status())
        self._jobs.save(self._document)

    def _end(self, state: scheduler_pb2.JobState, message: str) -> None:
        """Sets the last state; that a full disk cannot keep it makes no difference to whoever watches."""
        outcome = scheduler_pb2.JobState.Name(state).removeprefix("JOB_STATE_").lower()
        metrics.JOBS_ENDED.labels(outcome).inc()
        try:
            self._set_state(state, message)
        except OSError:
            logger.exception("the end of job %s could not be kept", self._document.job_id)

    def _publish(self, **event: Any) -> None:
        self._events.publish(Event(**event))


def _phases(summary: job_pb2.RoundSummary) -> dict[str, float]:
    return {
        "configure": summary.configure_seconds,
        "train": summary.training_seconds,
        "gather": summary.gather_seconds,
        "evaluate": summary.evaluation_seconds,
    }
