"""Decides which devices a job leaves out because they restart again and again."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from collapipe.job_life.failing_clusters import LONGEST_PAUSE, PATIENCE, PATIENCE_OF_ROUND


def pause_after(num_restarts: float) -> int:
    """Returns how many new rounds a job commits without a device that has restarted so often. 0 forgives it."""
    return 0 if num_restarts < PATIENCE else min(2 ** int(num_restarts - PATIENCE), LONGEST_PAUSE)


@dataclass(frozen=True)
class RestartingDevices:
    """The restarts of devices while one job used them. A restart of a device with blocks ends an attempt. Each new round with the device
    forgives a tenth of a restart. All keys are host ids.

    Args:
        processes: The process of each device when it took part last.
        num_restarts: The restarts that no rounds have made up for.
        until: The number of committed rounds with which each device takes part again.
    """

    processes: Mapping[str, str] = field(default_factory=dict)
    num_restarts: Mapping[str, float] = field(default_factory=dict)
    until: Mapping[str, int] = field(default_factory=dict)

    def left_out(self, num_rounds: int) -> dict[str, int]:
        """Returns the ids of the devices to leave out, with the number of rounds with which each takes part again.

        Args:
            num_rounds: The largest number of rounds that the job has ever committed.
        """
        return {host_id: until for host_id, until in self.until.items() if num_rounds < until}


def take_part(restarting: RestartingDevices, processes: Mapping[str, str]) -> RestartingDevices:
    """Returns the state after the job may have used these processes, by host id."""
    return replace(restarting, processes={**restarting.processes, **processes})


def see(
    restarting: RestartingDevices, present: Mapping[str, str], num_rounds: int
) -> RestartingDevices:
    """Returns the state with the restarts of devices that took part.

    Args:
        present: The processes of all devices that are there, by host id.
        num_rounds: As in `RestartingDevices.left_out`.
    """
    for host_id, process in present.items():
        if restarting.processes.get(host_id, process) != process:
            number = restarting.num_restarts.get(host_id, 0.0) + 1
            restarting = replace(
                restarting,
                processes={i: known for i, known in restarting.processes.items() if i != host_id},
                num_restarts={**restarting.num_restarts, host_id: number},
                until={**restarting.until, host_id: num_rounds + pause_after(number)},
            )
    return restarting


def after_new_round(restarting: RestartingDevices, host_ids: Collection[str]) -> RestartingDevices:
    """Returns the state after these devices have taken part in a round that was committed for the first time."""
    numbers = {
        host_id: max(number - PATIENCE_OF_ROUND * (host_id in host_ids), 0.0)
        for host_id, number in restarting.num_restarts.items()
    }
    return replace(restarting, num_restarts=numbers)
