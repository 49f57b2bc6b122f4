"""Decides which clusters of a round are late or have failed, so that it is committed without them."""

import threading
import time
from collections.abc import Callable, Collection, Sequence

from collapipe.job import JobConfig


class LateClusters:
    """The late clusters of one round. Several threads may use it.

    Args:
        recorded: The late clusters if they are known already, because the round is repeated. Deadlines then do not count.
            `None` for a round that is decided now.
        failed: Those of them that have failed.
        may_fail: Whether the round may go on without further clusters that fail.
        clock: Returns a time in seconds from any fixed start.
    """

    def __init__(
        self,
        job: JobConfig,
        recorded: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        failed: Collection[int] = (),
        may_fail: bool = False,
    ) -> None:
        self._job = job
        self._clock = clock
        self._lock = threading.Lock()
        self._left_out = frozenset(recorded or ())
        self._may_fail = may_fail and job.may_leave_out_clusters
        self.failed = frozenset(failed)
        self._overdue: frozenset[int] = frozenset()
        self._is_open = recorded is None and job.has_deadline
        """Whether clusters may still become late."""
        self._began_at: float | None = None
        self._ended: set[int] = set()

    @property
    def late(self) -> frozenset[int]:
        """The late clusters whose results do not count."""
        if self._job.schedule.late_clusters == "end_early":
            return (
                self._left_out
            )  # The rule may have been another one when the round was first committed.
        return self._left_out | self._overdue | self.failed

    def training_began(self) -> None:
        """Tells that a cluster trains. The deadline counts from the first call."""
        with self._lock:
            if self._began_at is None:
                self._began_at = self._clock()

    def ended(self, cluster_index: int) -> bool:
        """Tells that a cluster has ended its round. Returns whether its result counts."""
        with self._lock:
            if cluster_index not in self.late:
                self._ended.add(cluster_index)
            return cluster_index in self._ended

    def goes_on_without(self, cluster_index: int) -> bool:
        """Tells that a cluster has failed. Returns whether the round goes on without it."""
        with self._lock:
            left = self._job.clusters - len(self.late | {cluster_index})
            if not self._may_fail or left < self._job.schedule.min_clusters:
                return False
            self.failed |= {cluster_index}
            return True

    def decide(self) -> frozenset[int]:
        """Returns the late clusters that have to end now. Once there are some, no others become late."""
        schedule = self._job.schedule
        with self._lock:
            if (
                self._is_open
                and self._began_at is not None
                and self._clock() - self._began_at >= schedule.round_deadline_seconds
                and len(self._ended) >= schedule.min_clusters
            ):
                self._overdue = frozenset(range(self._job.clusters)) - self._ended
                self._is_open = False
            return self._overdue - self._ended
