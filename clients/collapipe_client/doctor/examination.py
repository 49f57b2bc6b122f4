"""Runs the checks that apply to a machine."""

import platform
import struct
from pathlib import Path

import psutil

from collapipe.errors import CollapipeError
from collapipe.installation import PACKAGES
from collapipe.telemetry.sensors import processor_celsius
from collapipe_client.doctor import kernel, machine, peers, ports
from collapipe_client.doctor.box_settings import BoxSettings, Role
from collapipe_client.doctor.certificate import check_certificate
from collapipe_client.doctor.check import Check
from collapipe_client.endpoint import Endpoint


def examine(
    workspace: Path, scheduler: Endpoint | None, settings: BoxSettings, role: Role | None = None
) -> list[Check]:
    """Examines this machine.

    Args:
        workspace: Folder of the local testbed. `settings.state_dir`, if set, is checked instead.
        scheduler: `None` if there is no scheduler to reach.
        settings: Settings of the service that this machine runs.
        role: Role of that service; `None` for a machine that runs testbeds and clients.
    """
    checks = _examine_machine(settings.state_dir or workspace, settings, role)
    if role is None:
        checks += [machine.check_packages(each) for each in PACKAGES]
    else:
        checks += _examine_ports(settings, role)
        checks.append(machine.check_packages(role, needed=True))
    if settings.tls_ca and settings.tls_cert and settings.tls_key:
        checks += check_certificate(
            settings.tls_ca,
            settings.tls_cert,
            settings.tls_key,
            role=role or "",
            advertised_host=settings.advertised_host if role else "",
        )
    if scheduler is not None:
        checks += _examine_peers(scheduler, settings, role)
    return checks


def _examine_machine(folder: Path, settings: BoxSettings, role: Role | None) -> list[Check]:
    is_box = role is not None
    checks = [
        Check.ok("python", platform.python_version()),
        machine.check_userland(struct.calcsize("P"), platform.machine()),
    ]
    # A scheduler does not use torch, and a slow machine takes seconds to import it.
    if role != "scheduler":
        torch, is_jetson = machine.ask_torch(), machine.is_jetson()
        checks.append(
            machine.check_torch(torch, jetson=is_jetson, wanted=settings.device, needed=is_box)
        )
    checks += [
        machine.check_memory(psutil.virtual_memory().available, of_box=is_box),
        machine.check_swap(),
        machine.check_disk(folder, keeps_state=role != "device-agent"),
    ]
    if platform.system() == "Linux":
        checks += [
            kernel.check_memory_cgroup(),
            kernel.check_clock(kernel.clock_is_synchronised()),
            kernel.check_temperature(processor_celsius(), kernel.throttled_flags()),
        ]
    return checks


def _examine_ports(settings: BoxSettings, role: Role) -> list[Check]:
    module = f"collapipe.{role.replace('-', '_')}"
    checks = [ports.check_port("gRPC", "listen", settings.listen, module)]
    if settings.metrics_listen:
        checks.append(
            ports.check_port("metrics", "metrics_listen", settings.metrics_listen, module)
        )
    return checks


def _examine_peers(scheduler: Endpoint, settings: BoxSettings, role: Role | None) -> list[Check]:
    with scheduler.client() as client:
        hosts = peers.ask_hosts(client)
        checks = [peers.check_scheduler(scheduler.address, hosts)]
        if isinstance(hosts, CollapipeError):
            return checks
        try:
            offset = peers.clock_offset(client)
        except CollapipeError:  # The scheduler has just ended. The checks of the peers report this.
            offset = None
    if offset is not None:
        checks.append(kernel.check_clock_offset(*offset))
    to_reach = peers.peers_of(role, settings.cluster_index, hosts)
    return checks + peers.check_peers(to_reach, scheduler.security)
