"""The `collapipe` command. This module has the commands about jobs and collects all others."""

import itertools
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from collapipe.emulation.emulation_file import Emulation
from collapipe.errors import InvalidInputError
from collapipe.finding import Finding, shortened
from collapipe.job import JobConfig
from collapipe.pretrained_directories import pretrained_directory
from collapipe.printable import printable
from collapipe_client import testbed_commands
from collapipe_client.certs_commands import certs_app
from collapipe_client.cli_options import AsJson, JobFile, Preset, Settings, Yes, takes_option_groups
from collapipe_client.client import FINAL_STATES, CollaPipeClient
from collapipe_client.completion import job_names
from collapipe_client.context_commands import context_app
from collapipe_client.doctor_command import doctor
from collapipe_client.dry_run import Site, site_elsewhere, site_here
from collapipe_client.dry_run import dry_run as run_dry
from collapipe_client.endpoint import (
    Endpoint,
    EndpointOptions,
    client_for_past_jobs,
    find_endpoint,
    need_endpoint,
    running_testbed,
)
from collapipe_client.estimate_command import estimate
from collapipe_client.fit_command import fit
from collapipe_client.job_files import (
    check_family,
    check_has_data,
    read_job,
    with_local_paths,
)
from collapipe_client.jobs_commands import JobArgument, jobs_app
from collapipe_client.join_command import join, renew
from collapipe_client.live_view import Display, make_display
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.message_json import to_document
from collapipe_client.model_commands import evaluate, predict
from collapipe_client.plan_commands import choose_job, plan_app
from collapipe_client.report_command import report
from collapipe_client.reporting import (
    FAILED,
    complain,
    exit_codes,
    page_line,
    print_json,
    say,
    termination_as_interrupt,
)
from collapipe_client.shape_command import testbed_app
from collapipe_client.simulate_command import simulate
from collapipe_client.targets_command import targets
from collapipe_client.testbed_options import LocalTestbedOptions
from collapipe_client.testbed_processes import (
    DEFAULT_DEVICES,
    EDGE_SERVER,
    Device,
    say_shared_cores,
)
from collapipe_client.trace_command import trace
from collapipe_client.training import follow_job, how_to_load, how_to_resume, run_job
from collapipe_client.view_state import JobView, definition_lines, say_evaluation
from collapipe_client.workspace import DEFAULT_ROOT, Workspace, WorkspaceRecord

if os.environ.get("COLUMNS") == "0":
    del os.environ["COLUMNS"]  # A table of this width would have no characters.

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train Transformer models on devices that are too small to hold them.",
)
plan_app.command()(estimate)
jobs_app.command()(report)
app.add_typer(jobs_app, name="jobs")
app.add_typer(plan_app, name="plan")
app.add_typer(testbed_app, name="testbed")
app.add_typer(certs_app, name="certs")
app.add_typer(context_app, name="context")


_MODELS = Path("collapipe-models")
"""Where models are put that have no folder of their own."""
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the model that the folder has.")
]


@app.command()
@takes_option_groups
def train(
    job_file: JobFile = None,
    preset: Preset = None,
    settings: Settings = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the last job of this name from its restore point."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the model. Default: ./collapipe-models/NAME, or one with the job's id if that has a model already.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Start no hosts. Check the data, the model and the memory of the devices, and estimate the time.",
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Refuse data about which there is a warning, as data.strict does."
        ),
    ] = False,
    *,
    testbed_options: LocalTestbedOptions,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Train a model and export it.

    If --scheduler is not given and no testbed runs, this command starts a testbed on this machine for the job
    and ends it afterwards.
    """
    with exit_codes(as_json), termination_as_interrupt():
        endpoint = find_endpoint(endpoint_options)
        settings = [*(settings or []), *["data.strict=true"] * strict]
        job, findings = _load(job_file, preset, settings, endpoint)
        if output is not None:
            _check_empty(output, overwrite)
        _check_writable(output or _MODELS)
        num_rounds = job.training.rounds
        # Without --dry-run, a scheduler that runs checks this when the job is submitted.
        if resume and (dry_run or endpoint is None):
            found = endpoint.client() if endpoint else client_for_past_jobs(endpoint_options)
            with found as client:
                answer = client.check_resume(job)
            is_done = answer.job.num_rounds_committed >= num_rounds
            num_rounds = 0 if is_done else num_rounds - answer.num_rounds_restorable
        if dry_run:
            arguments = [each for each in sys.argv[1:] if each != "--dry-run"]
            site = _site(job, endpoint, testbed_options, endpoint_options.workspace)
            command = shlex.join(["collapipe", *arguments])
            if not run_dry(job, site, command, as_json, num_rounds):
                raise typer.Exit(FAILED)
            return
        display = make_display(as_json)
        try:
            with (
                display,
                _testbed_for(
                    job, endpoint, testbed_options, endpoint_options.workspace, display, findings
                ) as (client, testbed),
            ):
                if as_json:
                    print_json({"event": "job", "config": job.model_dump(mode="json")})
                job_id = run_job(client, job, display, resume=resume, testbed=testbed)
                view = display.view
                if view.state == "succeeded":
                    directory = output or _free_folder(job.name, job_id, overwrite)
                    files = client.export(job_id, directory)
        except BaseException:
            if display.view.state and not as_json:
                complain(
                    f"stopped: {how_to_resume(display.view, _next_command(display.view, endpoint_options))}"
                )
            raise
        if view.state != "succeeded":
            if not as_json:
                complain(f"the job {view.state}: {view.message or 'no reason given'}")
                complain(how_to_resume(view, _next_command(view, endpoint_options)))
            raise typer.Exit(FAILED)
        _say_trained(job, view, directory, files, as_json)


JobOrNewest = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]",
        help="Id or name of the job. Default: the newest one that has not ended.",
        autocompletion=job_names,
    ),
]


@app.command()
@takes_option_groups
def watch(
    job: JobOrNewest = None, *, endpoint_options: EndpointOptions, as_json: AsJson = False
) -> None:
    """Show a job until it ends. Ctrl-C ends only this command; the job goes on."""
    with exit_codes(as_json):
        endpoint = need_endpoint(endpoint_options)
        with endpoint.client() as client, make_display(as_json) as display:
            status = choose_job(client, job, unfinished_first=True)
            if job is None and status.state in FINAL_STATES:
                display.note(
                    f"no job runs or waits: this is the last one, {status.name} ({status.job_id})"
                )
            try:
                follow_job(client, status.job_id, display)
            except KeyboardInterrupt:
                display.note(
                    f"the job goes on: `collapipe jobs cancel {status.job_id}` would end it"
                )
                raise
        if display.view.state != "succeeded":
            raise typer.Exit(FAILED)


@app.command()
@takes_option_groups
def rollback(
    job: JobArgument,
    num_rounds: Annotated[
        int,
        typer.Argument(
            metavar="ROUND",
            min=0,
            help="Number of committed rounds to go back to. 0 is the initial model.",
        ),
    ],
    yes: Yes = False,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Go back to an earlier commit of a job that is over. The later ones are deleted.

    The last `training.keep_commits` commits and the restore point are kept. `collapipe train JOB.toml --resume` goes on from
    there. At the restore point it repeats the later rounds with the same result. Elsewhere the optimizer states begin anew.
    """
    with exit_codes(as_json):
        with client_for_past_jobs(endpoint_options, models=True) as client:
            found = client.find_job(job)
            if not yes and num_rounds < found.num_rounds_committed:
                typer.confirm(
                    f"Go back from {found.num_rounds_committed} to {num_rounds} committed rounds of {printable(found.job_id)}, and delete "
                    "what was trained since?",
                    abort=True,
                    err=True,
                )
            answer = client.rollback(found.job_id, num_rounds)
        status = answer.job
        if as_json:
            print_json(
                {
                    "job_id": status.job_id,
                    "num_rounds_committed": status.num_rounds_committed,
                    "keeps_optimizer_states": not answer.begins_anew,
                }
            )
        else:
            states = "begin anew" if answer.begins_anew else "are kept"
            say(
                f"job {status.name} ({status.job_id}) is back at {status.num_rounds_committed} committed rounds; its "
                f"optimizer states {states}. Its `collapipe train` command with --resume goes on from there"
            )


@app.command()
@takes_option_groups
def export(
    job: JobArgument,
    directory: Annotated[Path, typer.Argument(help="Folder for the files.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="With LoRA: the whole model instead of the adapter.")
    ] = False,
    overwrite: Overwrite = False,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Fetch the model of a job's last commit, in the files that `save_pretrained` writes."""
    with exit_codes(as_json), termination_as_interrupt():
        _check_empty(directory, overwrite)
        with client_for_past_jobs(endpoint_options, models=True) as client:
            files = client.export(job, directory, merged=merged)
        if as_json:
            print_json({"directory": str(directory), "files": [path.name for path in files]})
        else:
            say(f"{len(files)} files in {directory}")


def _check_empty(directory: Path, overwrite: bool) -> None:
    """Refuses a folder whose files a model would replace or join; raises `InvalidInputError`."""
    if directory.is_file():
        raise InvalidInputError(f"{directory} is a file: give a folder")
    if not overwrite and _is_taken(directory):
        raise InvalidInputError(
            f"{directory} is not empty: give another folder, or --overwrite to replace the model in it"
        )


def _check_writable(directory: Path) -> None:
    """Refuses a folder that could not be made after hours of training; raises `InvalidInputError`."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        reason = "is no folder" if not nearest.is_dir() else "cannot be written"
        raise InvalidInputError(
            f"the model cannot be put into {directory}, because {nearest} {reason}: give another folder with --output DIR"
        )


def _free_folder(name: str, job_id: str, overwrite: bool) -> Path:
    """Returns the default folder of a model: that of the job's name, or the first free one of its id with a number."""
    if overwrite:
        return _MODELS / name
    numbered = (f"{job_id}-{number}" for number in itertools.count(2))
    return next(
        _MODELS / each
        for each in itertools.chain((name, job_id), numbered)
        if not _is_taken(_MODELS / each)
    )


def _is_taken(path: Path) -> bool:
    """Returns whether there is a file, or a folder that is not empty or cannot be read."""
    try:
        return path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError:
        return True


def _load(
    job_file: Path | None, preset: str | None, settings: list[str], endpoint: Endpoint | None
) -> tuple[JobConfig, list[Finding]]:
    """Loads a job. Checks its data and its pretrained model, if the services run on this machine.

    Returns:
        The job, and what a person should know about the data.
    """
    is_local = endpoint is None or endpoint.testbed is not None
    devices = endpoint.devices() if endpoint is not None and preset is not None else {}
    job = read_job(job_file, preset, settings, is_local=is_local, devices=devices)
    check_has_data(job)
    if not is_local:
        return job, []
    check_family(job)
    job = with_local_paths(job)
    # A client without services on its machine need not have the packages that read data.
    from collapipe.data.cluster_rows import check_data

    findings = shortened(check_data(job))
    if job.model.pretrained is not None:
        pretrained_directory(job.model.pretrained)
    return job, findings


@contextmanager
def _testbed_for(
    job: JobConfig,
    endpoint: Endpoint | None,
    options: LocalTestbedOptions,
    workspace: Path,
    display: Display,
    findings: Sequence[Finding],
) -> Iterator[tuple[CollaPipeClient, LocalTestbed | None]]:
    """Opens a client of the scheduler that was found, or of a testbed that is started for the job. Shows findings before."""
    for finding in findings:
        display.note(str(finding), is_warning=finding.is_warning)
    if endpoint is not None:
        if endpoint.testbed is not None and not endpoint.testbed.detached:
            raise InvalidInputError(
                f"another command trains in {workspace}, and ends its testbed afterwards: follow it with `collapipe watch`, wait "
                "for it, or give this command a --workspace DIR of its own. Jobs queue on a testbed of `collapipe up`"
            )
        _check_is_up(job, endpoint, options)
        if endpoint.testbed is not None and (link := Workspace(workspace).page_link()):
            display.note(page_line(link))
        with endpoint.client() as client:
            yield client, None
        return
    clusters, emulation = _new_testbed(job, options)
    counts = [len(cluster) for cluster in clusters]
    display.note(
        f"starting a testbed in {workspace}: scheduler, edge server, and {_say_counts(counts)}"
    )
    with (
        LocalTestbed(
            clusters,
            workspace,
            emulation=emulation,
            supervised=True,
            progress=display.note,
            serving=display.serving,
        ) as testbed,
        testbed.client() as client,
    ):
        display.note(page_line(testbed.workspace.page_link()))
        if crowded := say_shared_cores(len(testbed.processes)):
            display.note(crowded)
        yield client, testbed


def _new_testbed(
    job: JobConfig, options: LocalTestbedOptions
) -> tuple[list[list[Device]], Emulation | None]:
    """Returns the devices of the testbed that is started for a job, and what they emulate."""
    counts = options.read_counts(1 + max(job.host_clusters))
    counts = counts or _wanted_devices(job, DEFAULT_DEVICES)
    _check_fits(job, counts)
    return options.read_clusters(counts), options.read_emulation(counts)


def _check_is_up(job: JobConfig, endpoint: Endpoint, options: LocalTestbedOptions) -> None:
    """Refuses options of a testbed that is up already, and a job that needs more than it has."""
    if options != LocalTestbedOptions():
        raise InvalidInputError(
            "--devices, --device-memory, --device-speed, --emulate and --emulation describe a testbed that "
            f"`train` starts, but this job uses the scheduler at {endpoint.address}: leave them out, or run "
            "`collapipe down` first"
        )
    if endpoint.testbed is not None:
        _check_fits(job, [len(cluster) for cluster in endpoint.testbed.shape])


def _site(
    job: JobConfig, endpoint: Endpoint | None, options: LocalTestbedOptions, workspace: Path
) -> Site:
    """Returns where a job would run. Refuses one that would wait for hosts."""
    if endpoint is None:
        return site_here(job, *_new_testbed(job, options), workspace, is_up=False)
    _check_is_up(job, endpoint, options)
    if endpoint.testbed is not None:
        clusters = [[Device(*device) for device in cluster] for cluster in endpoint.testbed.shape]
        _check_alive(job, endpoint.testbed)
        file = Workspace(workspace).emulation_file
        emulation = Emulation.read(file) if file.exists() else None
        return site_here(job, clusters, emulation, workspace, is_up=True)
    memory = endpoint.device_memory()
    needed = dict(zip(job.host_clusters, map(job.num_devices, range(job.clusters)), strict=True))
    short = {i: n or 1 for i, n in needed.items() if len(memory.get(i, ())) < (n or 1)}
    for index, count in short.items():
        raise InvalidInputError(
            f"the job {job.name!r} needs {count} device{'s' * (count != 1)} in cluster {index}, but only {len(memory.get(index, ()))} registered there: start "
            "more, or change `clusters`, `use_clusters` and `devices_per_cluster` of the job with --set"
        )
    return site_elsewhere(job, memory)


def _check_alive(job: JobConfig, testbed: WorkspaceRecord) -> None:
    """Refuses a job that would wait for processes of the testbed that have ended."""
    ended = [process.name for process in testbed.processes if not process.alive]
    for index, cluster in enumerate(job.host_clusters):
        dead = [name for name in ended if name.startswith(f"device-{cluster}-")]
        spare = len(testbed.shape[cluster]) - (job.num_devices(index) or 1)
        lacking = dead if len(dead) > spare else []
        if lacking := lacking + [n for n in ended if n in (f"control-unit-{cluster}", EDGE_SERVER)]:
            raise InvalidInputError(
                f"the job would wait for {', '.join(lacking)}, because what runs there has ended: `collapipe up` starts it again"
            )


def _check_fits(job: JobConfig, counts: list[int]) -> None:
    """Refuses a job that would wait for hosts that the testbed does not have."""
    needed = _wanted_devices(job, 1)
    fits = len(needed) <= len(counts) and all(n <= c for n, c in zip(needed, counts, strict=False))
    if not fits:
        raise InvalidInputError(
            f"the job {job.name!r} needs {_say_counts(needed)}, but the testbed has {_say_counts(counts)}: change "
            "`clusters`, `use_clusters` and `devices_per_cluster` of the job with --set, or give the testbed other --devices (if "
            "it is running: `collapipe down`, then `collapipe up --clusters N --devices K,K`)"
        )


def _wanted_devices(job: JobConfig, default: int) -> list[int]:
    """Returns the devices that a testbed needs in each cluster, up to the last one that the job uses."""
    counts = [1] * (1 + max(job.host_clusters))
    for index, host_cluster in enumerate(job.host_clusters):
        counts[host_cluster] = job.num_devices(index) or default
    return counts


def _say_counts(counts: list[int]) -> str:
    devices = f"device{'s' * (counts != [1])}"
    return f"{len(counts)} cluster{'s' * (len(counts) != 1)} of {', '.join(map(str, counts))} {devices}"


def _next_command(view: JobView, options: EndpointOptions) -> str:
    """Returns the command that continues a job, or starts it again, behind the one that restarts processes which have ended."""
    arguments = sys.argv[1:]
    if view.num_rounds_committed and "--resume" not in arguments:
        arguments = [*arguments, "--resume"]
    train = shlex.join(["collapipe", *arguments])
    record = running_testbed(options.workspace) if options.scheduler is None else None
    if record is None or not record.detached or len(record.alive) == len(record.processes):
        return train
    folder = [] if options.workspace == DEFAULT_ROOT else ["--workspace", str(options.workspace)]
    return f"{shlex.join(['collapipe', 'up', *folder])}\n  {train}"


def _say_trained(
    job: JobConfig, view: JobView, directory: Path, files: list[Path], as_json: bool
) -> None:
    evaluation = view.evaluation
    if as_json:
        measured = to_document(evaluation) if evaluation else {}
        print_json(
            {
                "event": "exported",
                "directory": str(directory),
                "files": [path.name for path in files],
                "metric": None,
                "value": None,
                "other_metrics": {},
                **measured,
            }
        )
        return
    say(f"final: {say_evaluation(evaluation) if evaluation else 'the metric was not measured'}")
    if evaluation:
        say("\n".join(definition_lines(evaluation)))
    is_adapter = any(path.name == "adapter_config.json" for path in files)
    say(f"the {'LoRA adapter' if is_adapter else 'model'} is in {directory}; use it like this:")
    code = how_to_load(
        job.task.kind, directory, is_adapter=is_adapter, base_dtype=job.model.base_dtype
    )
    say("\n".join(f"    {line}" for line in code.splitlines()))


for command in (
    predict,
    evaluate,
    testbed_commands.up,
    testbed_commands.down,
    testbed_commands.status,
    testbed_commands.logs,
    doctor,
    join,
    renew,
    simulate,
    fit,
    targets,
    trace,
):
    app.command()(command)
