"""The commands about the local testbed: `collapipe up`, `down`, `status` and `logs`."""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from collapipe.errors import NotFoundError
from collapipe.mistakes import did_you_mean
from collapipe.printable import indented
from collapipe.v1.scheduler_pb2 import HostRole, HostStatus, JobStatus
from collapipe_client.addresses import read_address
from collapipe_client.cli_options import AsJson, WorkspaceOption, takes_option_groups
from collapipe_client.endpoint import EndpointOptions, find_endpoint, running_testbed
from collapipe_client.jobs_commands import job_table
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.message_json import enum_word, to_document
from collapipe_client.processes import check_free, last_lines
from collapipe_client.reporting import (
    complain,
    exit_codes,
    page_line,
    plain_table,
    print_json,
    print_table,
    say,
    termination_as_interrupt,
)
from collapipe_client.testbed_options import LocalTestbedOptions
from collapipe_client.testbed_processes import (
    DEFAULT_DEVICES,
    LOOPBACK,
    SCHEDULER,
    Device,
    say_shared_cores,
)
from collapipe_client.trouble import say_clock, say_last_seen, say_moment, say_trouble
from collapipe_client.view_state import say_privacy_loss
from collapipe_client.workspace import DEFAULT_ROOT, Workspace, WorkspaceRecord


@takes_option_groups
def up(
    clusters: Annotated[
        int | None,
        typer.Option(min=1, help="Number of clusters; 1 if no testbed is running."),
    ] = None,
    *,
    testbed_options: LocalTestbedOptions,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Address of the scheduler. Port 0 takes any free port."
        ),
    ] = LOOPBACK,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Start a testbed on this machine that keeps running after this command.

    If the testbed is running already, this command starts only the processes that have ended. It needs no options
    then.
    """
    with exit_codes(as_json), termination_as_interrupt():
        read_address("--listen", listen, least_port=0)
        if running_testbed(workspace) is None:
            check_free(listen, SCHEDULER)
        devices = None
        if clusters is None and not testbed_options.describe_devices:
            devices = _running_devices(workspace)
        if devices is None:
            clusters = clusters or 1
            counts = testbed_options.read_counts(clusters) or [DEFAULT_DEVICES] * clusters
            devices = testbed_options.read_clusters(counts)
        counts = [len(cluster) for cluster in devices]
        testbed = LocalTestbed(
            devices,
            workspace,
            emulation=testbed_options.read_emulation(counts),
            detached=True,
            listen=listen,
            progress=complain,
        )
        testbed.start()
        if crowded := say_shared_cores(len(testbed.processes)):
            complain(crowded)
        if as_json:
            record = Workspace(workspace).read_record()
            print_json(
                {
                    "scheduler": testbed.scheduler_address,
                    "page": testbed.workspace.page_link(),
                    "testbed": _describe(record),
                }
            )
        else:
            say(
                f"up: {len(testbed.processes)} processes, scheduler at {testbed.scheduler_address}\n"
                "`collapipe train --preset demo` trains a model, `collapipe status` shows the testbed, `collapipe down` ends it"
            )
            say(page_line(testbed.workspace.page_link()))


def _running_devices(workspace: Path) -> list[list[Device]] | None:
    """Returns the devices of each cluster of the testbed that `collapipe up` started, if it still runs."""
    record = Workspace(workspace).read_record()
    if record is None or not record.detached or not record.alive:
        return None
    return [[Device(memory, speed) for memory, speed in cluster] for cluster in record.shape]


def down(workspace: WorkspaceOption = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """End the testbed. Its state is kept, so that jobs can be resumed."""
    with exit_codes(as_json):
        record = LocalTestbed.end(workspace)
        ended = [process.name for process in record.processes] if record else []
        if as_json:
            print_json({"ended": ended})
        else:
            say(f"down: {len(ended)} processes ended" if ended else "nothing is up here")


@takes_option_groups
def status(endpoint_options: EndpointOptions, as_json: AsJson = False) -> None:
    """Show the testbed's processes, the hosts and the jobs."""
    with exit_codes(as_json):
        endpoint = find_endpoint(endpoint_options)
        record = (
            endpoint.testbed if endpoint else Workspace(endpoint_options.workspace).read_record()
        )
        hosts: list[HostStatus] = []
        jobs: list[JobStatus] = []
        if endpoint is not None:
            with endpoint.client() as client:
                hosts, jobs = client.hosts(), client.jobs()
        if as_json:
            print_json(
                {
                    "scheduler": endpoint.address if endpoint else None,
                    "page": Workspace(endpoint_options.workspace).page_link() if record else None,
                    "testbed": _describe(record),
                    "hosts": [to_document(host) for host in hosts],
                    "jobs": [to_document(job) for job in jobs],
                }
            )
        elif endpoint is None:
            say(
                "nothing is up here: start a testbed with `collapipe up`, or give --scheduler HOST:PORT"
            )
        else:
            say(f"scheduler {endpoint.address}")
            if link := Workspace(endpoint_options.workspace).page_link() if record else "":
                say(page_line(link))
            for process in record.processes if record else ():
                if not process.alive:
                    say(
                        f"  {process.name} has ended: `collapipe logs {process.name}` shows why, `collapipe up` "
                        "starts it again"
                    )
            if not hosts:
                say("no host has registered yet: this takes up to a minute after the start")
            host_table = plain_table("host", "role", "cluster", "address", "alive")
            ended = {p.name for p in record.processes if not p.alive} if record else set()
            for host in hosts:
                host_table.add_row(*_host_row(host, ended))
            print_table(host_table)
            now = time.time()
            if clock := say_clock(hosts, now):
                say(f"  {clock}")
            for host in hosts:
                if host.refusal:
                    say(f"  {host.host.host_id} is refused: {indented(host.refusal)}")
                if host.twin_address:
                    say(
                        f"  two processes call themselves {host.host.host_id}: the one at {host.host.address} takes part, and the one at "
                        f"{indented(host.twin_address)} is refused. Give one of them another --host-id, or stop it"
                    )
                if host.suspicion:
                    until = say_moment(host.suspected_until, now)
                    say(
                        f"  {host.host.host_id} is suspected until {until}: {indented(host.suspicion)}"
                    )
                if host.unshaped:
                    say(f"  {host.host.host_id} has unshaped links: {indented(host.unshaped)}")
            print_table(job_table(jobs))
            for job in jobs:
                if trouble := say_trouble(job.trouble, now, job.message):
                    say(f"  job {job.job_id}: {indented(trouble)}")
                if job.HasField("privacy_loss"):
                    say(f"  job {job.job_id}: {say_privacy_loss(job.privacy_loss)}")


def logs(
    name: Annotated[str | None, typer.Argument(help="A process, for example device-0-1.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="Number of lines.")] = 40,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show the last lines of a process's log. Without a name, list the log files."""
    with exit_codes(as_json):
        folder = Workspace(workspace)
        files = {path.stem: path for path in sorted(folder.logs.glob("*.log"))}
        if name is not None and name not in files:
            hint = did_you_mean(name, list(files))
            known = f"choose one of {', '.join(files)}" if files else "nothing was started there"
            raise NotFoundError(
                f"there is no log of {name!r} in {folder.logs}: {hint}{known}; --workspace DIR names another folder"
            )
        if as_json:
            shown = files if name is None else {name: files[name]}
            print_json({log: {"file": str(path)} for log, path in shown.items()})
        elif name is None:
            say("\n".join(str(path) for path in files.values()) or f"no logs in {folder.logs}")
        else:
            say(last_lines(files[name], lines))


def _describe(record: WorkspaceRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "detached": record.detached,
        "devices": [len(cluster) for cluster in record.shape],
        "processes": [
            {"name": p.name, "pid": p.pid, "address": p.address, "alive": p.alive}
            for p in record.processes
        ],
    }


def _host_row(status: HostStatus, ended: Collection[str]) -> list[str]:
    """Returns the row of a host. `ended` names the processes of the testbed that have ended, which the scheduler may not know yet."""
    host = status.host
    role = enum_word(HostRole.Name(host.role), "HostRole")
    cluster = "" if role == "edge_server" else str(host.cluster_index)
    alive = "yes" if status.alive else f"no: {say_last_seen(status, time.time())}"
    if status.refusal:
        alive = "no: refused"
    elif status.alive and host.host_id in ended:
        alive = "no: its process has ended"
    elif status.alive and status.suspicion:
        alive = "suspected"
    return [host.host_id, role, cluster, host.address, alive]
