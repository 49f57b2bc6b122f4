"""Serves the RPCs of protos/collapipe/v1/scheduler.proto."""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from collapipe.errors import (
    CollapipeError,
    CorruptDataError,
    InvalidInputError,
    NotFoundError,
    NotPermittedError,
    OtherVersionError,
    WrongStateError,
)
from collapipe.planning.decisions import RoundDecision
from collapipe.planning.explanation import explain, idle_reasons
from collapipe.protocol import OURS
from collapipe.rpc import (
    SIGN_OF_LIFE_SECONDS,
    ChannelPool,
    check_addresses,
    check_is_caller,
    check_is_owner,
    check_not_revoked,
    check_protocol,
    describe_caller,
    is_owner,
    owner_name,
    work_with_signs_of_life,
)
from collapipe.scheduler.calls_back import check_is_reached, find_twin
from collapipe.scheduler.client_limits import check_may_wait, read_job
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.host_claims import check_claims
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.host_rows import collect_rows
from collapipe.scheduler.job_documents import JobDocument
from collapipe.scheduler.job_runner import JobRunner
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.model_use import ModelUse
from collapipe.scheduler.plan_messages import replay
from collapipe.scheduler.privacy_account import check_first_round
from collapipe.scheduler.retention import Retention
from collapipe.scheduler.rollback import roll_back
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.scheduler.trace_collection import collect_trace
from collapipe.scheduler.turns import Turn, turns
from collapipe.scheduler.web.rates import RateReader
from collapipe.scheduler.web.records import Records
from collapipe.scheduler.web.report import events_of, report
from collapipe.scheduler.web.snapshot import Snapshots
from collapipe.v1 import plan_pb2, scheduler_pb2, scheduler_pb2_grpc

logger = logging.getLogger(__name__)

_RELEASE_SECONDS = 5.0
"""How long a deletion waits until nothing uses the job."""


_QUEUE_SECONDS = 10.0
"""How often a queued job says anew what it waits for."""

_KEPT_LOGS = 16
"""Jobs that are over and whose events stay in memory, for clients that lost their connection. The page reads the others from disk."""

_MOST_NAMED = 3
"""How many of those for which a queued job waits its status names."""


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves hosts and clients, and runs jobs and uses of models: those that share no cluster at the same time."""

    def __init__(
        self,
        jobs: JobStore,
        channels: ChannelPool,
        registry: HostRegistry,
        telemetry: Telemetry,
        *,
        retention: Retention,
        jobs_at_once: int,
        abandon_jobs: bool = False,
    ) -> None:
        self._jobs = jobs
        self._retention = retention
        self._jobs_at_once = jobs_at_once
        self._channels = channels
        self._registry = registry
        self._telemetry = telemetry
        self.snapshots = Snapshots(registry, jobs, self, RateReader(telemetry, registry))
        """What the page and clients show of the present."""
        self._changed = threading.Condition()
        self._submission = threading.Lock()
        """Held while a job is counted and queued, so that two calls do not take the last place both."""
        self._queue: deque[JobRunner | ModelUse] = deque()
        self._running: dict[JobRunner | ModelUse, threading.Thread] = {}
        """The thread of each, in the order in which they began."""
        self._uses: set[ModelUse] = set()
        self._runners: dict[str, JobRunner] = {}
        self._logs: dict[str, EventLog] = {}
        self._going_back: set[str] = set()
        """Ids of the jobs that go back to an earlier commit. They and uses of their models wait in the queue meanwhile."""
        self._closed = False
        for document in jobs.take_over(abandon=abandon_jobs):
            self._enqueue(document, is_taken_over=True)
        self._delete_expired()
        self._thread = threading.Thread(target=self._give_turns, name="jobs", daemon=True)
        self._thread.start()

    def RegisterHost(
        self, request: scheduler_pb2.RegisterHostRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.RegisterHostResponse:
        host = request.host
        # A host is kept, and others get it. So it must not have more than this scheduler knows.
        host.DiscardUnknownFields()
        check_claims(host, context)
        twin = ""
        try:
            check_addresses(context, filter(None, (host.address, host.metrics_address)))
            versions = check_protocol(context, host.host_id, "the scheduler")
            self._channels.know(host.host_id, host.address)
            present = self._registry.heard_as(host.host_id)
            if twin := find_twin(host, present, self._channels):
                raise WrongStateError(twin)
            check_is_reached(host, versions, self._channels)
        except (OtherVersionError, WrongStateError, NotPermittedError) as error:
            self._registry.refuse(host, str(error), is_twin=bool(twin))
            if isinstance(error, OtherVersionError):  # The scheduler is not lost.
                raise NotPermittedError(str(error)) from None
            raise
        self._registry.register(host)
        answer = scheduler_pb2.RegisterHostResponse(
            least_grant=self._least_grant(host), protocol=OURS
        )
        revoked = self._channels.security.revoked
        if revoked.sha256:
            answer.revoked_keys.CopyFrom(revoked.signed)
        answer.heartbeat_interval.FromMilliseconds(int(self._registry.heartbeat_seconds * 1000))
        return answer

    def Heartbeat(
        self, request: scheduler_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.HeartbeatResponse:
        answer = scheduler_pb2.HeartbeatResponse(num_deletions=request.num_deletions)
        answer.heartbeat_interval.FromMilliseconds(int(self._registry.heartbeat_seconds * 1000))
        revoked = self._channels.security.revoked
        if revoked.sha256 and revoked.sha256 != request.revoked_keys_sha256:
            answer.revoked_keys.CopyFrom(revoked.signed)
        try:
            check_not_revoked(context, revoked)
        except NotPermittedError:
            # A revoked issuing authority may have signed the certificate of this host, too. It must learn so to refuse others.
            if not answer.HasField("revoked_keys"):
                raise
            return answer
        check_is_caller(context, request.host_id)
        host = self._registry.heartbeat(request.host_id, request.incarnation, request.unshaped)
        job_ids, total = self._jobs.deletions_after(request.num_deletions)
        answer.deleted_job_ids.extend(job_ids)
        answer.num_deletions = total
        answer.least_grant = self._least_grant(host)
        return answer

    def _least_grant(self, host: scheduler_pb2.Host) -> int:
        is_edge_server = host.role == scheduler_pb2.HOST_ROLE_EDGE_SERVER
        return self._jobs.grants.least(None if is_edge_server else host.cluster_index)

    def ListHosts(
        self, request: scheduler_pb2.ListHostsRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.ListHostsResponse:
        return scheduler_pb2.ListHostsResponse(
            hosts=[*self._registry.statuses(), *self._registry.refused()]
        )

    def SubmitJob(
        self, request: scheduler_pb2.SubmitJobRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.SubmitJobResponse:
        config, owner = read_job(request.config_json), owner_name(context)
        check_first_round(config)
        with self._submission:
            check_may_wait(owner, self._jobs.all())
            if request.resume:
                document = self._jobs.reopen(
                    config, owner, lambda job: is_owner(context, job.owner)
                )
            else:
                document = self._jobs.create(config, owner)
            self._enqueue(document)
        return scheduler_pb2.SubmitJobResponse(job_id=document.job_id)

    def CheckResume(
        self, request: scheduler_pb2.CheckResumeRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.CheckResumeResponse:
        config = read_job(request.config_json)
        check_first_round(config)
        document = self._jobs.find_resumable(
            config, owner_name(context), lambda job: is_owner(context, job.owner)
        )
        return scheduler_pb2.CheckResumeResponse(
            job=document.status(), num_rounds_restorable=document.num_rounds_restorable
        )

    def _check_owned(self, job_id: str, context: grpc.ServicerContext) -> None:
        """Refuses a job that is not the caller's. Raises `NotFoundError` or `NotPermittedError`."""
        check_is_owner(context, self._jobs.get(job_id).owner, job_id)

    def _enqueue(self, document: JobDocument, *, is_taken_over: bool = False) -> None:
        log = EventLog()
        log.publish(Event(status=document.status()))
        runner = JobRunner(
            document, self._registry, self._jobs, self._channels, log, self._telemetry
        )
        if is_taken_over:
            runner.tell_restart()
        with self._changed:
            self._logs.pop(document.job_id, None)  # A resumed job becomes the newest one.
            self._logs[document.job_id] = log
            self._runners[document.job_id] = runner
            self._queue.append(runner)
            self._changed.notify_all()

    def WatchJob(
        self, request: scheduler_pb2.WatchJobRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.WatchJobResponse]:
        document = self._jobs.get(request.job_id)
        log = self.log(request.job_id)
        if log is None:  # It ended before this scheduler started, or many others have ended since.
            yield Event(status=document.status())
            return
        seen = request.after if request.log_id == log.log_id else 0
        for event in log.watch(SIGN_OF_LIFE_SECONDS, seen):
            yield event if event is not None else Event()

    def GetJobSnapshot(
        self, request: scheduler_pb2.GetJobSnapshotRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.GetJobSnapshotResponse:
        snapshot = self.snapshots.of_job(request.job_id, request.clusters)
        return scheduler_pb2.GetJobSnapshotResponse(snapshot_json=json.dumps(snapshot))

    def ListJobs(
        self, request: scheduler_pb2.ListJobsRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.ListJobsResponse:
        return scheduler_pb2.ListJobsResponse(jobs=self._jobs.statuses())

    def CancelJob(
        self, request: scheduler_pb2.CancelJobRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.CancelJobResponse:
        self._check_owned(request.job_id, context)
        self.cancel(request.job_id)
        return scheduler_pb2.CancelJobResponse()

    def cancel(self, job_id: str) -> None:
        """Stops a job, whoever owns it; raises `NotFoundError` if it does not run."""
        with self._changed:
            runner = self._runners.get(job_id)
            was_queued = runner is not None and runner in self._queue
            if runner is not None and was_queued:
                self._queue.remove(runner)
                del self._runners[job_id]
                self._changed.notify_all()
        if runner is None:
            raise NotFoundError(
                f"job {job_id} is neither queued nor running, so it cannot be cancelled: `collapipe jobs list` lists the jobs"
            )
        if was_queued:
            runner.cancel_queued("the job was cancelled")
            self._delete_expired()
            with self._changed:
                self._changed.notify_all()
        else:
            runner.cancel("the job was cancelled")

    def log(self, job_id: str) -> EventLog | None:
        """Returns the events of a job; `None` if it ended before this scheduler started, or many others have ended since."""
        with self._changed:
            return self._logs.get(job_id)

    def queue(self) -> list[str]:
        """Returns the ids of the jobs that wait for their turn, the next one first."""
        with self._changed:
            return [entry.job_id for entry in self._queue if isinstance(entry, JobRunner)]

    def RollBackJob(
        self, request: scheduler_pb2.RollBackJobRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.RollBackJobResponse]:
        """Makes an earlier commit the last one of a job that does not run."""
        self._check_owned(request.job_id, context)

        def work(emit: Callable[[scheduler_pb2.RollBackJobResponse], None]) -> None:
            with self._goes_back(request.job_id):
                answer = roll_back(request, self._registry, self._jobs, self._channels)
            emit(answer)

        # If the client goes away, the work goes on: the edge server may have changed the model already.
        yield from work_with_signs_of_life(
            work, scheduler_pb2.RollBackJobResponse, lambda reason: None, context
        )

    @contextmanager
    def _goes_back(self, job_id: str) -> Iterator[None]:
        """Keeps a job and the uses of its model in the queue. Afterwards, its log begins anew.

        Raises:
            NotFoundError: There is no such job.
            WrongStateError: The job is not over, its model is in use, or it goes back already.
        """
        with self._changed:
            document = self._jobs.get(job_id)
            if not document.has_ended:
                state = scheduler_pb2.JobState.Name(document.state).removeprefix("JOB_STATE_")
                raise WrongStateError(
                    f"job {job_id} is {state.lower()}, and only a job that is over can go back to an earlier commit: wait for "
                    "its end, or cancel it"
                )
            if any(isinstance(one, ModelUse) and one.job_id == job_id for one in self._running):
                raise WrongStateError(
                    f"the model of job {job_id} is in use, so the job cannot go back to an earlier commit: wait until the "
                    "use has ended"
                )
            if job_id in self._going_back:
                raise WrongStateError(
                    f"job {job_id} goes back to an earlier commit already: wait for the end"
                )
            self._going_back.add(job_id)
            log = self._logs.get(job_id)
        try:
            yield
            with self._changed:
                if log is not None and self._logs.get(job_id) is log:
                    del self._logs[job_id]
        finally:
            with self._changed:
                self._going_back.discard(job_id)
                self._changed.notify_all()

    def DeleteJob(
        self, request: scheduler_pb2.DeleteJobRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.DeleteJobResponse:
        job_id = request.job_id
        self._check_owned(job_id, context)
        self._jobs.check_has_ended(job_id)
        with self._changed:
            # A job or a use that has just ended is about to release its hosts.
            self._changed.wait_for(lambda: not self._is_used(job_id), _RELEASE_SECONDS)
            if not self._delete(job_id, f"{describe_caller(context)} asked for it"):
                raise WrongStateError(
                    f"the model of job {job_id} is used at the moment, and was for the last {_RELEASE_SECONDS:g} s: delete "
                    "the job when `predict` or `evaluate` has ended"
                )
        self._jobs.give_room_back()
        return scheduler_pb2.DeleteJobResponse()

    def _is_used(self, job_id: str) -> bool:
        users = [*self._queue, *self._uses, *self._running]
        return job_id in self._going_back or any(user.job_id == job_id for user in users)

    def _delete(self, job_id: str, reason: str) -> bool:
        """Deletes a job, unless it is in use. Returns whether it did. Raises the errors of `JobStore.delete`."""
        with self._changed:
            if self._is_used(job_id):
                return False
            self._jobs.delete(job_id, reason)
            self._logs.pop(job_id, None)
        return True

    def _delete_expired(self) -> None:
        """Deletes the jobs that are not kept, and old logs. Jobs in use are deleted later, when another one has ended."""
        with self._changed:
            over = [job_id for job_id in self._logs if job_id not in self._runners]
            for job_id in over[:-_KEPT_LOGS]:
                del self._logs[job_id]
        for job_id, reason in self._retention.expired(self._jobs.all(), time.time()):
            try:
                self._delete(job_id, reason)
            except (CollapipeError, OSError) as error:  # It may be resumed or deleted just now.
                logger.warning("job %s is kept: %s", job_id, error)

    def GetPlans(
        self, request: scheduler_pb2.GetPlansRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.GetPlansResponse:
        document = self._jobs.round(request.job_id, request.round_index)
        return scheduler_pb2.GetPlansResponse(plans=document.plans)

    def ExplainDecision(
        self, request: scheduler_pb2.ExplainDecisionRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.ExplainDecisionResponse:
        document = self._jobs.round(request.job_id, request.round_index)
        result = self._jobs.find_result(request.job_id, request.round_index, document.attempt)
        committed = result.committed if result else None
        with _refusing_contradictions():
            decision = RoundDecision.from_json(document.decision)
            explanation = "\n".join(explain(decision, committed))
        return scheduler_pb2.ExplainDecisionResponse(
            explanation=explanation,
            decision_json=json.dumps(document.decision),
            committed=committed,
            idle=idle_reasons(decision),
        )

    def ReplayDecision(
        self, request: scheduler_pb2.ReplayDecisionRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.ReplayDecisionResponse:
        document = self._jobs.round(request.job_id, request.round_index)
        with _refusing_contradictions():
            replayed = replay(RoundDecision.from_json(document.decision), document.plans)
        return scheduler_pb2.ReplayDecisionResponse(recorded=document.plans, replayed=replayed)

    def GetRecords(
        self, request: scheduler_pb2.GetRecordsRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.GetRecordsResponse]:
        document = self._jobs.get(request.job_id)
        records = Records(self._registry, self._jobs, self._channels)
        events = events_of(document, self._jobs, self.log(document.job_id))
        for part in report(document, records, events, self.queue()):
            yield scheduler_pb2.GetRecordsResponse(part_json=json.dumps(part, allow_nan=False))

    def DumpJob(
        self, request: scheduler_pb2.DumpJobRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.DumpJobResponse]:
        job_id = request.job_id
        clusters = self._jobs.host_clusters(job_id)
        for row in self._jobs.dump(job_id):
            for part in row.parts():
                yield scheduler_pb2.DumpJobResponse(
                    table=row.table, round_index=row.round_index, document_json=part
                )
        yield from collect_rows(job_id, clusters, self._registry.statuses(), self._channels)

    def GetTrace(
        self, request: scheduler_pb2.GetTraceRequest, context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.GetTraceResponse]:
        """Streams the spans of every host in the last attempt at a round."""
        document = self._jobs.round(request.job_id, request.round_index)
        attempt = plan_pb2.Attempt(
            job_id=request.job_id, round_index=request.round_index, attempt=document.attempt
        )
        yield from collect_trace(attempt, document.plans, self._registry.statuses(), self._channels)

    def UseModel(
        self,
        request_iterator: Iterator[scheduler_pb2.UseModelRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[scheduler_pb2.UseModelResponse]:
        """Uses the model of a job, behind the jobs and uses that came before and share a cluster with it."""
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("part") != "start":
            raise InvalidInputError("a use of a model begins with UseModelStart")
        self._check_owned(first.start.job_id, context)
        chunks = (request.chunk for request in request_iterator)
        use = ModelUse(first.start, chunks, self._registry, self._jobs, self._channels)
        context.add_callback(lambda: use.cancel("the client went away"))
        with self._changed:
            self._uses.add(use)
            self._queue.append(use)
            self._changed.notify_all()
        try:
            for output in use.outputs(lambda: self._waits_for(use)):
                yield scheduler_pb2.UseModelResponse(output=output)
        finally:
            with self._changed:
                self._uses.discard(use)
                self._changed.notify_all()

    def _waits_for(self, use: ModelUse) -> str:
        """Returns what has its turn before a use, in words."""
        with self._changed:
            ahead = next((turn.ahead for turn in self._turns() if turn.entry is use), ())
        return "; then ".join(one.description for one in ahead)

    def close(self) -> None:
        """Stops the running jobs, ends all uses of models, and starts no other. Jobs go on when the scheduler runs again."""
        with self._changed:
            self._closed = True
            runners, uses = list(self._runners.values()), list(self._uses)
            self._changed.notify_all()
        for runner in runners:
            runner.stop()
        for use in uses:
            use.cancel("the scheduler was stopped: use the model when it runs again")
            use.give_up_turn()
        self._thread.join()
        for thread in list(self._running.values()):
            thread.join()

    def _turns(self) -> Iterator[Turn[JobRunner | ModelUse]]:
        return turns(self._queue, list(self._running), self._jobs_at_once, self._going_back)

    def _give_turns(self) -> None:
        """Starts the jobs and uses whose turn has come, whenever something has changed."""
        with self._changed:
            while not self._closed:
                for turn in list(self._turns()):
                    if turn.may_begin:
                        self._start(turn.entry)
                    elif isinstance(turn.entry, JobRunner):
                        turn.entry.say_waiting(_behind(turn))
                self._jobs.save_ends()
                # What a job waits for also says how long that still takes.
                is_due = self._queue or self._jobs.has_unsaved_ends
                self._changed.wait(_QUEUE_SECONDS if is_due else None)

    def _start(self, entry: JobRunner | ModelUse) -> None:
        self._queue.remove(entry)
        thread = threading.Thread(
            target=self._run, args=(entry,), name=f"job {entry.job_id}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # The system has no more threads or memory.
            logger.exception("job %s cannot begin yet", entry.job_id)
            self._queue.insert(0, entry)
            return
        self._running[entry] = thread

    def _run(self, entry: JobRunner | ModelUse) -> None:
        try:
            entry.run()
        except Exception:  # What it has must be free for others in any case.
            logger.exception("job %s ended without an outcome", entry.job_id)
        if isinstance(entry, JobRunner):
            self._store_events(entry)
        self._jobs.grants.end_attempt(entry.host_clusters)
        with self._changed:
            del self._running[entry]
            # A new runner may have resumed the job meanwhile.
            if self._runners.get(entry.job_id) is entry:
                del self._runners[entry.job_id]
                self._logs[entry.job_id] = self._logs.pop(entry.job_id)  # The newest one.
            self._delete_expired()
            self._changed.notify_all()
        self._jobs.give_room_back()

    def _store_events(self, runner: JobRunner) -> None:
        """Stores the events of a run that is over, for reports after a restart. The job may have been resumed meanwhile."""
        job_id = runner.job_id
        try:
            events = events_of(self._jobs.get(job_id), self._jobs, runner.log)
            self._jobs.save_events(job_id, events or [])
        except (CollapipeError, OSError):
            logger.exception("the events of job %s could not be stored", job_id)


def _behind(turn: Turn[JobRunner | ModelUse]) -> str:
    """Returns what a queued job waits for."""
    if not turn.ahead:
        return "waits until the job has gone back to an earlier commit"
    if turn.entry.host_clusters.isdisjoint(turn.ahead[0].host_clusters):
        return f"waits until one of the {len(turn.ahead)} that run ends, because --jobs-at-once allows no more"
    names = [one.description for one in turn.ahead[:_MOST_NAMED]]
    if more := len(turn.ahead) - len(names):
        names.append(f"{more} more")
    return f"waits for {', for '.join(names)}"


@contextmanager
def _refusing_contradictions() -> Iterator[None]:
    """Turns the errors of a stored decision whose parts contradict each other into `CorruptDataError`."""
    try:
        yield
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        raise CorruptDataError(
            f"the stored decision contradicts itself ({type(error).__name__}: {error}): restore a copy of the database"
        ) from error
