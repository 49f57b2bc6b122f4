"""Thousands of imitated jobs whose hosts die, restart, lie and come back: the decisions of `job_life` keep their promises.

A seed gives the whole job, so that each failure is repeated exactly.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from collapipe.job_life.failing_clusters import LONGEST_PAUSE
from collapipe.job_life.job_devices import (
    Device,
    JobDevices,
    LeftOut,
    Why,
    choose,
    forgive,
    join,
    use,
)
from collapipe.job_life.job_state import JobState, attempt_failed, round_committed
from collapipe.job_life.tries import Again, Failure, GivesUp, Kind, Tries

NUM_SEEDS, NUM_ROUNDS = 2000, 12
_LONGEST_WAIT = 15.0
_ROUND_SECONDS = 5.0
_MOST_ATTEMPTS = 400


@dataclass
class Host:
    """A device of the world, and how often something happens to it in a step of the job."""

    cluster: int
    dies: float
    restarts: float
    is_lost: float
    lies: float
    process: int = 0
    away_until: float = 0.0
    suspected_until: float = 0.0


@dataclass
class World:
    """The hosts and the clock of one job, and what the job has committed.

    Args:
        story: What happened, for people who read a failure.
    """

    random: random.Random
    now: float = 0.0
    hosts: dict[str, Host] = field(default_factory=dict)
    num_rounds: int = 0
    num_reached: int = 0
    num_restorable: int = 0
    last_commit_at: float = 0.0
    story: list[str] = field(default_factory=list)

    def tell(self, text: str) -> None:
        self.story.append(f"{self.now:7.1f} s: {text}")

    def add_host(self) -> None:
        number = len(self.hosts)
        chances = [self.random.choice((0.0, 0.0, 0.02, 0.3)) for _ in range(4)]
        self.hosts[f"device-{number}"] = Host(number % 2, *chances)

    def present(self) -> list[Device]:
        """Lets something happen to the hosts, and returns those that send heartbeats."""
        for host in self.hosts.values():
            if self.random.random() < host.dies:
                host.away_until = self.now + self.random.choice((5.0, 60.0, 1000.0))
            if self.random.random() < host.restarts:
                host.process += 1
        return [
            Device(host_id, host.cluster, str(host.process), host.suspected_until > self.now)
            for host_id, host in self.hosts.items()
            if host.away_until <= self.now
        ]

    def run_round(self, chosen: list[Device]) -> Failure | None:
        """Runs a round, and returns how it failed; `None` if it was committed."""
        self.now += _ROUND_SECONDS
        if self.random.random() < 0.1 and len(self.hosts) < 9:
            self.add_host()
        for device in chosen:
            host = self.hosts[device.host_id]
            if self.random.random() < host.restarts:
                host.process += 1
                return Failure(Kind.PASSING)
            if self.random.random() < host.is_lost:
                host.suspected_until = self.now + 10.0
                return Failure(Kind.HOST_LOST, device.host_id)
            if self.random.random() < host.lies:
                return Failure(
                    self.random.choice((Kind.NOT_FINITE, Kind.HOST_FAULTY)), device.host_id
                )
        if self.random.random() < 0.05:
            return Failure(self.random.choice((Kind.NO_PLAN, Kind.INVALID, Kind.LASTING)), "")
        return None


def check_choice(
    world: World, job: JobDevices, present: list[Device], left_out: dict[str, LeftOut]
) -> None:
    """Checks who takes part."""
    possible = {d.cluster for d in present if d.host_id not in job.no_plan}
    taken = [d for d in present if d.host_id not in left_out]
    assert {d.cluster for d in taken} == possible, "a cluster with devices got none"
    doubtful = job.not_finite | job.restarting.left_out(world.num_reached).keys()
    in_doubt = [d for d in taken if d.is_suspect or d.host_id in doubtful]
    mixed = {d.cluster for d in taken if d not in in_doubt} & {d.cluster for d in in_doubt}
    assert job.takes_suspects or not mixed, f"devices in doubt beside others in clusters {mixed}"
    for reason in left_out.values():
        if reason.why is Why.RESTARTS:
            assert world.num_reached < reason.until <= world.num_reached + LONGEST_PAUSE


def check_bounds(world: World, job: JobState, limit: float) -> None:
    """Checks that the state stays small, and that the job gets further or ends in its time."""
    devices = job.devices
    known = [devices.newcomers, devices.no_plan, devices.not_finite, devices.unreached.keys()]
    for names in (*known, devices.restarting.num_restarts.keys(), job.tries.faults.keys()):
        assert set(names) <= world.hosts.keys()
    # The first failure may come after a wait of this time for hosts.
    allowed = 2 * limit + 2 * _LONGEST_WAIT + 2 * _ROUND_SECONDS
    assert world.now - world.last_commit_at <= allowed, "it neither got further nor ended"


def wait_for_hosts(world: World, job: JobState) -> tuple[JobState, list[Device] | None]:
    """Waits until both clusters have devices, and returns the state and those that take part; `None` for devices if they do not come."""
    began = world.now
    while True:
        present = world.present()
        devices, left_out = choose(job.devices, present, world.num_reached, needs_all=False)
        check_choice(world, devices, present, left_out)
        job = replace(job, devices=devices)
        chosen = [device for device in present if device.host_id not in left_out]
        if {device.cluster for device in chosen} == {0, 1}:
            return job, chosen
        if job.tries.seconds_left(world.now) < 0 or world.now - began > job.tries.limit_seconds:
            return replace(job, devices=replace(job.devices, newcomers=frozenset())), None
        world.now += 1.0


def run_job(world: World, limit: float) -> GivesUp | None:
    """Runs a job to its end, and returns why it gave up; `None` if all rounds are committed."""
    job, had_all = JobState(Tries(limit)), False
    for _ in range(_MOST_ATTEMPTS):
        job, chosen = wait_for_hosts(world, job)
        failure: Failure | None = Failure(Kind.NO_PLAN, lacks_hosts=True)
        if chosen is not None:
            names = [device.host_id for device in chosen]
            if had_all:
                job = replace(job, devices=join(job.devices, names))
            by_cluster = {i: [d.host_id for d in chosen if d.cluster == i] for i in (0, 1)}
            processes = {device.host_id: device.process for device in chosen}
            devices, blamed = forgive(job.devices, processes)
            assert not devices.unreached.keys() & processes.keys() and set(blamed) <= set(names)
            job = replace(job, devices=devices)
            job = replace(job, devices=use(job.devices, by_cluster, processes))
            failure, had_all = world.run_round(chosen), True
        if failure is None:
            world.num_rounds += 1
            is_new = world.num_rounds > world.num_reached
            world.num_reached = max(world.num_reached, world.num_rounds)
            if world.num_rounds % 3 == 0:
                world.num_restorable = max(world.num_restorable, world.num_rounds)
            job = round_committed(job, world.num_rounds, world.num_restorable, names, is_new=is_new)
            world.last_commit_at = world.now
            world.tell(f"round {world.num_rounds} is committed with {', '.join(names)}")
            if world.num_rounds == NUM_ROUNDS:
                return None
            continue
        unreached = {}
        if failure.kind is Kind.HOST_LOST:
            unreached = {failure.host_id: str(world.hosts[failure.host_id].process)}
        job, after = attempt_failed(job, failure, unreached, world.now)
        check_bounds(world, job, limit)
        world.tell(f"{failure} → {after}")
        assert after.refused <= job.devices.no_plan
        if not isinstance(after.then, Again):
            return after.then
        assert 0 <= after.then.wait_seconds <= _LONGEST_WAIT
        world.now += after.then.wait_seconds
        world.num_rounds = world.num_restorable
    raise AssertionError(f"it still runs after {_MOST_ATTEMPTS} attempts")


def test_disturbed_jobs_get_further_or_end_in_time() -> None:
    ends: dict[GivesUp | None, int] = {}
    for seed in range(NUM_SEEDS):
        world = World(random.Random(seed))
        for _ in range(world.random.choice((2, 4, 6))):
            world.add_host()
        limit = world.random.choice((0.0, 30.0, 300.0, 600.0))
        try:
            end = run_job(world, limit)
        except AssertionError as error:
            pytest.fail("\n".join([f"seed {seed}: {error}", *world.story]))
        ends[end] = ends.get(end, 0) + 1
    # Otherwise, the seeds would not show what these ends need.
    assert ends.keys() == {None, *GivesUp} - {GivesUp.REFUSED}, ends
