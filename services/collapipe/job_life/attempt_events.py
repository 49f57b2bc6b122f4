"""What is observed in the rounds of an attempt, and what is done in them: the vocabulary of `attempt.step`. A cluster is named by its
index in the job."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from collapipe.job_life.tries import Failure

# What is observed.


@dataclass(frozen=True)
class RoundWanted:
    """A round shall begin: one that trains, or one that only evaluates the last commit and commits nothing new."""

    trains: bool
    decides_anew: bool


@dataclass(frozen=True)
class CaughtUp:
    """The clusters that kept nothing have repeated their rounds.

    Args:
        differing: Those of them that have other optimizer states than before.
    """

    differing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Planned:
    """The round has a plan.

    Args:
        processes: The process of each host, by cluster and host id.
        is_decided: Whether the clusters of the round are known already: it was committed before, or the keys of its masks may have been
            revealed.
        left_out: The clusters that are left out of a decided round.
        failed: Those of them that have failed.
        is_revealed: Whether an earlier attempt may have revealed the keys that remove the masks.
        total_samples: How many rows the clusters of a masked round may have together; 0 without masks.
    """

    processes: Mapping[int, Mapping[str, str]]
    is_decided: bool = False
    left_out: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    is_revealed: bool = False
    total_samples: int = 0


@dataclass(frozen=True)
class Masked:
    """The clusters have agreed on masks."""


@dataclass(frozen=True)
class TrainingBegan:
    """A cluster has begun to train."""

    cluster: int


@dataclass(frozen=True)
class Copied:
    """A cluster has copied the optimizer states of the candidate."""

    cluster: int


@dataclass(frozen=True)
class ClusterFinished:
    """A cluster has finished its round.

    Args:
        num_samples: The rows that it has trained on.
    """

    cluster: int
    num_samples: int


@dataclass(frozen=True)
class ClusterFailed:
    """A cluster has failed, or its call was cancelled."""

    cluster: int
    failure: Failure


@dataclass(frozen=True)
class Ticked:
    """Some time has passed without another event."""


@dataclass(frozen=True)
class Committed:
    """The edge server has committed.

    Args:
        commit: The attempt and the number of rounds of the commit.
    """

    commit: tuple[int, int]
    candidate: tuple[int, int] | None


@dataclass(frozen=True)
class Failed:
    """The work of the phase has failed: catching up, planning, masking or committing.

    Args:
        cluster: The cluster because of which it failed, if it is one.
    """

    failure: Failure
    cluster: int | None = None


Event = (
    RoundWanted
    | CaughtUp
    | Planned
    | Masked
    | TrainingBegan
    | Copied
    | ClusterFinished
    | ClusterFailed
    | Ticked
    | Committed
    | Failed
)


# What is to be done.


class Because(Enum):
    """Why a round fails, or goes on without a cluster."""

    PHASE_FAILED = "the work of the phase failed"
    CLUSTER_FAILED = "a cluster failed"
    NOT_COMMITTED = "the result of a cluster cannot be committed"
    TOO_MANY_ROWS = "a masked round has no room for the rows of a cluster"
    DIFFERS = "a cluster has other optimizer states than before"
    CANNOT_REPEAT = (
        "no plan is possible any more for a committed round that clusters have to repeat"
    )
    NEEDS_NEW_MASKS = "a cluster is left out, and the others need masks without it"


@dataclass(frozen=True)
class CatchUp:
    """Repeat the committed rounds since the restore point with these clusters. Answers: any number of `ClusterFailed`, then `CaughtUp` or `Failed`."""

    clusters: frozenset[int]


@dataclass(frozen=True)
class Plan:
    """Plan and record the round. Answer: `Planned` or `Failed`.

    Args:
        kept: The clusters that have kept their results, and so their plans.
    """

    kept: frozenset[int]
    decides_anew: bool


@dataclass(frozen=True)
class AgreeOnMasks:
    """Let these clusters agree on masks. Answer: `Masked` or `Failed`."""

    clusters: frozenset[int]


@dataclass(frozen=True)
class SpendPrivacy:
    """Count in the privacy account what the round may reveal, before anything is sent."""


@dataclass(frozen=True)
class Run:
    """Let these clusters run the round. Answers: `TrainingBegan`, `Copied`, `ClusterFinished` and `ClusterFailed`; `Ticked` meanwhile."""

    clusters: frozenset[int]


@dataclass(frozen=True)
class EndTraining:
    """Let clusters stop training early. Their results count."""

    clusters: frozenset[int]


@dataclass(frozen=True)
class CancelCalls:
    """Cancel the calls of clusters."""

    clusters: frozenset[int]


@dataclass(frozen=True)
class CancelAll:
    """Cancel all calls, and every call that begins later in this attempt."""


@dataclass(frozen=True)
class CountNoRows:
    """Add an empty count for a cluster, so that the evaluation does not wait for it."""

    cluster: int


@dataclass(frozen=True)
class ReportLeftOut:
    """Tell users that the round goes on without a cluster.

    Args:
        again: The index of the round in which it is tried again.
        num_rows: The rows of all clusters, if they are too many.
    """

    cluster: int
    again: int
    because: Because
    num_rows: int = 0


@dataclass(frozen=True)
class Commit:
    """Store which clusters are left out, then commit. Answer: `Committed` or `Failed`.

    Args:
        left_out: The clusters that are not averaged, because they are late or have failed.
        failed: Those of them that have failed. They begin their next round with new optimizer states.
        is_candidate: Whether the optimizer states of the commit are to be copied.
        candidate_copied: Whether those of the candidate are copied.
    """

    left_out: frozenset[int]
    failed: frozenset[int]
    is_candidate: bool
    candidate_copied: bool


@dataclass(frozen=True)
class MoveRestorePoint:
    """Make the candidate the restore point of the last commit. Answer: `Committed` or `Failed`."""


@dataclass(frozen=True)
class Done:
    """End the round: it is committed, or the model is evaluated."""


@dataclass(frozen=True)
class Fail:
    """The round fails.

    Args:
        cluster: The cluster because of which it fails, if it is one.
        num_rows: As in `ReportLeftOut`.
    """

    because: Because
    cluster: int | None = None
    num_rows: int = 0


Action = (
    CatchUp
    | Plan
    | AgreeOnMasks
    | SpendPrivacy
    | Run
    | EndTraining
    | CancelCalls
    | CancelAll
    | CountNoRows
    | ReportLeftOut
    | Commit
    | MoveRestorePoint
    | Done
    | Fail
)
