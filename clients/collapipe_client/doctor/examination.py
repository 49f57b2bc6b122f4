"""Runs the checks that concern a machine."""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from collapipe.errors import CollapipeError
from collapipe.rpc import Security
from collapipe_client.client import CollaPipeClient
from collapipe_client.doctor import kernel, machine, peers, ports
from collapipe_client.doctor.box_settings import BoxSettings, Role
from collapipe_client.doctor.certificate import check_certificate, read_certificate
from collapipe_client.doctor.check import Check


@dataclass(frozen=True)
class SchedulerToReach:
    """A scheduler, and what to show it.

    Args:
        address: "host:port".
        security: Plain text, or the box's certificate.
    """

    address: str
    security: Security


def examine(
    workspace: Path,
    scheduler: SchedulerToReach | None,
    settings: BoxSettings,
    role: Role | None = None,
) -> list[Check]:
    """Examines this machine.

    Args:
        workspace: Folder of the local testbed; a service's own folder of state comes before it.
        scheduler: The scheduler to reach, if there is one.
        settings: Of the service that the machine is to run.
        role: What it is to be; `None` for a machine that runs testbeds and clients.
    """
    checks = [*_examine_machine(settings.state_dir or workspace, settings, role)]
    if role is None:
        checks.append(ports.check_loopback())
        checks += [machine.check_packages(each) for each in machine.all_roles()]
    else:
        checks += _examine_ports(settings, role)
        checks.append(machine.check_packages(role, needed=True))
    if settings.tls_ca and settings.tls_cert and settings.tls_key:
        facts = read_certificate(settings.tls_ca, settings.tls_cert, settings.tls_key)
        checks += check_certificate(
            facts, role=role or "", advertised_host=settings.advertised_host if role else ""
        )
    if scheduler is not None:
        checks += _examine_peers(scheduler, settings, role)
    return checks


def _examine_machine(folder: Path, settings: BoxSettings, role: Role | None) -> list[Check]:
    checks = [
        machine.check_python(sys.version_info[:3]),
        machine.check_userland(machine.pointer_bytes(), platform.machine()),
    ]
    if role != "scheduler":  # which has no torch, and importing it takes a Raspberry Pi seconds
        torch = machine.check_torch(
            machine.ask_torch(),
            jetson=machine.is_jetson(),
            wanted=settings.device,
            needed=role is not None,
        )
        checks.append(torch)
    checks += [
        machine.check_cores(machine.available_cores(), of_box=role is not None),
        machine.check_memory(machine.available_memory_bytes(), of_box=role is not None),
        machine.check_swap(machine.swap_areas()),
        machine.check_disk(folder, keeps_state=role != "device-agent"),
    ]
    if role is None:
        checks.append(machine.check_workspace(folder))
    if os.name == "posix" and platform.system() == "Linux":
        checks += [
            kernel.check_memory_cgroup(kernel.find_cgroups(), kernel.boot_command_line()),
            kernel.check_shaping(kernel.find_qdiscs(), wanted=settings.shaper == "tc"),
            kernel.check_clock(kernel.clock_is_kept()),
            kernel.check_temperature(kernel.temperature(), kernel.throttled_word()),
        ]
    return checks


def _examine_ports(settings: BoxSettings, role: Role) -> list[Check]:
    module = f"collapipe.{role.replace('-', '_')}"
    served = [("gRPC", "listen", settings.listen)]
    if settings.metrics_listen:
        served.append(("metrics", "metrics_listen", settings.metrics_listen))
    return [
        ports.check_port(purpose, setting, address, ports.try_port(address), module)
        for purpose, setting, address in served
    ]


def _examine_peers(
    scheduler: SchedulerToReach, settings: BoxSettings, role: Role | None
) -> list[Check]:
    with CollaPipeClient(scheduler.address, scheduler.security) as client:
        hosts = peers.ask_hosts(client)
        checks = [peers.check_scheduler(scheduler.address, hosts)]
        if isinstance(hosts, CollapipeError):
            return checks
        try:
            offset = peers.clock_offset(client)
        except CollapipeError:  # it ended meanwhile: the checks of peers tell more
            offset = None
    if offset is not None:
        checks.append(kernel.check_clock_offset(*offset))
    to_reach = peers.peers_of(role, settings.cluster_index, hosts)
    return checks + peers.check_peers(to_reach, scheduler.security)
