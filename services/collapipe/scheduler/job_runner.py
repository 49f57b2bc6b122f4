"""Runs a job from its queue entry to its last commit, and goes on after hosts were lost.

Start with `JobRunner.run`. What to do next is decided by `step` in `job_life/job_run.py`, and done here.
"""

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    InfeasibleError,
    PeerLostError,
    WrongStateError,
)
from collapipe.job_life import job_devices, job_run
from collapipe.job_life.failures import failure_of
from collapipe.job_life.job_devices import JobDevices
from collapipe.job_life.job_run import JobState
from collapipe.job_life.tries import GivesUp, Tries
from collapipe.planning.job_hosts import JobHosts
from collapipe.planning.job_warnings import few_rows, long_warm_up, random_base, slow_emulation
from collapipe.rpc import ChannelPool, why_unreachable
from collapipe.scheduler.attempt_tools import AttemptTools
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.host_choice import Choice, Gap, choose, lacking_hosts
from collapipe.scheduler.host_registry import SILENCE_SECONDS, HostRegistry, timestamp_after
from collapipe.scheduler.job_documents import JobDocument
from collapipe.scheduler.job_end import say_end
from collapipe.scheduler.job_preparation import JobPreparation, PreparedJob
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.missing_hosts import MissingHosts
from collapipe.scheduler.planner import Planner
from collapipe.scheduler.round_runner import Reusable, RoundRunner
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.scheduler.web.job_values import WatchedJob
from collapipe.telemetry import metrics
from collapipe.telemetry.spans import SPANS
from collapipe.v1 import scheduler_pb2

logger = logging.getLogger(__name__)


class _HostsMissingError(InfeasibleError):
    """An attempt has waited for hosts in vain."""


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
        self._progress = JobProgress(document, jobs, events)
        self._job = self._progress.job
        self._registry = registry
        self._events = events
        self._telemetry = telemetry
        schedule = self._job.schedule
        self._calls = HostCalls(
            channels, schedule.silence_seconds, self._look_around, self._why_unreachable
        )
        self._preparation = JobPreparation(self._progress, self._calls)
        self._state = JobState(Tries(schedule.retry_seconds), schedule.wait_for_hosts_seconds)
        self._gives_up: GivesUp | None = None
        """Why the job does not try again."""
        self._choice = Choice(self._state.devices)
        """What the last look for hosts has found."""
        self._told_waiting = ""
        """The hosts for which the job has said that it waits."""
        self._rounds: RoundRunner | None = None
        self._planner: Planner | None = None
        self._taking_part: set[str] = set()
        """Ids of all hosts of the last round that began."""
        self._lacking: list[str | Gap] = []
        """Ids and kinds of hosts that the job does without at present."""
        self._missing = MissingHosts(registry, self._progress.tell)
        self._had_no_plan = False
        """Whether the last attempt ended because no plan was possible."""
        self._failure = ""
        """Why the last attempt failed, until a round is committed."""
        self._cause = ""
        """Why the last attempt failed. Attempts that only waited for hosts in vain are skipped."""
        self._reusable: Reusable | None = None
        self._created = time.monotonic()
        self._is_cancelled = False
        self._is_taken_over = False
        """Whether an earlier process of the scheduler ran the job, and this one has committed no round yet."""

    @property
    def job_id(self) -> str:
        return self._progress.job_id

    @property
    def log(self) -> EventLog:
        """The events of this run of the job."""
        return self._events

    @property
    def host_clusters(self) -> frozenset[int]:
        """The clusters of the deployment that nobody else uses meanwhile."""
        return frozenset(self._job.host_clusters)

    @property
    def description(self) -> str:
        """What others wait for, in words."""
        num_rounds = self._job.training.rounds
        document = self._progress.document
        whose = f" of {document.owner}" if document.owner else ""
        left = WatchedJob.of(document, self._events).say_left()
        return (
            f"job {self.job_id}{whose} to end ({document.num_rounds_committed} of {num_rounds} rounds are committed"
            + f", {left})"
        )

    def run(self) -> None:
        """Runs the job until it ends or `stop` is called. When it has ended, its document has the outcome. After `stop`, it is
        queued again."""
        try:
            self._run_attempts()
            self._progress.end(scheduler_pb2.JOB_STATE_SUCCEEDED, self._why_early())
        except CancelledError as error:
            if self._is_cancelled:
                self._preparation.give_up()
                self._progress.end(scheduler_pb2.JOB_STATE_CANCELLED, str(error))
            else:
                self._progress.set_state(scheduler_pb2.JOB_STATE_QUEUED, str(error))
        except CollapipeError as error:
            self._give_up(self._registry.explain(error))
        except Exception as error:
            # A full disk or a bug must not leave the job without an outcome.
            logger.exception("job %s failed unexpectedly", self.job_id)
            self._give_up(f"the scheduler failed: {type(error).__name__}: {error}; see its log")
        finally:
            try:
                self._close_planner()
                # What still measures hosts would slow down the probes of the next job.
                self._calls.cancel("the job is over")
            finally:
                self._events.close()  # Otherwise clients would watch for ever.
                SPANS.end_job(self.job_id)

    def _give_up(self, message: str) -> None:
        if self._gives_up is not None and (why := say_end(self._gives_up, self._state.tries)):
            message = f"{message}; {why}"
        self._progress.tell(scheduler_pb2.INCIDENT_CODE_JOB_GIVEN_UP, message)
        self._progress.end(scheduler_pb2.JOB_STATE_FAILED, message)

    def _why_early(self) -> str:
        """Says why the job has succeeded with fewer rounds than asked for; empty if it has all rounds."""
        committed = self._progress.document.num_rounds_committed
        if committed >= self._job.training.rounds:
            return ""
        epsilon = self._progress.document.privacy.loss(self._job).epsilon
        return (
            f"ended after {committed} of {self._job.training.rounds} rounds: epsilon is {epsilon:.3g}, and another round would "
            f"exceed privacy.max_epsilon ({self._job.privacy.max_epsilon:g}). To go on, allow a larger epsilon and resume the job"
        )

    def tell_restart(self) -> None:
        """Tells that this process of the scheduler took the job over from an earlier one."""
        self._is_taken_over = True
        self._progress.tell(
            scheduler_pb2.INCIDENT_CODE_SCHEDULER_RESTARTED,
            "the scheduler was started again, and goes on with the job",
        )

    def cancel(self, reason: str) -> None:
        """Ends the job. Its last commit remains."""
        self._is_cancelled = True
        self._calls.cancel(reason)

    def say_waiting(self, reason: str) -> None:
        """Publishes what a queued job waits for."""
        self._progress.say(reason)

    def cancel_queued(self, reason: str) -> None:
        """Ends a job that will not get its turn."""
        self._progress.end(scheduler_pb2.JOB_STATE_CANCELLED, reason)
        self._events.close()

    def stop(self) -> None:
        """Ends this attempt. The next process of the scheduler goes on with the job. A cancelled job stays cancelled."""
        self._calls.cancel(
            "the scheduler was stopped: the job goes on when the scheduler runs again"
        )

    def _run_attempts(self) -> None:
        """Runs attempts until one succeeds. Raises the error of the last one."""
        action: job_run.Action = job_run.BeginAttempt()
        error: CollapipeError | OSError | None = None
        try:
            while not isinstance(action, job_run.End):
                event: job_run.Event
                try:
                    event, error = self._do(action), None
                except (CollapipeError, OSError) as failure:
                    error = failure
                    if isinstance(failure, CancelledError):
                        if self._calls.is_cancelled:
                            raise
                        error = AttemptFailedError(f"a host ended its call: {failure}")
                    event = self._attempt_failed(error)
                before = self._state.devices.no_plan
                self._state, action = job_run.step(self._state, event, time.monotonic())
                if error is not None:
                    error = self._explain(error, self._state.devices.no_plan - before)
        finally:
            self._end_rounds()
        self._gives_up = action.gives_up
        if error is not None:
            raise error

    def _do(self, action: job_run.Action) -> job_run.Event:
        """Does what was decided, and returns what came of it. Raises the error if it failed."""
        match action:
            case job_run.BeginAttempt():
                return self._begin_attempt(action.wait_seconds)
            case job_run.LookForHosts():
                self._told_waiting = ""
                return self._look_for_hosts()
            case job_run.WaitForHosts():
                self._wait_for_hosts(action.seconds_left)
                return self._look_for_hosts()
            case job_run.StopWaiting():
                raise self._hosts_missing(action)
            case job_run.Prepare():
                return self._prepare()
            case job_run.RunRound():
                return self._train() if action.trains else self._evaluate()
        raise AssertionError(f"the end of a job is no work: {action}")

    def _begin_attempt(self, wait_seconds: float) -> job_run.AttemptBegan:
        if self._state.tries.num_failures:
            self._progress.tell(
                scheduler_pb2.INCIDENT_CODE_ATTEMPT_FAILED,
                f"attempt {self._progress.document.attempt + 1} failed, and the next one begins "
                f"{f'in {wait_seconds:g} s' if wait_seconds else 'at once'}: {self._failure}",
            )
            self._calls.sleep(wait_seconds)
            self._progress.begin_attempt()
        self._calls.begin_attempt()
        self._progress.jobs.grants.begin_attempt(self.host_clusters)
        self._say(scheduler_pb2.JOB_STATE_PREPARING, "looks for hosts")
        return job_run.AttemptBegan(self._planned_hosts())

    def _attempt_failed(self, error: CollapipeError | OSError) -> job_run.AttemptFailed:
        """Ends the rounds of an attempt, and says how it failed."""
        unreached: dict[str, str] = {}
        if isinstance(error, PeerLostError):
            self._registry.suspect(error.host_id, f"job {self.job_id}: {error}")
            unreached = {
                device.host_id: device.incarnation
                for device in (self._planner.hosts.devices if self._planner else ())
                if error.host_id in (device.host_id, device.address)
            }
        failing = self._rounds.state.failing if self._rounds is not None else None
        self._end_rounds()
        failure = replace(failure_of(error), lacks_hosts=bool(self._lacking))
        return job_run.AttemptFailed(failure, unreached, failing)

    def _end_rounds(self) -> None:
        """Keeps what the next attempt can use of the rounds of this one."""
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            self._had_no_plan = not rounds.state.has_plan
            rounds.store_copied()
            self._reusable = rounds.for_next_attempt

    def _explain(
        self, error: CollapipeError | OSError, refused: Collection[str]
    ) -> CollapipeError | OSError:
        """Remembers why an attempt has failed. Returns the error, which names the newcomers that are left out because of it."""
        if refused:
            names = ", ".join(sorted(refused))
            error = WrongStateError(
                f"no plan was possible with the new devices {names}, so they are left out: {error}"
            )
        self._failure = (
            self._registry.explain(error)
            if isinstance(error, CollapipeError)
            else f"the scheduler could not use its disk: {error}"
        )
        if not isinstance(error, _HostsMissingError):
            self._cause = self._failure
        self._look_around()
        return error

    def _prepare(self) -> job_run.Prepared:
        """Prepares the job, measures the hosts that it does not know yet, and finds the commit from which the attempt goes on."""
        self._progress.warn(long_warm_up(self._job))
        self._progress.warn(random_base(self._job))
        hosts = self._choice.hosts
        assert hosts is not None
        prepared = self._preparation.prepare(hosts)
        self._progress.warn(few_rows(self._job, prepared.num_rows))
        self._close_planner()
        planner = self._planner = self._make_planner(hosts, prepared)
        tools = AttemptTools(self._progress, prepared, planner, self._calls)
        self._rounds = RoundRunner(tools, self._reusable, self._state.failing)
        return job_run.Prepared(self._rounds.is_trained)

    def _train(self) -> job_run.RoundCommitted:
        rounds, planner = self._running
        began, document = self._telemetry.now(), self._progress.document
        reached = document.num_rounds_reached
        self._run_round(rounds, planner, self._job.training.local_steps)
        self._look_at_emulation(planner.hosts, began)
        self._tell_recovery(f"round {rounds.num_rounds} is committed")
        self._failure, self._cause = "", ""
        return job_run.RoundCommitted(
            rounds.num_rounds,
            document.num_rounds_restorable,
            [device.host_id for device in planner.hosts.devices],
            is_new=rounds.num_rounds > reached,
            is_trained=rounds.is_trained,
        )

    def _evaluate(self) -> job_run.ModelEvaluated:
        rounds, planner = self._running
        self._run_round(rounds, planner, 0)
        self._tell_recovery("the final model is evaluated")
        return job_run.ModelEvaluated()

    @property
    def _running(self) -> tuple[RoundRunner, Planner]:
        assert self._rounds is not None and self._planner is not None
        return self._rounds, self._planner

    def _make_planner(self, hosts: JobHosts, prepared: PreparedJob) -> Planner:
        """Measures the hosts that the job does not know yet. Links that were cut are measured again."""
        self._progress.set_state(scheduler_pb2.JOB_STATE_PREPARING, "profiling devices")
        stored = self._progress.jobs.planner_state(self.job_id)
        unreachable = self._unreachable_among(hosts.devices)
        if stored is not None:
            for host_id in unreachable:
                stored.knowledge.forget_links(host_id)
            if self._had_no_plan:
                stored.knowledge.forget_dead_links()
            if unreachable or self._had_no_plan:
                # If this attempt commits nothing, the next one must not rely on these links either.
                self._progress.jobs.save_planner_state(self.job_id, stored)
        return self._calls.run_detached(
            lambda: Planner.for_job(
                self._job,
                prepared.model,
                prepared.sizes,
                hosts,
                self._calls.channels,
                self._calls.ask,
                self._telemetry,
                stored,
            )
        )

    def _look_at_emulation(self, hosts: JobHosts, since: float) -> None:
        """Warns if the emulation of a round did not hold. The planner logs a source that does not answer."""
        if self._progress.has_warned(scheduler_pb2.WARNING_CODE_SLOW_EMULATION):
            return
        source = self._telemetry.source
        instances = {getattr(host, source.instance_field): id for id, host in hosts.by_id.items()}
        with suppress(CollapipeError):
            series = source.window(since, self._telemetry.now())
            self._progress.warn(slow_emulation(series, instances))

    def _look_for_hosts(self) -> job_run.HostsSeen:
        self._choose(fewer=self._state.has_planned)
        hosts = self._choice.hosts
        if hosts is None:
            return job_run.HostsSeen(None)
        self._lacking = lacking_hosts(self._job, self._state.devices, hosts, self._choice.missing)
        if not self._state.devices.used:
            self._taking_part = set(hosts.by_id)
        return job_run.HostsSeen(
            {i: _processes(cluster.devices) for i, cluster in enumerate(hosts.clusters)},
            lacks_devices=bool(self._lacking),
            registered=[status.host.host_id for status in self._registry.statuses()],
            is_early=time.monotonic() - self._created < SILENCE_SECONDS,
        )

    @property
    def _awaited(self) -> Sequence[str | Gap]:
        """What the job waits for before an attempt."""
        return self._choice.missing or self._lacking

    def _wait_for_hosts(self, seconds_left: float) -> None:
        """Says for which hosts the job waits, and waits a moment."""
        waiting_for = ", ".join(map(str, self._awaited))
        absent = self._look_around(self._awaited, seconds_left)
        if waiting_for != self._told_waiting:
            self._progress.tell(
                scheduler_pb2.INCIDENT_CODE_WAITING_FOR_HOSTS,
                f"waits up to {seconds_left:.0f} s for {waiting_for}",
                *(host.host_id for host in absent if host.host_id),
            )
            self._told_waiting = waiting_for
        self._say(scheduler_pb2.JOB_STATE_PREPARING, f"waits for {waiting_for}")
        self._calls.sleep()

    def _hosts_missing(self, stopped: job_run.StopWaiting) -> _HostsMissingError:
        self._look_around(self._awaited, 0.0)
        waiting_for = ", ".join(map(str, self._awaited))
        setting = "retry_seconds" if stopped.is_retry_limit else "wait_for_hosts_seconds"
        limit = getattr(self._job.schedule, setting)
        cause = f". The attempt before failed: {self._cause}" if self._cause else ""
        return _HostsMissingError(
            f"the job needs {waiting_for}, and has waited for {stopped.waited_seconds:.0f} s: schedule.{setting} allows {limit:g} s since "
            "the first failure or the start. Start them (`collapipe up` does so on a local testbed), or ask for fewer devices in a new "
            f"job{cause}"
        )

    def _choose(self, *, fewer: bool) -> None:
        """Looks for the hosts of the job."""
        used = self._state.devices.all_used
        self._choice = choose(
            self._job,
            self._state.devices,
            self._registry,
            self._progress.document.num_rounds_reached,
            self._planner.hosts.by_id.keys() if self._planner else used,
            fewer=fewer,
        )
        self._take(self._choice.devices)

    def _planned_hosts(self) -> dict[int, set[str]]:
        """Returns the hosts of the last round that was planned, by cluster index; none before the first one."""
        document, jobs = self._progress.document, self._progress.jobs
        for round_index in (document.num_rounds_committed, document.num_rounds_committed - 1):
            found = jobs.find_round(self.job_id, round_index) if round_index >= 0 else None
            if found is not None:
                return {p.cluster_index: {stage.host_id for stage in p.stages} for p in found.plans}
        return {}

    def _take(self, devices: JobDevices) -> None:
        self._state = replace(self._state, devices=devices)

    def _run_round(self, rounds: RoundRunner, planner: Planner, local_steps: int) -> None:
        """Runs a round, or an evaluation if there are no local steps. If no plan is possible, and some devices are still being
        measured, it waits for them.

        Raises:
            CollapipeError: The round failed.
            OSError: A document could not be stored.
        """
        self._begin_round(rounds, planner)
        while awaited := planner.being_measured:
            before = planner.hosts
            try:
                rounds.run(local_steps, decides_anew=False)
                return
            except (InfeasibleError, AttemptFailedError) as error:
                if rounds.state.has_plan:
                    raise
                failure = error
            names = ", ".join(sorted(awaited))
            self._say(scheduler_pb2.JOB_STATE_RUNNING, f"waits until {names} are measured")
            while planner.is_measuring and awaited <= {h.host_id for h in self._registry.heard()}:
                self._calls.sleep()
                self._calls.call_meanwhile()
            if rounds.has_repeated:
                raise AttemptFailedError(
                    f"clusters repeat their rounds again, because a round of theirs could not be planned: {failure}"
                )
            self._begin_round(rounds, planner)
            if planner.hosts == before:
                break
        try:
            rounds.run(local_steps, decides_anew=self._state.decides_anew)
        except (InfeasibleError, AttemptFailedError):
            if not rounds.state.has_plan:
                metrics.PLANS_INFEASIBLE.inc()
            raise

    def _begin_round(self, rounds: RoundRunner, planner: Planner) -> None:
        """Adds devices that are new or back. Removes lost devices, unless they hold a state of the last commit.

        Raises:
            PeerLostError: A host that the next round needs is gone.
            WrongStateError: Such a host was restarted.
        """
        # These have suspects, too: if another job blames a host, this attempt goes on while the scheduler can call the host.
        before, now = planner.hosts, {host.host_id: host for host in self._registry.heard()}
        units = [cluster.control_unit.host_id for cluster in before.clusters]
        needed = {id: before.by_id[id].incarnation for id in (before.edge_server.host_id, *units)}
        for host_id, process in (needed | rounds.state_holders).items():
            if host_id not in now:
                why = self._registry.refusal(host_id)
                raise PeerLostError(
                    host_id,
                    f"{host_id} is refused: {why}"
                    if why
                    else f"{host_id} has sent no heartbeat for {SILENCE_SECONDS:g} s",
                )
            if now[host_id].incarnation != process:
                raise WrongStateError(f"{host_id} was restarted")
        self._choose(fewer=True)
        hosts = self._choice.hosts
        if hosts is not None:
            new = [d for d in hosts.devices if d.host_id not in before.by_id]
            if unreachable := self._unreachable_among(new):
                for host_id in unreachable:
                    planner.forget_links(host_id)
                self._progress.jobs.save_planner_state(self.job_id, planner.state())
            planner.take_hosts(hosts)
            missing = self._choice.missing
            self._lacking = lacking_hosts(self._job, self._state.devices, planner.hosts, missing)
            changed = self._taking_part ^ planner.hosts.by_id.keys()
            if self._taking_part and changed:
                self._progress.tell(
                    scheduler_pb2.INCIDENT_CODE_HOSTS_CHANGED,
                    f"goes on with {', '.join(device.host_id for device in planner.hosts.devices)}",
                    *sorted(changed),
                )
            self._taking_part = set(planner.hosts.by_id)
            ids = {
                index: [device.host_id for device in cluster.devices]
                for index, cluster in enumerate(planner.hosts.clusters)
            }
            processes = _processes(planner.hosts.devices)
            self._take(job_devices.begin_round(self._state.devices, ids, processes))
        self._look_around()
        reached = self._progress.document.num_rounds_reached
        repeats = f"repeats the rounds up to round {reached}" if rounds.num_rounds < reached else ""
        self._say(scheduler_pb2.JOB_STATE_RUNNING, repeats)

    def _unreachable_among(self, devices: Iterable[scheduler_pb2.Host]) -> list[str]:
        """Returns which of these devices others could not reach, because a link to them may still be cut. Each failure is reported
        once. A device that has restarted since is not reported."""
        changed, blamed = job_devices.forgive(self._state.devices, _processes(devices))
        self._take(changed)
        return blamed

    def _look_around(
        self, awaited: Sequence[str | Gap] | None = None, waits_seconds: float | None = None
    ) -> Sequence[scheduler_pb2.MissingHost]:
        """Tells of hosts that are lost or back, and publishes what the job lacks and how long it tries to go on.

        Returns the missing hosts.

        Args:
            awaited: What the job waits for. `None` if it does not wait, but goes on without the hosts in `_lacking`.
            waits_seconds: How long it still waits.
        """
        used = self._taking_part | self._state.devices.all_used
        trouble = scheduler_pb2.JobTrouble(
            missing=self._missing.look(used, awaited or self._lacking, self._choice.left_out),
            waiting=awaited is not None,
            num_failures=self._state.tries.num_failures,
            failure=self._failure,
        )
        left = waits_seconds
        if left is None:
            left = self._state.tries.seconds_to_try(time.monotonic())
        if left is not None:
            trouble.gives_up_at.CopyFrom(timestamp_after(left))
        self._progress.set_trouble(trouble)
        return trouble.missing

    def _why_unreachable(self, host_id: str) -> str:
        for status in self._registry.statuses():
            if status.host.host_id == host_id:
                return why_unreachable(self._calls.channels.channel(status.host.address), host_id)
        return ""

    def _tell_recovery(self, message: str) -> None:
        """Tells that the job got further, if attempts have failed or the scheduler was restarted before."""
        failures = self._state.tries.num_failures
        if failures or self._is_taken_over:
            attempts = "1 failed attempt" if failures == 1 else f"{failures} failed attempts"
            after = attempts if failures else "the restart of the scheduler"
            self._progress.tell(scheduler_pb2.INCIDENT_CODE_RECOVERED, f"{message} after {after}")
            self._is_taken_over = False

    def _say(self, state: scheduler_pb2.JobState, message: str) -> None:
        """Sets the state. After a failure, the message also says why the job tries again."""
        if self._failure:
            attempt = f"attempt {self._progress.document.attempt + 1}"
            doing = (
                f"{message}, because the attempt before it failed"
                if message
                else "follows a failure"
            )
            message = f"{attempt} {doing}: {self._failure}"
        self._progress.set_state(state, message)

    def _close_planner(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None


def _processes(hosts: Iterable[scheduler_pb2.Host]) -> dict[str, str]:
    return {host.host_id: host.incarnation for host in hosts}
