"""One imitated job: the scheduler's part, with the real decisions, a store that loses power between any two writes, and the world."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from collapipe.job_life import job_devices, job_run
from collapipe.job_life.attempt import (
    Phase,
)
from collapipe.job_life.commits import Kept
from collapipe.job_life.failing_clusters import LONGEST_PAUSE
from collapipe.job_life.job_devices import Device, LeftOut, Why
from collapipe.job_life.job_run import JobPhase, JobState
from collapipe.job_life.tries import Failure, GivesUp, Kind, Tries
from collapipe.v1.plan_pb2 import ClusterState

from .attempt_shell import AttemptShell, by_cluster
from .store import NUM_ROUNDS, PowerLostError, Repeats, RoundFailedError, Store, draw_rules
from .world import EDGE_SERVER, World, promise, unit_of

_LONGEST_WAIT = 15.0
_ALLOWED_SECONDS = 100.0
"""Longest time without progress, besides the waits that the rules allow. In 60,000 jobs, it was 42 s at most."""
_MOST_ATTEMPTS = 300
_MOST_STEPS = 20_000
_MOST_REPEATS = 11


class ImitatedJob:
    """One job from its beginning to its end.

    Args:
        seed: Gives all that happens.
        tells: Whether to note in `world.story` what happens, which takes as long as the job.
    """

    def __init__(self, seed: int, *, tells: bool = False) -> None:
        self.world = World(seed, num_clusters=1 + seed % 3, tells=tells)
        self.rules = draw_rules(self.world)
        chance = self.world.random.choice
        self.store = Store(chance((0.0, 0.0, 0.01, 0.05)), chance((0.0, 0.0, 0.0, 0.02)))
        self._forget()
        self.last_progress = 0.0
        self.seen: set[tuple[Phase | JobPhase, type]] = set()

    def _forget(self) -> None:
        """Forgets what is in memory only."""
        self.job = JobState(Tries(self.rules.retry_seconds), self.rules.wait_for_hosts_seconds)
        self.began_at = self.world.now
        self.lacks_devices = False
        self.chosen: list[Device] = []
        self.shell: AttemptShell | None = None
        self.kept: Kept | None = None
        self.results: dict[int, ClusterState] = {}
        self.repeats = Repeats()
        self.num_to_repeat = 0
        """Committed rounds that the last attempt would have had to repeat before the next round."""

    def run(self) -> GivesUp | None:
        """Runs the job to its end, and returns why it gave up; `None` if it succeeded. Raises `BrokenPromiseError`."""
        for _ in range(_MOST_ATTEMPTS):
            try:
                end = self._run_attempts()
            except PowerLostError:
                self.world.tell("the scheduler loses power")
                self._forget()
                self.store.attempt += 1
                self.last_progress = self.world.now
                continue
            if end is None:
                self._check_end()
            return end
        raise AssertionError("power was lost too often")

    def write(self, change: Callable[[Store], object]) -> None:
        """Changes the store.

        Raises:
            PowerLostError: Power was lost before or after the change.
            RoundFailedError: The disk is full.
        """
        self._may_lose_power()
        if self.world.happens(self.store.is_full):
            self.world.tell("the disk is full")
            raise RoundFailedError(Failure(Kind.PASSING))
        change(self.store)
        self._may_lose_power()

    def _may_lose_power(self) -> None:
        if self.world.happens(self.store.loses_power):
            raise PowerLostError

    def _check_end(self) -> None:
        edge, store, rules = self.world.edge, self.store, self.rules
        number = edge.commit.num_rounds
        is_spent = not rules.is_private_enough(len(store.spent), self.num_to_repeat + 1)
        promise(number == NUM_ROUNDS or is_spent, "the job ended too early")
        promise(store.num_committed == number, "the store has another number of rounds")
        promise(store.num_reached == number, "the job ended with fewer rounds than it had")
        lost = set(range(number)) - store.results.keys()
        promise(not lost, f"the results of rounds {lost} are lost")
        made = {index: edge.made_by[index + 1] for index in range(number)}
        other = [index for index, attempt in made.items() if store.results[index] != attempt]
        promise(not other, f"rounds {other} have the results of other attempts")

    def _run_attempts(self) -> GivesUp | None:
        action: job_run.Action = job_run.BeginAttempt()
        for _ in range(_MOST_STEPS):
            if isinstance(action, job_run.End):
                return action.gives_up
            try:
                action = self._step(self._do(action))
            except RoundFailedError as failed:
                action = self._step(self._attempt_failed(failed.failure))
                self.world.tell(f"attempt {self.store.attempt} failed: {failed.failure} → {action}")
                self._check_bounds()
        raise AssertionError(f"it still runs after {_MOST_STEPS} steps")

    def _step(self, event: job_run.Event) -> job_run.Action:
        phase, newcomers = self.job.phase, self.job.devices.newcomers
        self.job, action = job_run.step(self.job, event, self.world.now)
        self.seen.add((phase, type(event)))
        text = f"{type(event).__name__} leads from {phase.name} to {self.job.phase.name}"
        promise(self.job.phase in job_run.TRANSITIONS[phase, type(event)].to, text)
        if isinstance(event, job_run.AttemptFailed) and event.failing is not None:
            promise(self.job.failing == event.failing, "it forgets which clusters have failed")
        if isinstance(event, job_run.AttemptFailed) and event.failure.kind is Kind.NO_PLAN:
            tried_again = newcomers - self.job.devices.no_plan
            promise(
                not tried_again, f"no plan is possible with {tried_again}, which are tried again"
            )
        is_over = self.job.phase is JobPhase.ENDED
        promise(is_over == isinstance(action, job_run.End), "a job that has ended goes on")
        return action

    def _do(self, action: job_run.Action) -> job_run.Event:
        """Does what was decided, as `JobRunner` does; raises `RoundFailedError`."""
        world = self.world
        match action:
            case job_run.BeginAttempt():
                promise(0 <= action.wait_seconds <= _LONGEST_WAIT, "it waits too long")
                may = self.rules.retry_seconds or not self.job.tries.num_failures
                promise(may, "it tries again although it must not")
                world.now += action.wait_seconds
                if self.job.tries.num_failures:
                    self.write(lambda store: setattr(store, "attempt", store.attempt + 1))
                return job_run.AttemptBegan(self._planned())
            case job_run.LookForHosts():
                return self._look_for_hosts()
            case job_run.WaitForHosts():
                is_there = 0 <= action.seconds_left <= self._longest_wait
                promise(is_there, f"it says that it waits for {action.seconds_left} s")
                world.now += 1.0
                return self._look_for_hosts()
            case job_run.StopWaiting():
                is_over = action.waited_seconds > self.rules.wait_for_hosts_seconds
                is_over |= self.job.tries.seconds_left(world.now) < 0
                promise(is_over, "it stops waiting too early")
                promise(action.waited_seconds <= self._longest_wait + 2.0, "it waits too long")
                raise RoundFailedError(Failure(Kind.NO_PLAN, lacks_hosts=self.lacks_devices))
            case job_run.Prepare():
                if world.happens(0.01):
                    raise RoundFailedError(Failure(Kind.HOST_LOST, EDGE_SERVER))
                self._forgive(self.chosen)
                self.shell = AttemptShell(self, by_cluster(self.chosen))
                return job_run.Prepared(self.shell.is_trained)
            case job_run.RunRound():
                assert self.shell is not None
                return self._train(self.shell) if action.trains else self._evaluate(self.shell)
        raise AssertionError(action)

    @property
    def _longest_wait(self) -> float:
        return max(self.rules.wait_for_hosts_seconds, self.rules.retry_seconds)

    def _planned(self) -> dict[int, frozenset[str]]:
        """Returns the devices of the last round that was planned, by cluster."""
        return self.store.rounds[max(self.store.rounds)].devices if self.store.rounds else {}

    def _attempt_failed(self, failure: Failure) -> job_run.AttemptFailed:
        unreached, shell = {}, self.shell
        if failure.kind is Kind.HOST_LOST and failure.host_id in self.world.hosts:
            unreached = {failure.host_id: str(self.world.hosts[failure.host_id].process)}
        if shell is None:
            return job_run.AttemptFailed(failure, unreached)
        self.shell, self.kept = None, shell.state.kept
        self.results = {i: shell.results[i] for i in self.kept.processes} if self.kept else {}
        return job_run.AttemptFailed(failure, unreached, shell.state.failing)

    def _check_bounds(self) -> None:
        """Checks that the state stays small, and that the job gets further or ends in its time."""
        devices, hosts = self.job.devices, self.world.hosts.keys()
        known = [devices.newcomers, devices.no_plan, devices.not_finite, devices.unreached.keys()]
        for names in (*known, devices.restarting.num_restarts.keys()):
            promise(set(names) <= hosts, "the state has devices that do not exist")
        # A job may wait for its first hosts, and try again after its first failure.
        allowed = self._longest_wait + self.rules.retry_seconds + _ALLOWED_SECONDS
        waited = self.world.now - self.last_progress
        promise(waited <= allowed, "it neither got further nor ended")
        self.repeats.fail()
        promise(self.repeats.number <= _MOST_REPEATS, "it repeats the same rounds again and again")

    # The devices that take part.

    def _choose(self) -> list[Device]:
        present = self.world.present()
        devices, left_out = job_devices.choose(
            self.job.devices, present, self.store.num_reached, needs_all=False
        )
        self.job = replace(self.job, devices=devices)
        self._check_choice(present, left_out)
        return [device for device in present if device.host_id not in left_out]

    def _check_choice(self, present: list[Device], left_out: Mapping[str, LeftOut]) -> None:
        devices = self.job.devices
        possible = {d.cluster for d in present if d.host_id not in devices.no_plan}
        taken = [d for d in present if d.host_id not in left_out]
        promise({d.cluster for d in taken} == possible, "a cluster with devices got none")
        doubtful = devices.not_finite | devices.restarting.left_out(self.store.num_reached).keys()
        in_doubt = [d for d in taken if d.is_suspect or d.host_id in doubtful]
        mixed = {d.cluster for d in taken if d not in in_doubt} & {d.cluster for d in in_doubt}
        text = f"devices in doubt beside others in clusters {mixed}"
        promise(devices.takes_doubtful or not mixed, text)
        for reason in left_out.values():
            if reason.why is Why.RESTARTS:
                most = self.store.num_reached + LONGEST_PAUSE
                promise(self.store.num_reached < reason.until <= most, "a pause is wrong")

    def _look_for_hosts(self) -> job_run.HostsSeen:
        self.world.disturb_devices()
        self.chosen = self._choose()
        processes = by_cluster(self.chosen)
        is_enough = len(processes) == self.world.num_clusters
        if not is_enough:
            return job_run.HostsSeen(None)
        present = {device.host_id for device in self.world.present()}
        used = self.job.devices.all_used
        self.lacks_devices = not used <= {device.host_id for device in self.chosen}
        is_early = self.world.now - self.began_at < 10.0
        return job_run.HostsSeen(processes, self.lacks_devices, present, is_early)

    def _forgive(self, chosen: list[Device]) -> None:
        processes = {device.host_id: device.process for device in chosen}
        devices, blamed = job_devices.forgive(self.job.devices, processes)
        promise(not devices.unreached.keys() & processes.keys(), "a device is blamed for ever")
        promise(set(blamed) <= processes.keys(), "another device is blamed")
        self.job = replace(self.job, devices=devices)

    def _use(self, chosen: list[Device]) -> dict[int, dict[str, str]]:
        """Takes note of the devices that take part, and returns their processes by cluster."""
        self._forgive(chosen)
        processes = {device.host_id: device.process for device in chosen}
        found = by_cluster(chosen)
        ids = {cluster: list(of_cluster) for cluster, of_cluster in found.items()}
        devices = job_devices.begin_round(self.job.devices, ids, processes)
        self.job = replace(self.job, devices=devices)
        return found

    # Attempts.

    def _train(self, shell: AttemptShell) -> job_run.RoundCommitted:
        reached = self.store.num_reached
        self._run_round(shell, trains=True)
        self.last_progress, self.num_to_repeat = self.world.now, 0
        self.repeats.commit(self.world.edge.commit)
        return job_run.RoundCommitted(
            shell.state.num_rounds,
            self.world.edge.commit.restore_point.num_rounds,
            [host_id for of_cluster in shell.processes.values() for host_id in of_cluster],
            is_new=shell.state.num_rounds > reached,
            is_trained=shell.is_trained,
        )

    def _evaluate(self, shell: AttemptShell) -> job_run.ModelEvaluated:
        self._run_round(shell, trains=False)
        return job_run.ModelEvaluated()

    def _run_round(self, shell: AttemptShell, *, trains: bool) -> None:
        """Runs a round. If there is no plan, it is sometimes tried again in the same attempt, with the devices that are there then."""
        self._begin_round(shell)
        try:
            shell.run(trains=trains)
        except RoundFailedError as error:
            is_planless = error.failure.kind is Kind.NO_PLAN and not shell.state.has_plan
            if not is_planless or self.world.happens(0.5):
                raise
            if shell.repeated:
                raise RoundFailedError(Failure(Kind.PASSING)) from None
            self._begin_round(shell)
            shell.run(trains=trains)

    def _begin_round(self, shell: AttemptShell) -> None:
        """Lets the devices that are there now take part in the next round."""
        self.world.disturb_devices()
        holders = {id: p for held in shell.holders.values() for id, p in held.items()}
        is_same = self.world.processes(holders.keys()) == holders
        if str(self.world.edge.process) != shell.edge_process or not is_same:
            raise RoundFailedError(Failure(Kind.PASSING))
        chosen = self._choose()
        if {device.cluster for device in chosen} != set(range(self.world.num_clusters)):
            raise RoundFailedError(Failure(Kind.HOST_LOST, unit_of(0)))
        shell.processes = self._use(chosen)
