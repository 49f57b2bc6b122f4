"""The `collapipe plan` commands: which host ran what in a round, and why the scheduler decided so."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from collapipe.errors import NotFoundError
from collapipe.printable import indented
from collapipe.v1.plan_pb2 import Plan
from collapipe.v1.scheduler_pb2 import JOB_STATE_UNREADABLE, JobStatus
from collapipe_client.cli_options import AsJson, takes_option_groups
from collapipe_client.client import FINAL_STATES, CollaPipeClient
from collapipe_client.completion import job_names
from collapipe_client.endpoint import EndpointOptions, client_for_past_jobs
from collapipe_client.message_json import to_document
from collapipe_client.plan_tables import ClusterTable, RoundRecord, link_limits, read_decision
from collapipe_client.reporting import (
    FAILED,
    exit_codes,
    plain_table,
    print_json,
    print_table,
    say,
    termination_as_interrupt,
)
from collapipe_client.view_state import stage_views

plan_app = typer.Typer(no_args_is_help=True, help="Show, explain and replay the plans of a job.")

_BEFORE_UNIT = r"(?<=\d) (?=(?:m?s|MB|[GMk]?bit/s|MHz)\b)"


def _read_round(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise typer.BadParameter(
            f"{text!r} is not the number of a round: give one from 1, and name a job with --job"
        )
    return int(text)


RoundNumber = Annotated[
    int | None,
    typer.Argument(
        metavar="[ROUND]", parser=_read_round, help="From 1. Default: the last committed round."
    ),
]
JobOption = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="JOB",
        help="Id or name. Default: the newest job.",
        autocompletion=job_names,
    ),
]


@plan_app.command("show")
@takes_option_groups
def show(
    round_number: RoundNumber = None,
    job: JobOption = None,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Show who ran what in a round, with its memory and seconds, the links, and which devices were idle, and why."""
    with _chosen_round(job, round_number, endpoint_options, as_json) as (client, job_id, number):
        plans = client.plans(job_id, number - 1)
        record = RoundRecord.of(client.explain(job_id, number - 1))
        tables = [record.cluster(plan) for plan in plans]
        if as_json:
            document = {"round": number, "plans": [to_document(plan) for plan in plans]}
            print_json({**document, "clusters": [asdict(table) for table in tables]})
            return
        say(_wrapped(f"job {job_id}, round {number}: {record.seconds()}"))
        for plan, table in zip(plans, tables, strict=True):
            _say_table(plan, table)


@plan_app.command("explain")
@takes_option_groups
def explain(
    round_number: RoundNumber = None,
    job: JobOption = None,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Explain a round: its seconds as a sum, predicted and measured, why its plan is so, and what would help."""
    with _chosen_round(job, round_number, endpoint_options, as_json) as (client, job_id, number):
        answer = client.explain(job_id, number - 1)
        lines = answer.explanation.splitlines()
        if as_json:
            decision = read_decision(answer)
            print_json({"round": number, "explanation": lines, "decision": decision})
            return
        say(f"job {job_id}, round {number}")
        for line in lines:
            say(_wrapped(line))


@plan_app.command("replay")
@takes_option_groups
def replay(
    round_number: RoundNumber = None,
    job: JobOption = None,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Decide a round again from the telemetry that was recorded with it; fail if the plan differs."""
    with _chosen_round(job, round_number, endpoint_options, as_json) as (client, job_id, number):
        answer = client.replay(job_id, number - 1)
        recorded = [plan.plan_id for plan in answer.recorded]
        replayed = [plan.plan_id for plan in answer.replayed]
        same = recorded == replayed
        if as_json:
            print_json({"round": number, "recorded": recorded, "replayed": replayed, "same": same})
        elif same:
            say(f"job {job_id}, round {number}: the same plan again ({', '.join(recorded)})")
        else:
            say(f"job {job_id}, round {number}: the plans differ; recorded was")
            _say_plans(answer.recorded)
            say("and now the scheduler decides")
            _say_plans(answer.replayed)
        if not same:
            raise typer.Exit(FAILED)


@contextmanager
def _chosen_round(
    job: str | None, round_number: int | None, options: EndpointOptions, as_json: bool
) -> Iterator[tuple[CollaPipeClient, str, int]]:
    """Opens a client, and yields it with the id of the chosen job and the number of the round."""
    with (
        exit_codes(as_json),
        termination_as_interrupt(),
        client_for_past_jobs(options) as client,
    ):
        yield client, *choose_round(client, job, round_number)


def choose_round(
    client: CollaPipeClient, job: str | None, round_number: int | None
) -> tuple[str, int]:
    """Returns the id of a job and the number of a round: by default the newest job and its last round.

    Raises:
        NotFoundError: There is no such job.
    """
    status = choose_job(client, job)
    return status.job_id, round_number or max(1, status.num_rounds_committed)


def choose_job(
    client: CollaPipeClient, job: str | None, *, unfinished_first: bool = False
) -> JobStatus:
    """Returns a job, by default the newest one; raises `NotFoundError` if there is none.

    Args:
        unfinished_first: The default is the newest job that has not ended, if there is one.
    """
    if job is not None:
        return client.find_job(job)
    jobs = [each for each in client.jobs() if each.state != JOB_STATE_UNREADABLE]
    if not jobs:
        raise NotFoundError("there is no job yet: train one with `collapipe train`")
    unfinished = [each for each in jobs if each.state not in FINAL_STATES]
    return ((unfinished_first and unfinished) or jobs)[-1]


def _wrapped(line: str) -> str:
    """Wraps a statement in a terminal, under its indentation. Other readers get it as one line."""
    console = Console()
    if not console.is_terminal:
        return indented(line)
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    wrapped = textwrap.fill(
        re.sub(_BEFORE_UNIT, "\xa0", line),  # A number stays with its unit.
        console.width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped.replace("\xa0", " ")


def _say_table(plan: Plan, cluster: ClusterTable) -> None:
    batches = f"{plan.num_micro_batches} micro-batch{'es' * (plan.num_micro_batches != 1)}"
    say(f"cluster {plan.cluster_index}: plan {plan.plan_id}, {batches} in a step")
    table = plain_table("host", "units", "window", "memory, MB", "step, predicted", "measured")
    for row in cluster.stages:
        needs = "-" if row.needs_bytes is None else f"{row.needs_bytes / 1e6:.0f}"
        limit = "no limit" if row.allowed_bytes is None else f"of {row.allowed_bytes / 1e6:.0f}"
        table.add_row(
            row.host_id,
            row.units + ", recomputes" * row.recomputes,
            str(row.window),
            f"{needs}, {limit}" if row.allowed_bytes is None else f"{needs} {limit}",
            _in_seconds(row.predicted_seconds),
            _in_seconds(row.measured_seconds),
        )
    print_table(table)
    for link in cluster.links:
        say(_wrapped(f"  link {link.words}"))
    for host_id, reason in cluster.idle.items():
        say(_wrapped(f"  idle {host_id}: {reason}"))


def _in_seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _say_plans(plans: Iterable[Plan]) -> None:
    for plan in plans:
        say(
            f"cluster {plan.cluster_index}: plan {plan.plan_id}, {plan.num_micro_batches} micro-batches"
        )
        views = stage_views(plan.stages)
        for position, (stage, view) in enumerate(zip(plan.stages, views, strict=True)):
            recomputes = ", recomputes" if stage.recompute else ""
            say(
                f"  {view.host_id:20} {view.units:20} in-flight window {stage.in_flight}{recomputes}"
            )
            limits = link_limits(plan.links[position]) if position < len(plan.links) else []
            if limits:
                say(f"    link to the next: {', '.join(limits)}")
