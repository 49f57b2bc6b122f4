"""The command `collapipe jobs report`, which writes what is recorded of a job to one HTML file."""

import importlib.util
import shlex
from pathlib import Path
from typing import Annotated

import typer

from collapipe.errors import InvalidInputError
from collapipe_client.cli_options import AsJson, takes_option_groups
from collapipe_client.endpoint import EndpointOptions, client_for_past_jobs
from collapipe_client.jobs_commands import JobArgument
from collapipe_client.reporting import (
    complain,
    exit_codes,
    print_json,
    say,
    termination_as_interrupt,
)


@takes_option_groups
def report(
    job: JobArgument,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Default: ./collapipe-JOB-report.html."),
    ] = None,
    *,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a FILE that was given and exists.")
    ] = False,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Write what is recorded of a job to one HTML file: curves, rounds, plans, costs, events and settings.

    The job may run or have ended. The file needs no other file and no network.
    """
    # No other command needs these.
    from collapipe_client.job_report import JobRecords, write_job_report

    with exit_codes(as_json), termination_as_interrupt():
        if file is not None and file.exists() and not overwrite:
            raise InvalidInputError(
                f"{file} exists: give another file, or --overwrite to replace it"
            )
        with client_for_past_jobs(endpoint_options) as client:
            first, *rounds = client.records(client.find_job(job).job_id)
        records = JobRecords(first, rounds)
        plots = []
        if importlib.util.find_spec("matplotlib") is None:
            complain(
                "no plots, because matplotlib is not installed here: pip install -e '.[simulation]' in the folder of the repository"
            )
        else:
            from collapipe_client.job_plots import draw_plots

            plots = draw_plots(records)
        path = file or Path(f"collapipe-{first['id']}-report.html")
        command = shlex.join(["collapipe", "jobs", "report", first["id"]])
        write_job_report(path, records, plots, command)
        if as_json:
            print_json({"file": str(path), "job": first, "rounds": rounds})
        else:
            say(f"the report of job {first['id']} is in {path}: open it in a browser")
