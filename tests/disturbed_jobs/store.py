"""What survives a loss of power in an imitated job, and its settings, which its seed draws."""

from dataclasses import dataclass, field

from collapipe.job_life.attempt import (
    AttemptRules,
)
from collapipe.job_life.round_clusters import RoundRules
from collapipe.job_life.tries import Failure
from collapipe.v1.plan_pb2 import Commit

from .world import EDGE_SERVER, World

NUM_ROUNDS = 9


class PowerLostError(Exception):
    """The scheduler ends between two writes."""


class RoundFailedError(Exception):
    """A round has failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(frozen=True)
class Record:
    """What is stored about a round, before its attempt begins and before its commit."""

    attempt: int
    micro_batches: tuple[int, ...]
    devices: dict[int, frozenset[str]]
    late: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    ended_early: frozenset[int] = frozenset()
    total_samples: int = 0
    is_revealed: bool = False
    is_measured: bool = False


@dataclass
class Store:
    """What survives a loss of power.

    Args:
        loses_power: Chance that power is lost before or after a write.
        is_full: Chance that there is no room for a write.
        results: The attempt whose result is stored, for each round.
        spent: The attempts at rounds that count in the privacy account.
    """

    loses_power: float
    is_full: float
    attempt: int = 0
    num_reached: int = 0
    num_committed: int = 0
    copied_candidate: tuple[int, int] | None = None
    rounds: dict[int, Record] = field(default_factory=dict)
    results: dict[int, int] = field(default_factory=dict)
    spent: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class JobRules:
    """The settings of the imitated job."""

    rounds: AttemptRules
    retry_seconds: float
    wait_for_hosts_seconds: float
    max_private_rounds: int

    def is_private_enough(self, num_spent: int, num_rounds: int) -> bool:
        return num_spent + num_rounds <= self.max_private_rounds


def draw_rules(world: World) -> JobRules:
    """Draws the settings of a job."""
    chance = world.random.choice
    number = world.num_clusters
    fewest = chance(range(1, number + 1))
    leaves_out = chance((True, False)) and fewest < number
    deadline = chance((None, 8.0))
    is_masked = number > 1 and chance((False, False, True))
    if is_masked:
        fewest = max(fewest, number // 2 + 1)
        leaves_out = leaves_out and fewest < number
    is_private = chance((False, False, True))
    return JobRules(
        AttemptRules(
            RoundRules(
                number,
                fewest,
                deadline if fewest < number else None,
                may_leave_out=leaves_out,
                ends_early=not leaves_out,
            ),
            replicate_every=chance((1, 2, 4)),
            evaluate_every=chance((0, 1, 3)),
            is_masked=is_masked,
            is_private=is_private,
            edge_server=EDGE_SERVER,
            edge_process="",
            is_retry=False,
        ),
        retry_seconds=chance((0.0, 30.0, 300.0, 600.0)),
        wait_for_hosts_seconds=chance((5.0, 60.0, 600.0)),
        max_private_rounds=chance((8, 15)) if is_private else 10**6,
    )


@dataclass
class Repeats:
    """Counts how often a job repeats committed rounds without getting further.

    Args:
        most: The most rounds that this process of the scheduler has committed.
        restorable: The rounds of the restore point when it last got further.
    """

    number: int = 0
    most: int = 0
    restorable: int = 0
    has_committed: bool = False

    def commit(self, commit: Commit) -> None:
        """Takes note of a commit."""
        self.has_committed = True
        if commit.num_rounds > self.most or commit.restore_point.num_rounds > self.restorable:
            self.number, self.restorable = 0, commit.restore_point.num_rounds
        self.most = max(self.most, commit.num_rounds)

    def fail(self) -> None:
        """Takes note of a failed attempt."""
        self.number += self.has_committed
        self.has_committed = False
