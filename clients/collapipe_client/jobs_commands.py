"""`collapipe jobs`: lists, compares, cancels and deletes jobs."""

import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.table import Table

from collapipe.errors import InvalidInputError
from collapipe.printable import indented, printable
from collapipe.v1.scheduler_pb2 import (
    JobState,
    JobStatus,
)
from collapipe_client.cli_options import AsJson, Yes, takes_option_groups
from collapipe_client.client import FINAL_STATES, CollaPipeClient
from collapipe_client.completion import job_names
from collapipe_client.endpoint import EndpointOptions, client_for_past_jobs, need_endpoint
from collapipe_client.jobs_comparison import compare_jobs, say_comparison
from collapipe_client.message_json import enum_word, to_document
from collapipe_client.quantities import say_age
from collapipe_client.reporting import (
    exit_codes,
    plain_table,
    print_json,
    print_table,
    say,
    termination_as_interrupt,
)
from collapipe_client.trouble import say_moment, say_trouble
from collapipe_client.view_state import (
    definition_lines,
    say_evaluation,
    say_one_answer,
    say_privacy_loss,
)

jobs_app = typer.Typer(no_args_is_help=True, help="List, show, compare, cancel and delete jobs.")

JobArgument = Annotated[
    str,
    typer.Argument(
        help="Id of the job, or its name for the newest job of that name.",
        autocompletion=job_names,
    ),
]
JobArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB...",
        help="Id of a job, or its name for the newest job of that name.",
        autocompletion=job_names,
    ),
]


_MESSAGE_CHARACTERS = 80


@contextmanager
def _past_jobs(
    options: EndpointOptions, as_json: bool, *, models: bool = False
) -> Iterator[CollaPipeClient]:
    """Opens a client of the jobs so far, and turns errors into exit codes. See `client_for_past_jobs`."""
    with (
        exit_codes(as_json),
        termination_as_interrupt(),
        client_for_past_jobs(options, models=models) as client,
    ):
        yield client


@jobs_app.command("list")
@takes_option_groups
def list_jobs(endpoint_options: EndpointOptions, as_json: AsJson = False) -> None:
    """List the jobs, oldest first. Their age counts from when they were submitted. The edge server's disk holds their models.

    By default, a scheduler keeps the last 100 jobs that have ended. Its options --keep-jobs, --keep-jobs-gb and --keep-jobs-days change that.
    """
    with _past_jobs(endpoint_options, as_json) as client:
        jobs = client.jobs()
        if as_json:
            print_json({"jobs": [to_document(job) for job in jobs]})
            return
        print_table(job_table(jobs))
        total = sum(job.stored_bytes for job in jobs)
        if total:
            say(
                f"{total / 1e6:,.1f} MB on the edge server in all; `collapipe jobs prune --keep 5` keeps the last 5 that have ended"
            )


@jobs_app.command("show")
@takes_option_groups
def show(job: JobArgument, endpoint_options: EndpointOptions, as_json: AsJson = False) -> None:
    """Show what is known of a job: its state, its last evaluation, its disk and its owner."""
    with _past_jobs(endpoint_options, as_json) as client:
        status = client.find_job(job)
        if as_json:
            print_json(to_document(status))
            return
        now = time.time()
        say(f"job {status.job_id} ({status.name})")
        lines = {
            "state": f"{enum_word(JobState.Name(status.state), 'JobState')}: {status.message}".rstrip(
                ": "
            ),
            "rounds": f"{status.num_rounds_committed} of {status.num_rounds} are committed",
            "evaluation": say_evaluation(status.evaluation)
            if status.HasField("evaluation")
            else "",
            "warning": say_one_answer(status.evaluation),
            "submitted": say_moment(status.submitted_at, now)
            if status.HasField("submitted_at")
            else "",
            "ended": say_moment(status.ended_at, now) if status.HasField("ended_at") else "",
            "disk": f"{status.stored_bytes / 1e6:,.1f} MB on the edge server"
            if status.stored_bytes
            else "",
            "owner": status.owner,
            "trouble": say_trouble(status.trouble, now, status.message),
            "privacy": say_privacy_loss(status.privacy_loss)
            if status.HasField("privacy_loss")
            else "",
        }
        for name, text in lines.items():
            if text:
                say(f"  {name}: {indented(text)}")
            if name == "evaluation":
                for line in definition_lines(status.evaluation):
                    say(f"  {indented(line)}")


@jobs_app.command("dump")
@takes_option_groups
def dump(job: JobArgument, endpoint_options: EndpointOptions, as_json: AsJson = False) -> None:
    """Print all that is stored of a job, as one JSON object: progress, plans, decisions, results, events, and the last commit. Weights are left out."""
    with _past_jobs(endpoint_options, as_json) as client:
        print_json(client.stored(client.find_job(job).job_id))


@jobs_app.command("compare")
@takes_option_groups
def compare(jobs: JobArguments, endpoint_options: EndpointOptions, as_json: AsJson = False) -> None:
    """Compare jobs: settings that differ, times, bytes, and the loss and metric after equal rounds and equal time."""
    with _past_jobs(endpoint_options, as_json) as client:
        found = _find_jobs(client, jobs)
        if len(found) < 2:
            raise InvalidInputError(
                f"{len(found)} job is nothing to compare: name at least 2 jobs; `collapipe jobs list` lists them"
            )
        document = compare_jobs(client.records(status.job_id) for status in found)
        if as_json:
            print_json(document)
        else:
            say_comparison(document)


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
    yes: Yes = False,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Delete jobs that have ended, with their models, on all hosts. A host that is away does so when it is back."""
    with _past_jobs(endpoint_options, as_json, models=True) as client:
        _delete(client, _find_jobs(client, jobs), yes=yes, as_json=as_json)


@jobs_app.command("prune")
@takes_option_groups
def prune(
    keep: Annotated[
        int, typer.Option(min=0, help="How many of the jobs that have ended stay, the newest ones.")
    ],
    yes: Yes = False,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Delete the oldest of your jobs that have ended, with their models, on all hosts.

    Without this command, a scheduler keeps the last 100 of all jobs that have ended, of any size.
    """
    with _past_jobs(endpoint_options, as_json, models=True) as client:
        owners = ("", client.owner)
        ended = [job for job in client.jobs() if job.state in FINAL_STATES and job.owner in owners]
        _delete(client, ended[: max(0, len(ended) - keep)], yes=yes, as_json=as_json)


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
        # `collapipe jobs show` has the whole message.
        message = textwrap.shorten(job.message, _MESSAGE_CHARACTERS, placeholder=" ...")
        table.add_row(job.job_id, job.name, state, rounds, age, disk, message)
    return table


def _delete(
    client: CollaPipeClient, jobs: Sequence[JobStatus], *, yes: bool, as_json: bool
) -> None:
    """Deletes jobs after a confirmation. Raises `typer.Abort` without one."""
    if not jobs and not as_json:
        say("there is nothing to delete")
    if jobs and not yes:
        names = ", ".join(status.job_id for status in jobs)
        typer.confirm(f"Delete {printable(names)} with all models?", abort=True, err=True)
    for status in jobs:
        client.delete(status.job_id)
        if as_json:
            print_json({"job_id": status.job_id, "deleted": True})
        else:
            say(f"job {status.job_id} is deleted")


def _find_jobs(client: CollaPipeClient, jobs: Iterable[str]) -> list[JobStatus]:
    """Returns each job once. Raises `NotFoundError` before anything is done to the others."""
    return list({found.job_id: found for found in map(client.find_job, jobs)}.values())
