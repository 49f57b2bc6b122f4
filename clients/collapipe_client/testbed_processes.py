"""Lists the processes of a local testbed, and builds their command lines."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from collapipe.certificates import Identity, Role
from collapipe.certificates.identity import IN_A_CLUSTER
from collapipe.errors import InvalidInputError
from collapipe_client.workspace import Workspace

LOOPBACK = "127.0.0.1:0"
SCHEDULER = "scheduler"
EDGE_SERVER = "edge-server"
DEFAULT_DEVICES = 3


@dataclass(frozen=True)
class Device:
    """One device of a local testbed.

    Args:
        memory_bytes: Memory for training. 0 means no limit, or the memory of the device that it emulates.
        speed: Samples that one block processes a second. 0 means that the device measures its speed.
        energy_budget_joules: Mean energy that a round may use. 0 means mains power, without a budget.
        busy_watts: Power above idle while computing. 0 means unknown, or that of the device that it emulates.
        max_transmit_watts: Largest transmit power. 0 means the default of the device agent.
    """

    memory_bytes: int = 0
    speed: float = 0.0
    energy_budget_joules: float = 0.0
    busy_watts: float = 0.0
    max_transmit_watts: float = 0.0

    @property
    def options(self) -> tuple[str, ...]:
        """The flags of its agent. A value of 0 has no flag."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return tuple(
            part
            for name, value in values.items()
            if value
            for part in (f"--{name.replace('_', '-')}", str(value))
        )


Clusters = Sequence[int | Sequence[Device]]
"""For each cluster: the number of its devices, or the devices."""


@dataclass(frozen=True)
class Service:
    """A service of the testbed, which runs in its own process.

    Args:
        identity: Its role and its name, which is also its host id.
        module: The argument of `python -m`.
        options: Flags that only this process gets.
    """

    identity: Identity
    module: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.identity.name


def expand_clusters(clusters: Clusters) -> list[list[Device]]:
    """Returns the devices of each cluster. A number N stands for N default devices."""
    expanded = [
        [Device()] * cluster if isinstance(cluster, int) else list(cluster) for cluster in clusters
    ]
    for index, devices in enumerate(expanded):
        if not devices:
            raise InvalidInputError(
                f"cluster {index} has no devices: a cluster needs at least 1 to run its blocks"
            )
    return expanded


def say_shared_cores(num_processes: int, num_cores: int | None = None) -> str:
    """Says that processes compute on the same cores; "" if each of them has one.

    Args:
        num_cores: Those of this machine; `None` counts those that this process may use.
    """
    num_cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    if num_processes <= num_cores:
        return ""
    return (
        f"{num_processes} processes share {num_cores} core{'s' * (num_cores != 1)} of this machine, so a host that is busy also waits "
        "for the others: on machines of their own, hosts would be faster"
    )


def services(
    clusters: Sequence[Sequence[Device]], scheduler_options: Sequence[str] = ()
) -> list[Service]:
    """Lists the services of a testbed, the scheduler first."""
    listed = [
        Service(
            Identity(Role.SCHEDULER, SCHEDULER), "collapipe.scheduler", tuple(scheduler_options)
        ),
        Service(Identity(Role.EDGE_SERVER, EDGE_SERVER), "collapipe.edge_server"),
    ]
    for cluster_index, devices in enumerate(clusters):
        control_unit = Identity(Role.CONTROL_UNIT, f"control-unit-{cluster_index}", cluster_index)
        listed.append(Service(control_unit, "collapipe.control_unit"))
        listed += [
            Service(
                Identity(
                    Role.DEVICE_AGENT, device_name(cluster_index, device_index), cluster_index
                ),
                "collapipe.device_agent",
                device.options,
            )
            for device_index, device in enumerate(devices)
        ]
    return listed


def device_name(cluster_index: int, device_index: int) -> str:
    """Returns the name and host id of a device."""
    return f"device-{cluster_index}-{device_index}"


def command(
    service: Service,
    workspace: Workspace,
    security_options: Sequence[str],
    *,
    listen: str = LOOPBACK,
    scheduler_address: str | None = None,
    emulation_file: Path | None = None,
    parent: int | None = None,
) -> list[str]:
    """Builds the command line of a service.

    Args:
        security_options: The flags that say how it authenticates itself.
        scheduler_address: `None` for the scheduler itself.
        emulation_file: `None` for no emulation.
        parent: The pid of its parent, with which the service ends; `None` if it goes on.
    """
    line = [sys.executable, "-m", service.module, "--host-id", service.name]
    line += [*security_options, "--listen", listen]
    line += ["--ready-file", str(workspace.ready_file(service.name))]
    if scheduler_address is not None:
        # The user owns the files of a job. With mutual TLS, nobody else can submit one.
        line += ["--scheduler", scheduler_address, "--data-root", "/"]
    if service.identity.role in IN_A_CLUSTER:  # Without a certificate, it does not know.
        line += ["--cluster-index", str(service.identity.cluster)]
    if emulation_file is not None:
        line += ["--emulation", str(emulation_file)]
    line += ["--state-dir", str(workspace.state_dir(service.name))]
    if parent is not None:
        line += ["--exit-with-parent", str(parent)]
    return [*line, *service.options]
