"""Decides which devices a job leaves out because they restart again and again."""

from collections import defaultdict
from collections.abc import Iterable

from collapipe.scheduler.failing_clusters import LONGEST_PAUSE, PATIENCE, PATIENCE_OF_ROUND
from collapipe.v1 import scheduler_pb2


def pause_after(num_restarts: float) -> int:
    """Returns how many new rounds a job commits without a device that has restarted so often. 0 forgives it."""
    return 0 if num_restarts < PATIENCE else min(2 ** int(num_restarts - PATIENCE), LONGEST_PAUSE)


class RestartingDevices:
    """The restarts of devices while one job used them. Those of a device with blocks end attempts. New rounds with a device make up for them."""

    def __init__(self) -> None:
        self._processes: dict[str, str] = {}
        """The process of each device when it took part last, by host id."""
        self._restarts: defaultdict[str, float] = defaultdict(float)
        self._until: dict[str, int] = {}
        """The number of committed rounds with which each device takes part again."""

    def takes_part(self, devices: Iterable[scheduler_pb2.Host]) -> None:
        """Tells which devices the job may use."""
        self._processes |= {device.host_id: device.incarnation for device in devices}

    def look(self, present: Iterable[scheduler_pb2.Host], num_rounds: int) -> dict[str, str]:
        """Counts restarts of devices that took part. Returns the ids of the devices to leave out, and why.

        Args:
            num_rounds: The largest number of rounds that the job has ever committed.
        """
        for host in present:
            if self._processes.get(host.host_id, host.incarnation) != host.incarnation:
                del self._processes[host.host_id]
                self._restarts[host.host_id] += 1
                self._until[host.host_id] = num_rounds + pause_after(self._restarts[host.host_id])
        return {
            host_id: f"it has restarted at least {PATIENCE:g} times while the job used it, so it takes part again when {until} rounds "
            "are committed: look at its log"
            for host_id, until in self._until.items()
            if num_rounds < until
        }

    def committed(self, devices: Iterable[scheduler_pb2.Host]) -> None:
        """Tells which devices have taken part in a round that was committed for the first time."""
        for device in devices:
            left = self._restarts[device.host_id] - PATIENCE_OF_ROUND
            self._restarts[device.host_id] = max(left, 0.0)
