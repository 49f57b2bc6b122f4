"""The `collapipe` command: what one can do with jobs.

`testbed_commands` adds what one can do with the testbed.
"""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe_client import testbed_commands
from collapipe_client.certs_commands import certs_app
from collapipe_client.cli_options import (
    AsJson,
    DeviceMemory,
    DevicesOption,
    DeviceSpeed,
    EmulateOption,
    EmulationOption,
    Endpoint,
    Insecure,
    SchedulerOption,
    TestbedOptions,
    TlsCa,
    TlsCert,
    TlsKey,
    WorkspaceOption,
    client_for_records,
    find_endpoint,
    read_clusters,
    read_counts,
    read_emulation,
)
from collapipe_client.client import CollaPipeClient
from collapipe_client.fit_command import fit
from collapipe_client.job_files import (
    check_has_data,
    load_job,
    load_preset,
    preset_names,
    with_local_paths,
)
from collapipe_client.join_command import join, renew
from collapipe_client.live_view import make_display
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.plan_commands import plan_app
from collapipe_client.reporting import (
    FAILED,
    complain,
    exit_codes,
    print_json,
    say,
    termination_as_interrupt,
)
from collapipe_client.shape_command import testbed_app
from collapipe_client.simulate_command import simulate
from collapipe_client.targets_command import targets
from collapipe_client.testbed_processes import DEFAULT_DEVICES
from collapipe_client.training import follow_job, how_to_load, run_job, say_resumable
from collapipe_client.view_state import JobView, say_measurement
from collapipe_client.workspace import DEFAULT_ROOT

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train Transformers on devices too small to hold them.",
)
app.add_typer(plan_app, name="plan")
app.add_typer(testbed_app, name="testbed")
app.add_typer(certs_app, name="certs")

_JOB_HELP = "The job's id, or its name for the newest of that name."


@app.command()
def train(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.toml", show_default=False)] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"Instead of a file: {', '.join(preset_names())}.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a key, for example training.rounds=5."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last commit of the job of this name.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the model goes. Default: ./collapipe-models/NAME."),
    ] = None,
    devices: DevicesOption = None,
    device_memory: DeviceMemory = None,
    device_speed: DeviceSpeed = None,
    emulate: EmulateOption = None,
    emulation: EmulationOption = None,
    scheduler: SchedulerOption = None,
    insecure: Insecure = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Train a model, and export it.

    Without --scheduler, and with no testbed up, starts one on this machine for this job and ends
    it afterwards.
    """
    with exit_codes(as_json), termination_as_interrupt():
        endpoint = find_endpoint(scheduler, insecure, tls_ca, tls_cert, tls_key, workspace)
        local = endpoint is None or endpoint.testbed is not None
        job = _load(job_file, preset, settings or [], local)
        check_has_data(job)
        if local:
            job = with_local_paths(job)
        options = TestbedOptions(devices, device_memory, device_speed, emulate, emulation)
        display = make_display(Console(), as_json)
        try:
            with _testbed_for(job, endpoint, options, workspace, display.note) as (client, testbed):
                if as_json:
                    print_json({"event": "job", "config": job.model_dump(mode="json")})
                with display:
                    job_id = run_job(client, job, display, resume=resume, testbed=testbed)
                view = display.view
                if view.state == "succeeded":
                    directory = output or Path("collapipe-models") / job.name
                    files = client.export(job_id, directory)
        except BaseException:
            if display.view.state and not as_json:
                complain(f"stopped: {say_resumable(display.view, _resume_command())}")
            raise
        if view.state != "succeeded":
            if not as_json:
                complain(f"the job {view.state}: {view.message or 'no reason given'}")
                complain(say_resumable(view, _resume_command()))
            raise typer.Exit(FAILED)
        _say_trained(job, view, directory, files, as_json)


@app.command()
def watch(
    job: Annotated[str, typer.Argument(help=_JOB_HELP)],
    scheduler: SchedulerOption = None,
    insecure: Insecure = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Follow a job that runs. Ctrl-C ends the watching, not the job."""
    with exit_codes(as_json):
        endpoint = find_endpoint(scheduler, insecure, tls_ca, tls_cert, tls_key, workspace)
        with _need(endpoint).client() as client, make_display(Console(), as_json) as display:
            follow_job(client, client.find_job(job).job_id, display)
        if display.view.state != "succeeded":
            raise typer.Exit(FAILED)


@app.command()
def cancel(
    job: Annotated[str, typer.Argument(help=_JOB_HELP)],
    scheduler: SchedulerOption = None,
    insecure: Insecure = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Stop a job; its last commit stays."""
    with exit_codes(as_json):
        endpoint = find_endpoint(scheduler, insecure, tls_ca, tls_cert, tls_key, workspace)
        with _need(endpoint).client() as client:
            status = client.find_job(job)
            client.cancel(status.job_id)
        if as_json:
            print_json({"job_id": status.job_id, "cancelled": True})
        else:
            say(
                f"job {status.name} ({status.job_id}) will stop; {status.num_rounds_committed} "
                "rounds stay"
            )


@app.command()
def export(
    job: Annotated[str, typer.Argument(help=_JOB_HELP)],
    directory: Annotated[Path, typer.Argument(help="Where the files go.")],
    scheduler: SchedulerOption = None,
    insecure: Insecure = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Fetch the model of a job's last commit, as `save_pretrained` writes it."""
    with exit_codes(as_json), termination_as_interrupt():
        endpoint = find_endpoint(scheduler, insecure, tls_ca, tls_cert, tls_key, workspace)
        with client_for_records(endpoint, workspace, as_json) as client:
            files = client.export(job, directory)
        if as_json:
            print_json({"directory": str(directory), "files": [path.name for path in files]})
        else:
            say(f"{len(files)} files in {directory}")


def _load(job_file: Path | None, preset: str | None, settings: list[str], local: bool) -> JobConfig:
    if (job_file is None) == (preset is None):
        raise InvalidInputError(
            f"give either a job file or --preset {'|'.join(preset_names())}, for example: "
            "collapipe train --preset demo"
        )
    if preset is not None:
        return load_preset(preset, settings)
    assert job_file is not None
    return load_job(job_file, settings, local=local)


@contextmanager
def _testbed_for(
    job: JobConfig,
    endpoint: Endpoint | None,
    options: TestbedOptions,
    workspace: Path,
    tell: Callable[[str], None],
) -> Iterator[tuple[CollaPipeClient, LocalTestbed | None]]:
    """Gives a client for the job: of the scheduler that there is, or of a testbed made for it."""
    if endpoint is not None:
        if options != TestbedOptions():
            raise InvalidInputError(
                "--devices, --device-memory, --device-speed, --emulate and --emulation shape a "
                f"testbed that `train` starts, but {endpoint.address} is up: leave them out, or "
                "run `collapipe down` first"
            )
        if endpoint.testbed is not None:
            _check_fits(job, [len(cluster) for cluster in endpoint.testbed.shape])
        with endpoint.client() as client:
            yield client, None
        return
    counts = (
        read_counts(options.devices, job.clusters)
        if options.devices
        else [job.num_devices(index) or DEFAULT_DEVICES for index in range(job.clusters)]
    )
    _check_fits(job, counts)
    clusters = read_clusters(counts, options.device_memory, options.device_speed)
    emulation = read_emulation(counts, options.emulate, options.emulation)
    tell(
        f"starting a testbed in {workspace}: scheduler, edge server, and clusters of "
        f"{', '.join(map(str, counts))} devices"
    )
    with (
        LocalTestbed(clusters, workspace, emulation=emulation, progress=tell) as testbed,
        testbed.client() as client,
    ):
        yield client, testbed


def _check_fits(job: JobConfig, counts: list[int]) -> None:
    """Refuses a job that would wait for hosts that never come."""
    needed = [job.num_devices(index) or 1 for index in range(job.clusters)]
    fits = len(needed) <= len(counts) and all(n <= c for n, c in zip(needed, counts, strict=False))
    if not fits:
        raise InvalidInputError(
            f"the job {job.name!r} needs {_say_counts(needed)}, the testbed has "
            f"{_say_counts(counts)}: change `clusters` and `devices_per_cluster` of the job with "
            "--set, or the testbed with --devices (one that is up: `collapipe down`, then "
            "`collapipe up --clusters N --devices K,K`)"
        )


def _say_counts(counts: list[int]) -> str:
    return f"{len(counts)} clusters of {', '.join(map(str, counts))} devices"


def _need(endpoint: Endpoint | None) -> Endpoint:
    if endpoint is None:
        raise InvalidInputError(
            "no scheduler: no testbed is up here; give --scheduler HOST:PORT, or start one with "
            "`collapipe up`"
        )
    return endpoint


def _resume_command() -> str:
    arguments = sys.argv[1:]
    return shlex.join(["collapipe", *arguments, *([] if "--resume" in arguments else ["--resume"])])


def _say_trained(
    job: JobConfig, view: JobView, directory: Path, files: list[Path], as_json: bool
) -> None:
    measured = view.measurement
    if as_json:
        print_json(
            {
                "event": "exported",
                "directory": str(directory),
                "files": [path.name for path in files],
                "metric": measured.metric if measured else None,
                "value": measured.value if measured else None,
            }
        )
        return
    say(f"final: {say_measurement(measured)}" if measured else "final: the metric was not measured")
    say(f"the model is in {directory}; use it like this:")
    say("\n".join(f"    {line}" for line in how_to_load(job.task.kind, directory).splitlines()))


app.command()(join)
app.command()(renew)
app.command()(simulate)
app.command()(fit)
app.command()(targets)
testbed_commands.add_to(app)
