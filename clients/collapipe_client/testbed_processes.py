"""Which processes make a testbed, and their command lines. Pure."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from collapipe.errors import InvalidInputError
from collapipe_client.workspace import Workspace

LOOPBACK = "127.0.0.1:0"
SCHEDULER = "scheduler"
DEFAULT_DEVICES = 3


@dataclass(frozen=True)
class Device:
    """One device of a local testbed.

    Args:
        memory_bytes: Memory that it may use for training; 0 is no limit, or that of the device that
            it emulates.
        speed: Samples that one block processes a second there; 0 lets the device measure itself.
        energy_budget_joules: Energy that a round may cost in the long run; 0 is mains.
        busy_watts: Power beyond idle while it computes; 0 is not known, or that of the device that
            it emulates.
        max_transmit_watts: Largest transmit power of its radio; 0 leaves the agent's default.
    """

    memory_bytes: int = 0
    speed: float = 0.0
    energy_budget_joules: float = 0.0
    busy_watts: float = 0.0
    max_transmit_watts: float = 0.0

    @property
    def options(self) -> tuple[str, ...]:
        """The flags of its agent: what is 0 is left to the agent."""
        return tuple(
            part
            for field in fields(self)
            if (value := getattr(self, field.name))
            for part in (f"--{field.name.replace('_', '-')}", str(value))
        )


Clusters = Sequence[int | Sequence[Device]]
"""Each cluster: a number of devices, or its devices one by one."""


@dataclass(frozen=True)
class Service:
    """A process of the testbed.

    Args:
        name: Its name, which is also its host id.
        module: What `python -m` runs.
        options: Flags that only this process has.
        keeps_state: Whether it takes a state directory.
        is_stage_host: Whether it computes, and so can be emulated.
    """

    name: str
    module: str
    options: tuple[str, ...] = ()
    keeps_state: bool = True
    is_stage_host: bool = True


def spell_out(clusters: Clusters) -> list[list[Device]]:
    """Turns numbers of devices into devices."""
    spelt = [
        [Device()] * cluster if isinstance(cluster, int) else list(cluster) for cluster in clusters
    ]
    for index, devices in enumerate(spelt):
        if not devices:
            raise InvalidInputError(
                f"cluster {index} has no devices: a cluster needs at least 1 to run its blocks"
            )
    return spelt


def services(
    clusters: Sequence[Sequence[Device]], scheduler_options: Sequence[str] = ()
) -> list[Service]:
    """Lists the processes of a testbed, the scheduler first."""
    listed = [
        Service(SCHEDULER, "collapipe.scheduler", tuple(scheduler_options), is_stage_host=False),
        Service("edge-server", "collapipe.edge_server"),
    ]
    for cluster_index, devices in enumerate(clusters):
        cluster = ("--cluster-index", str(cluster_index))
        listed.append(Service(f"control-unit-{cluster_index}", "collapipe.control_unit", cluster))
        listed += [
            Service(
                device_name(cluster_index, device_index),
                "collapipe.device_agent",
                (*cluster, *device.options),
                keeps_state=False,
            )
            for device_index, device in enumerate(devices)
        ]
    return listed


def device_name(cluster_index: int, device_index: int) -> str:
    """Names a device, which is also its host id."""
    return f"device-{cluster_index}-{device_index}"


def command(
    service: Service,
    workspace: Workspace,
    *,
    listen: str = LOOPBACK,
    scheduler_address: str | None = None,
    emulation_file: Path | None = None,
    exit_with_parent: bool = True,
) -> list[str]:
    """Builds the command line of a process.

    Args:
        service: The process.
        workspace: Where its files are.
        listen: Address to serve on.
        scheduler_address: Where the scheduler is; `None` for the scheduler itself.
        emulation_file: The world that it is to seem to be in, if any.
        exit_with_parent: Whether it ends with whoever starts it.
    """
    line = [sys.executable, "-m", service.module, "--host-id", service.name]
    line += ["--insecure", "--listen", listen]
    line += ["--ready-file", str(workspace.ready_file(service.name))]
    if scheduler_address is not None:
        line += ["--scheduler", scheduler_address]
    if emulation_file is not None and service.is_stage_host:
        line += ["--emulation", str(emulation_file)]
    if service.keeps_state:
        line += ["--state-dir", str(workspace.state_dir(service.name))]
    if exit_with_parent:
        line += ["--exit-with-parent", str(os.getpid())]
    return [*line, *service.options]
