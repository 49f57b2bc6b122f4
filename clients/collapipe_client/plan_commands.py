"""The `collapipe plan` commands: which host ran what in a round, and why the scheduler decided so."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from collapipe.codec_numbers import CODEC_NAMES
from collapipe.errors import NotFoundError
from collapipe.v1.plan_pb2 import LinkPlan, Plan
from collapipe.v1.scheduler_pb2 import JobStatus
from collapipe.v1.tensor_pb2 import CODEC_FP32
from collapipe_client.cli_options import AsJson, takes_option_groups
from collapipe_client.client import CollaPipeClient
from collapipe_client.completion import job_names
from collapipe_client.endpoint import EndpointOptions, client_for_past_jobs
from collapipe_client.message_json import to_document
from collapipe_client.reporting import (
    FAILED,
    exit_codes,
    print_json,
    say,
    termination_as_interrupt,
)
from collapipe_client.view_state import stage_views

plan_app = typer.Typer(no_args_is_help=True, help="Show, explain and replay the plans of a job.")

RoundNumber = Annotated[
    int | None,
    typer.Argument(metavar="[ROUND]", min=1, help="From 1. Default: the last committed round."),
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
    """Show which host ran which units in a round, and what each link was allowed to use."""
    with _chosen_round(job, round_number, endpoint_options, as_json) as (client, job_id, number):
        plans = client.plans(job_id, number - 1)
        if as_json:
            print_json({"round": number, "plans": [to_document(plan) for plan in plans]})
            return
        say(f"job {job_id}, round {number}")
        _say_plans(plans)


@plan_app.command("explain")
@takes_option_groups
def explain(
    round_number: RoundNumber = None,
    job: JobOption = None,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Explain a decision: the bottleneck, the limits that were reached, and what would help most."""
    with _chosen_round(job, round_number, endpoint_options, as_json) as (client, job_id, number):
        answer = client.explain(job_id, number - 1)
        lines = answer.explanation.splitlines()
        if as_json:
            decision = json.loads(answer.decision_json, parse_constant=_null)
            print_json({"round": number, "explanation": lines, "decision": decision})
            return
        say(f"job {job_id}, round {number}")
        for line in lines:
            say(f"  {line}")


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
        client_for_past_jobs(options, as_json) as client,
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


def choose_job(client: CollaPipeClient, job: str | None) -> JobStatus:
    """Returns a job, by default the newest one; raises `NotFoundError` if there is none."""
    if job is not None:
        return client.find_job(job)
    jobs = client.jobs()
    if not jobs:
        raise NotFoundError("there is no job yet: train one with `collapipe train`")
    return jobs[-1]


def _null(constant: str) -> None:
    """Replaces Infinity and NaN by null: neither is valid JSON, so other readers refuse them."""


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
            limits = _link_limits(plan.links[position]) if position < len(plan.links) else []
            if limits:
                say(f"    link to the next: {', '.join(limits)}")


def _link_limits(link: LinkPlan) -> list[str]:
    limits = []
    if link.rate_limit_bps:
        limits.append(f"{link.rate_limit_bps / 1e6:.3g} Mbit/s")
    if link.bandwidth_hz:
        limits.append(f"{link.bandwidth_hz / 1e6:.3g} MHz")
    if link.transmit_power_watts:
        limits.append(f"{link.transmit_power_watts:.3g} W forward")
    if link.return_transmit_power_watts:
        limits.append(f"{link.return_transmit_power_watts:.3g} W back")
    if link.codec != CODEC_FP32 and link.codec in CODEC_NAMES:
        limits.append(CODEC_NAMES[link.codec])
    return limits
