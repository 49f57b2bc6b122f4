"""The imitated world of one job: hosts that train in simulated time, an edge server, disks, and what is promised about them.

Weights and optimizer states are numbers that depend on all that they were made of, so that two of them are equal only if
their whole history is.
"""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from collapipe.edge_server import commits
from collapipe.errors import WrongStateError
from collapipe.job_life.job_devices import Device
from collapipe.job_life.tries import Failure, Kind
from collapipe.v1.edge_server_pb2 import CommitRoundRequest
from collapipe.v1.plan_pb2 import ClusterState, Commit, UnitState

EDGE_SERVER = "edge-server"
JOB_ID = "job"
MOST_DEVICES = 9


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


def promise(holds: bool, text: str) -> None:
    """Raises `BrokenPromiseError` if a promise does not hold."""
    if not holds:
        raise BrokenPromiseError(text)


def mix(*values: int) -> int:
    """Returns a number that depends on all values and on their order. It is the same in each process."""
    return hash(values)


def unit_of(cluster: int) -> str:
    """Returns the id of the control unit of a cluster."""
    return f"unit-{cluster}"


def digests(state: ClusterState) -> tuple[int, int | None]:
    """Returns the weights and the optimizer state that a state of a cluster names; `None` for a new optimizer state."""
    (unit,) = state.units
    return int(unit.weights_digest), int(unit.optimizer_digest) if unit.optimizer_digest else None


def state_of(cluster: int, weights: int, moments: int | None, num_samples: int = 0) -> ClusterState:
    """Returns the state of a cluster, whose model has one unit."""
    moments_text = "" if moments is None else str(moments)
    unit = UnitState(unit_index=0, weights_digest=str(weights), optimizer_digest=moments_text)
    return ClusterState(cluster_index=cluster, num_samples=num_samples, units=[unit])


@dataclass
class Host:
    """A device of the world, and the chances of what happens to it."""

    cluster: int
    dies: float = 0.0
    restarts: float = 0.0
    is_lost: float = 0.0
    lies: float = 0.0
    process: int = 0
    away_until: float = 0.0
    suspected_until: float = 0.0


@dataclass
class ControlUnit:
    """A control unit with its cluster.

    Args:
        fails: How often it fails in a round.
        slow: How often it is slow in a round.
        differs: How often its hosts compute otherwise than before.
        on_disk: The optimizer states that it has copied.
        in_memory: The optimizer states in the memory of its devices, each with the processes that have it, by host id.
    """

    fails: float
    slow: float
    differs: float
    on_disk: set[int] = field(default_factory=set)
    in_memory: dict[int, Mapping[str, str]] = field(default_factory=dict)


@dataclass
class EdgeServer:
    """The edge server. Its commit is on its disk, and what clusters push is in its memory.

    Args:
        pushed: The attempt that has pushed the results of each cluster last, with the weights.
        weights: Those of each number of rounds, when it was committed first.
        made_by: The attempt that has committed each number of rounds last.
        not_repeatable: The numbers of rounds that may come out otherwise when they are repeated, because a host computed differently.
        revealed: The clusters for which the masks of each round were revealed.
    """

    commit: Commit
    restarts: float
    refuses: float
    process: int = 0
    pushed: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    made_by: dict[int, int] = field(default_factory=dict)
    not_repeatable: set[int] = field(default_factory=set)
    revealed: dict[int, frozenset[int]] = field(default_factory=dict)

    def commit_round(self, request: CommitRoundRequest, kept: Collection[int]) -> Commit:
        """Commits a round, as the edge server does.

        Args:
            kept: The clusters whose results an earlier attempt has pushed.

        Raises:
            WrongStateError: A push is missing, because the edge server was restarted.
            BrokenPromiseError: The commit does not follow the last one, has another result than before, or was made before.
        """
        last, attempt = self.commit, request.attempt
        if commits.is_already_committed(last, attempt):
            promise(not request.clusters, f"round {attempt.round_index + 1} is committed twice")
            if request.candidate_copied and last.HasField("candidate"):
                self.commit = commits.with_candidate_restorable(last, request)
            return self.commit
        try:
            commits.check_is_next(commits.head_of(last), attempt)
        except WrongStateError as error:
            raise BrokenPromiseError(f"a commit does not follow the last one: {error}") from error
        late = set(request.late_clusters)
        present = [state for state in request.clusters if state.cluster_index not in late]
        promise(bool(present), "a round is committed without clusters")
        for state in present:
            of_round, pushed_by, weights = self.pushed.get(state.cluster_index, (-1, -1, 0))
            if of_round != attempt.round_index:
                raise WrongStateError(f"cluster {state.cluster_index} has pushed nothing")
            is_own = pushed_by == attempt.attempt or state.cluster_index in kept
            text = f"a result of cluster {state.cluster_index} of another attempt is committed"
            promise(is_own and weights == digests(state)[0], text)
        averaged = mix(*(digests(state)[0] for state in present))
        unit = UnitState(unit_index=0, weights_digest=str(averaged))
        commit = commits.following(last, request, [unit])
        if commit.num_rounds not in self.weights or commit.num_rounds in self.not_repeatable:
            self.expect_others(commit.num_rounds)
        before = self.weights.setdefault(commit.num_rounds, averaged)
        promise(before == averaged, f"round {commit.num_rounds} has another result than before")
        self.made_by[commit.num_rounds] = attempt.attempt
        self.commit = commit
        return commit

    def expect_others(self, num_rounds: int) -> None:
        """Lets the commits from a number of rounds on have other results than before."""
        self.weights = {
            number: each for number, each in self.weights.items() if number < num_rounds
        }

    def reveal(self, round_index: int, present: frozenset[int]) -> None:
        """Lets control units reveal what removes the masks of a round."""
        before = self.revealed.setdefault(round_index, present)
        text = f"masks of round {round_index + 1} are revealed for {set(before)} and {set(present)}"
        promise(before == present, text)


@dataclass(frozen=True)
class Outcome:
    """What comes of a cluster in a round.

    Args:
        at: When it ends or fails.
        failure: `None` if it ends.
        copied_at: When it has copied the optimizer states of the candidate; `None` if it does not.
    """

    at: float
    failure: Failure | None = None
    copied_at: float | None = None


class World:
    """The hosts and the clock of one job.

    Args:
        seed: Gives all that happens.
        tells: Whether to note it in the story.
    """

    def __init__(self, seed: int, num_clusters: int, *, tells: bool) -> None:
        self.tells = tells
        self.random = random.Random(seed)
        self.num_clusters = num_clusters
        self.now = 0.0
        self.story: list[str] = []
        self.hosts: dict[str, Host] = {}
        chance = self.random.choice
        self.units = [
            ControlUnit(
                chance((0.0, 0.0, 0.02, 0.4)), chance((0.0, 0.1, 0.5)), chance((0.0,) * 9 + (0.1,))
            )
            for _ in range(num_clusters)
        ]
        initial = commits.initial_commit(
            JOB_ID, [UnitState(unit_index=0, weights_digest="1")], num_clusters
        )
        self.edge = EdgeServer(initial, chance((0.0, 0.0, 0.02)), chance((0.0, 0.0, 0.05)))
        for _ in range(chance((1, 2, 3))):
            for cluster in range(num_clusters):
                self.add_host(cluster)

    def tell(self, text: str) -> None:
        """Notes what happened, for people who read a failure."""
        if self.tells:
            self.story.append(f"{self.now:7.1f} s: {text}")

    def happens(self, chance: float) -> bool:
        """Returns whether something with a chance happens now."""
        return chance > 0 and self.random.random() < chance

    def add_host(self, cluster: int) -> None:
        """Adds a device."""
        chances = [self.random.choice((0.0, 0.0, 0.0, 0.02, 0.2)) for _ in range(4)]
        self.hosts[f"device-{len(self.hosts)}"] = Host(cluster, *chances)

    def disturb_devices(self) -> None:
        """Lets devices die, restart and come new."""
        for host_id, host in self.hosts.items():
            if self.happens(host.dies):
                host.away_until = self.now + self.random.choice((5.0, 60.0, 1000.0))
                host.process += 1
                self.tell(f"{host_id} dies until {host.away_until:.0f} s")
            if self.happens(host.restarts):
                host.process += 1
                self.tell(f"{host_id} restarts")
        if self.happens(0.05) and len(self.hosts) < MOST_DEVICES:
            self.add_host(self.random.randrange(self.num_clusters))
        if self.happens(self.edge.restarts):
            self.restart_edge_server()

    def restart_edge_server(self) -> None:
        """Restarts the edge server, which forgets what was pushed."""
        self.tell("the edge server restarts")
        self.edge.process += 1
        self.edge.pushed.clear()

    def present(self) -> list[Device]:
        """Returns the devices that send heartbeats."""
        return [
            Device(host_id, host.cluster, str(host.process), host.suspected_until > self.now)
            for host_id, host in self.hosts.items()
            if host.away_until <= self.now
        ]

    def processes(self, host_ids: Collection[str]) -> dict[str, str]:
        """Returns the processes of devices that are there."""
        return {
            host_id: str(self.hosts[host_id].process)
            for host_id in host_ids
            if self.hosts[host_id].away_until <= self.now
        }

    def has_moments(self, cluster: int, moments: int | None) -> bool:
        """Returns whether a cluster can begin with an optimizer state: a new one, or one on a disk or in the memory of its devices."""
        unit = self.units[cluster]
        if moments is None or moments in unit.on_disk:
            return True
        held = unit.in_memory.get(moments)
        return held is not None and self.processes(held.keys()) == held

    def disturb_cluster(self, cluster: int, processes: Mapping[str, str]) -> Failure | None:
        """Lets something happen to a cluster in a round. Returns how it fails; `None` if it does not."""
        for host_id in processes:
            host = self.hosts[host_id]
            if self.happens(host.restarts):
                host.process += 1
                self.tell(f"{host_id} restarts")
                return Failure(Kind.PASSING)
            if self.happens(host.is_lost):
                host.suspected_until = self.now + 10.0
                return Failure(Kind.HOST_LOST, host_id)
            if self.happens(host.lies):
                kind = self.random.choice((Kind.NOT_FINITE, Kind.HOST_FAULTY))
                return Failure(kind, host_id)
        if self.happens(self.units[cluster].fails):
            kinds = (Kind.HOST_LOST, Kind.HOST_FAULTY, Kind.PASSING)
            return Failure(self.random.choice(kinds), unit_of(cluster))
        if self.happens(self.edge.restarts):
            self.restart_edge_server()
            return Failure(Kind.HOST_LOST, EDGE_SERVER)
        return None
