"""The `collapipe` commands about the local testbed and this machine."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from collapipe.errors import NotFoundError
from collapipe.v1.scheduler_pb2 import HostRole, HostStatus, JobState
from collapipe_client.cli_options import (
    AsJson,
    DeviceMemory,
    DevicesOption,
    DeviceSpeed,
    EmulateOption,
    EmulationOption,
    Insecure,
    SchedulerOption,
    TlsCa,
    TlsCert,
    TlsKey,
    WorkspaceOption,
    find_endpoint,
    read_clusters,
    read_counts,
    read_emulation,
)
from collapipe_client.doctor_command import doctor
from collapipe_client.documents import enum_word, to_document
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.processes import last_lines
from collapipe_client.reporting import (
    complain,
    exit_codes,
    print_json,
    say,
    termination_as_interrupt,
)
from collapipe_client.testbed_processes import DEFAULT_DEVICES, LOOPBACK
from collapipe_client.workspace import DEFAULT_ROOT, Workspace, WorkspaceRecord


def add_to(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    for command in (up, down, status, logs, doctor):
        app.command()(command)


def up(
    clusters: Annotated[int, typer.Option(min=1, help="Number of clusters.")] = 1,
    devices: DevicesOption = None,
    device_memory: DeviceMemory = None,
    device_speed: DeviceSpeed = None,
    emulate: EmulateOption = None,
    emulation: EmulationOption = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the scheduler listens; port 0 is any.")
    ] = LOOPBACK,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Start a testbed on this machine that stays up. Of one that is up, start what has ended."""
    with exit_codes(as_json), termination_as_interrupt():
        counts = read_counts(devices or str(DEFAULT_DEVICES), clusters)
        shape = read_clusters(counts, device_memory, device_speed)
        testbed = LocalTestbed(
            shape,
            workspace,
            emulation=read_emulation(counts, emulate, emulation),
            detached=True,
            listen=listen,
            progress=complain if as_json else say,
        )
        testbed.start()
        if as_json:
            record = Workspace(workspace).read_record()
            print_json({"scheduler": testbed.scheduler_address, "testbed": _testbed(record)})
            return
        say(
            f"up: {len(testbed.processes)} processes, scheduler at {testbed.scheduler_address}\n"
            "train with `collapipe train --preset demo`, look with `collapipe status`, end with "
            "`collapipe down`"
        )


def down(workspace: WorkspaceOption = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """End the testbed. Its state stays, so that jobs can be resumed."""
    with exit_codes(as_json):
        record = LocalTestbed.end(workspace)
        ended = [process.name for process in record.processes] if record else []
        if as_json:
            print_json({"ended": ended})
        else:
            say(f"down: {len(ended)} processes ended" if ended else "nothing is up here")


def status(
    scheduler: SchedulerOption = None,
    insecure: Insecure = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show the testbed's processes, the hosts and the jobs."""
    with exit_codes(as_json):
        record = Workspace(workspace).read_record() if scheduler is None else None
        endpoint = find_endpoint(scheduler, insecure, tls_ca, tls_cert, tls_key, workspace)
        document: dict[str, Any] = {"scheduler": None, "testbed": _testbed(record)}
        document |= {"hosts": [], "jobs": []}
        if endpoint is not None:
            with endpoint.client() as client:
                hosts, jobs = client.hosts(), client.jobs()
            document["scheduler"] = endpoint.address
            document["hosts"] = [to_document(host) for host in hosts]
            document["jobs"] = [to_document(job) for job in jobs]
        if as_json:
            print_json(document)
            return
        if endpoint is None:
            say(
                "nothing is up here: `collapipe up` starts a testbed, --scheduler HOST:PORT looks "
                "elsewhere"
            )
            return
        say(f"scheduler {endpoint.address}")
        for name in [p.name for p in record.processes if not p.alive] if record else []:
            say(f"  {name} has ended: `collapipe logs {name}`; `collapipe up` starts it again")
        console = Console()
        if not hosts:
            say("no host has registered yet: they take up to a minute after they start")
        console.print(
            _table(["host", "role", "cluster", "address", "alive"], map(_host_row, hosts))
        )
        rows = (
            (
                job.job_id,
                job.name,
                enum_word(JobState.Name(job.state), "JobState"),
                f"{job.num_rounds_committed}/{job.num_rounds}",
                job.message,
            )
            for job in jobs
        )
        console.print(_table(["job", "name", "state", "rounds", "message"], rows))


def logs(
    name: Annotated[str | None, typer.Argument(help="A process, for example device-0-1.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="How many lines.")] = 40,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show the last lines of a process's log; without a name, where the logs are."""
    with exit_codes(as_json):
        folder = Workspace(workspace)
        files = {path.stem: path for path in sorted(folder.logs.glob("*.log"))}
        if name is not None and name not in files:
            known = ", ".join(files) or "none"
            raise NotFoundError(f"there is no log of {name!r} in {folder.logs}: there are {known}")
        if as_json:
            shown = files if name is None else {name: files[name]}
            print_json({log: {"file": str(path)} for log, path in shown.items()})
        elif name is None:
            say("\n".join(str(path) for path in files.values()) or f"no logs in {folder.logs}")
        else:
            say(last_lines(files[name], lines))


def _testbed(record: WorkspaceRecord | None) -> dict[str, Any] | None:
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


def _host_row(status: HostStatus) -> tuple[str, ...]:
    host = status.host
    role = enum_word(HostRole.Name(host.role), "HostRole")
    cluster = "" if role == "edge_server" else str(host.cluster_index)
    return (host.host_id, role, cluster, host.address, "yes" if status.alive else "no")


def _table(columns: list[str], rows: Any) -> Table:
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    return table
