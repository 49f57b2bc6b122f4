"""`collapipe jobs`: lists, cancels and deletes jobs."""

import time
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from collapipe.v1.scheduler_pb2 import JobState, JobStatus
from collapipe_client.cli_options import AsJson, takes_option_groups
from collapipe_client.client import CollaPipeClient
from collapipe_client.endpoint import EndpointOptions, client_for_past_jobs, need_endpoint
from collapipe_client.message_json import enum_word, to_document
from collapipe_client.quantities import say_age
from collapipe_client.reporting import (
    exit_codes,
    plain_table,
    print_json,
    say,
    termination_as_interrupt,
)

jobs_app = typer.Typer(no_args_is_help=True, help="List, cancel and delete jobs.")

JobArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB...", help="Id of a job, or its name for the newest job of that name."
    ),
]


@jobs_app.command("list")
@takes_option_groups
def list_jobs(endpoint_options: EndpointOptions, as_json: AsJson = False) -> None:
    """List the jobs, oldest first. Their age counts from when they were submitted. The edge server's disk holds their models."""
    with (
        exit_codes(as_json),
        termination_as_interrupt(),
        client_for_past_jobs(endpoint_options, as_json) as client,
    ):
        jobs = client.jobs()
        if as_json:
            print_json({"jobs": [to_document(job) for job in jobs]})
        else:
            Console().print(job_table(jobs))


@jobs_app.command("cancel")
@takes_option_groups
def cancel(jobs: JobArguments, endpoint_options: EndpointOptions, as_json: AsJson = False) -> None:
    """Stop jobs. The last commit of each is kept."""
    with exit_codes(as_json), need_endpoint(endpoint_options).client() as client:
        for status in _find_jobs(client, jobs):
            client.cancel(status.job_id)
            if as_json:
                print_json({"job_id": status.job_id, "cancelled": True})
            else:
                say(
                    f"job {status.name} ({status.job_id}) will stop; its {status.num_rounds_committed} "
                    "committed rounds are kept"
                )


@jobs_app.command("delete")
@takes_option_groups
def delete(
    jobs: JobArguments,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Delete jobs that have ended, with their models, on all hosts. A host that is away does so when it is back."""
    with (
        exit_codes(as_json),
        termination_as_interrupt(),
        client_for_past_jobs(endpoint_options, as_json) as client,
    ):
        found = _find_jobs(client, jobs)
        if not yes:
            names = ", ".join(status.job_id for status in found)
            typer.confirm(f"Delete {names} with all models?", abort=True, err=True)
        for status in found:
            client.delete(status.job_id)
            if as_json:
                print_json({"job_id": status.job_id, "deleted": True})
            else:
                say(f"job {status.job_id} is deleted")


def job_table(jobs: Iterable[JobStatus]) -> Table:
    """Returns a table with a line for each job."""
    table = plain_table("job", "name", "state", "rounds", "age", "disk", "message")
    for job in jobs:
        state = enum_word(JobState.Name(job.state), "JobState")
        rounds = f"{job.num_rounds_committed}/{job.num_rounds}"
        age = ""
        if job.HasField("submitted_at"):
            age = say_age(time.time() - job.submitted_at.ToMilliseconds() / 1000)
        disk = f"{job.stored_bytes / 1e6:,.1f} MB" if job.stored_bytes else ""
        table.add_row(job.job_id, job.name, state, rounds, age, disk, job.message)
    return table


def _find_jobs(client: CollaPipeClient, jobs: Iterable[str]) -> list[JobStatus]:
    """Returns each job once. Raises `NotFoundError` before anything is done to the others."""
    return list({found.job_id: found for found in map(client.find_job, jobs)}.values())
