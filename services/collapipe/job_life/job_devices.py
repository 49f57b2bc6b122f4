"""Decides which of the devices that send heartbeats take part in a job, with the reason for each that does not."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from collapipe.job_life.restarting_devices import RestartingDevices, see, take_part


@dataclass(frozen=True)
class Device:
    """A device that sends heartbeats.

    Args:
        cluster: Its cluster in the deployment.
        process: Differs after each restart.
        is_suspect: Whether a job could not reach it lately, or it restarts again and again.
    """

    host_id: str
    cluster: int
    process: str
    is_suspect: bool = False


class Why(Enum):
    """Why a device does not take part."""

    SUSPECTED = auto()
    """Others could not reach it."""
    RESTARTS = auto()
    """It has restarted too often while the job used it."""
    NO_PLAN = auto()
    """No plan was possible with it, and one was without it."""
    NOT_FINITE = auto()
    """It sent values that are not finite."""


@dataclass(frozen=True)
class LeftOut:
    """Why a device does not take part.

    Args:
        until: The number of committed rounds with which it takes part again; 0 if that does not depend on rounds.
    """

    why: Why
    until: int = 0


@dataclass(frozen=True)
class JobDevices:
    """What one job knows of devices, by their host ids.

    Args:
        used: Those that the job has used, by the index of the cluster in the job.
        newcomers: Those that have joined since the last commit, and were never used before.
        no_plan: Newcomers with which no plan was possible.
        not_finite: Those that sent values that are not finite.
        unreached: The process of each that others could not reach.
        takes_doubtful: Whether devices in doubt take part, too, because no plan fits without them.
    """

    used: Mapping[int, frozenset[str]] = field(default_factory=dict)
    newcomers: frozenset[str] = frozenset()
    no_plan: frozenset[str] = frozenset()
    not_finite: frozenset[str] = frozenset()
    unreached: Mapping[str, str] = field(default_factory=dict)
    restarting: RestartingDevices = field(default_factory=RestartingDevices)
    takes_doubtful: bool = False

    @property
    def all_used(self) -> frozenset[str]:
        """Those that the job has used, in all clusters."""
        return frozenset[str]().union(*self.used.values())


def choose(
    devices: JobDevices, present: Sequence[Device], num_rounds: int, *, needs_all: bool
) -> tuple[JobDevices, dict[str, LeftOut]]:
    """Returns the state after the present devices were seen, and those that do not take part.

    A device in doubt takes part if its cluster has only such devices.

    Args:
        num_rounds: The most rounds that the job has ever committed.
        needs_all: Whether the job cannot run without all its devices. Then none is left out for its restarts or its values.
    """
    processes = {device.host_id: device.process for device in present}
    devices = replace(devices, restarting=see(devices.restarting, processes, num_rounds))
    until = {} if needs_all else devices.restarting.left_out(num_rounds)
    doubts = {device.host_id: LeftOut(Why.SUSPECTED) for device in present if device.is_suspect}
    doubts |= {host_id: LeftOut(Why.RESTARTS, number) for host_id, number in until.items()}
    if not needs_all:
        doubts |= dict.fromkeys(devices.not_finite, LeftOut(Why.NOT_FINITE))
    if devices.all_used - devices.no_plan <= processes.keys() - doubts.keys():
        devices = replace(devices, takes_doubtful=False)  # All that were used are there.
    possible = [device for device in present if device.host_id not in devices.no_plan]
    trusted = {device.cluster for device in possible if device.host_id not in doubts}
    left_out = {id: LeftOut(Why.NO_PLAN) for id in processes.keys() & devices.no_plan}
    if not devices.takes_doubtful:
        left_out |= {
            device.host_id: doubts[device.host_id]
            for device in possible
            if device.host_id in doubts and device.cluster in trusted
        }
    return devices, left_out


def use(
    devices: JobDevices, by_cluster: Mapping[int, Collection[str]], processes: Mapping[str, str]
) -> JobDevices:
    """Returns the state when the job uses devices, by the index of their clusters in the job."""
    used = {
        index: devices.used.get(index, frozenset()).union(by_cluster.get(index, ()))
        for index in devices.used.keys() | by_cluster.keys()
    }
    return replace(devices, used=used, restarting=take_part(devices.restarting, processes))


def begin_round(
    devices: JobDevices,
    by_cluster: Mapping[int, Collection[str]],
    processes: Mapping[str, str],
) -> JobDevices:
    """Does what `use` does, for the devices of a round. Those that the job has never used are newcomers."""
    newcomers = devices.newcomers | (processes.keys() - devices.all_used)
    return use(replace(devices, newcomers=newcomers), by_cluster, processes)


def refuse_newcomers(devices: JobDevices) -> JobDevices:
    """Returns the state after no plan was possible with the newcomers."""
    return replace(devices, no_plan=devices.no_plan | devices.newcomers, newcomers=frozenset())


def forgive(devices: JobDevices, processes: Mapping[str, str]) -> tuple[JobDevices, list[str]]:
    """Stops blaming these devices. Also returns those that have not restarted since they were blamed: a link of theirs may still
    be cut."""
    unreached = {id: process for id, process in devices.unreached.items() if id not in processes}
    blamed = [id for id, process in processes.items() if devices.unreached.get(id) == process]
    return replace(devices, unreached=unreached), blamed
