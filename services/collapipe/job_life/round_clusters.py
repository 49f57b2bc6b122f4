"""Decides which clusters of a round are late or have failed, so that it is committed without them."""

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RoundRules:
    """What a job says about clusters that are late or fail.

    Args:
        min_clusters: A round is committed with the results of at least so many.
        deadline_seconds: Time from the start of the first cluster's training, after which the others may be late. `None` if there is
            no deadline.
        may_leave_out: Whether a round may be committed without clusters that are late or fail.
        ends_early: Whether late clusters end their round with what they have, which then counts.
    """

    num_clusters: int
    min_clusters: int
    deadline_seconds: float | None
    may_leave_out: bool
    ends_early: bool


@dataclass(frozen=True)
class RoundClusters:
    """The clusters of one attempt at a round, each by its index.

    Args:
        left_out: Those that an earlier attempt has left out for good.
        failed: Those that have failed.
        may_fail: Whether the round may go on without further clusters that fail.
        may_be_late: Whether clusters may still become late.
        overdue: Those that had not ended when the deadline had passed and `min_clusters` clusters had ended.
        began_at: When the first cluster began to train, in seconds from any fixed start.
        ended: Those that ended their round in time. Their results count unless they are in `failed`.
    """

    rules: RoundRules
    left_out: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    may_fail: bool = False
    may_be_late: bool = False
    overdue: frozenset[int] = frozenset()
    began_at: float | None = None
    ended: frozenset[int] = frozenset()

    @property
    def late(self) -> frozenset[int]:
        """The clusters whose results do not count."""
        if self.rules.ends_early:
            # Late results count by this rule. The round may have been committed first by the other one.
            return self.left_out
        return self.left_out | self.overdue | self.failed

    @property
    def to_end(self) -> frozenset[int]:
        """The overdue clusters that have not ended."""
        return self.overdue - self.ended


def begin(
    rules: RoundRules,
    recorded: Collection[int] | None = None,
    *,
    failed: Collection[int] = (),
    may_fail: bool = False,
) -> RoundClusters:
    """Returns the clusters at the beginning of an attempt.

    Args:
        recorded: The late clusters if they are known already, because the round is repeated. Deadlines then do not count.
            `None` for a round that is decided now.
        failed: Those of them that have failed.
        may_fail: As in `RoundClusters`, if the rules allow it.
    """
    return RoundClusters(
        rules,
        left_out=frozenset(recorded or ()),
        failed=frozenset(failed),
        may_fail=may_fail and rules.may_leave_out,
        may_be_late=recorded is None and rules.deadline_seconds is not None,
    )


def train(clusters: RoundClusters, now: float) -> RoundClusters:
    """Returns the state after a cluster has begun to train. The deadline counts from the first one."""
    return clusters if clusters.began_at is not None else replace(clusters, began_at=now)


def end(clusters: RoundClusters, cluster: int) -> tuple[RoundClusters, bool]:
    """Returns the state after a cluster has ended its round, and whether its result counts."""
    if cluster not in clusters.late:
        clusters = replace(clusters, ended=clusters.ended | {cluster})
    return clusters, cluster in clusters.ended


def fail(clusters: RoundClusters, cluster: int) -> tuple[RoundClusters, bool]:
    """Returns the state after a cluster has failed, and whether the round goes on without it."""
    num_left = clusters.rules.num_clusters - len(clusters.late | {cluster})
    if not clusters.may_fail or num_left < clusters.rules.min_clusters:
        return clusters, False
    return replace(clusters, failed=clusters.failed | {cluster}), True


def look(clusters: RoundClusters, now: float) -> RoundClusters:
    """Returns the state at a later time. Once some clusters are late, no others become so."""
    deadline = clusters.rules.deadline_seconds
    if (
        not clusters.may_be_late
        or deadline is None
        or clusters.began_at is None
        or now - clusters.began_at < deadline
        or len(clusters.ended) < clusters.rules.min_clusters
    ):
        return clusters
    overdue = frozenset(range(clusters.rules.num_clusters)) - clusters.ended
    return replace(clusters, overdue=overdue, may_be_late=False)
