"""What one can ask about plans: who ran what, why, and whether the scheduler would decide the same again."""

import json
from typing import Annotated

import typer

from collapipe.codec_names import CODEC_NAMES
from collapipe.errors import NotFoundError
from collapipe.v1.plan_pb2 import Plan
from collapipe.v1.tensor_pb2 import CODEC_FP32
from collapipe_client.cli_options import (
    AsJson,
    Insecure,
    SchedulerOption,
    TlsCa,
    TlsCert,
    TlsKey,
    WorkspaceOption,
    client_for_records,
    find_endpoint,
)
from collapipe_client.client import CollaPipeClient
from collapipe_client.documents import to_document
from collapipe_client.reporting import (
    FAILED,
    exit_codes,
    print_json,
    say,
    termination_as_interrupt,
)
from collapipe_client.view_state import plan_stages
from collapipe_client.workspace import DEFAULT_ROOT

plan_app = typer.Typer(no_args_is_help=True, help="Plans: who ran what, and why.")

RoundNumber = Annotated[
    int | None,
    typer.Argument(metavar="[ROUND]", min=1, help="From 1. Default: the last one committed."),
]
JobOption = Annotated[
    str | None, typer.Option("--job", metavar="JOB", help="Id or name. Default: the newest job.")
]


@plan_app.command("show")
def show(
    round_number: RoundNumber = None,
    job: JobOption = None,
    scheduler: SchedulerOption = None,
    insecure: Insecure = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show who ran what in a round, and what every link was given."""
    with exit_codes(as_json), termination_as_interrupt():
        endpoint = find_endpoint(scheduler, insecure, tls_ca, tls_cert, tls_key, workspace)
        with client_for_records(endpoint, workspace, as_json) as client:
            job_id, number = _which(client, job, round_number)
            plans = client.plans(job_id, number - 1)
        if as_json:
            print_json({"round": number, "plans": [to_document(plan) for plan in plans]})
            return
        say(f"job {job_id}, round {number}")
        for plan in plans:
            _say_plan(plan)


@plan_app.command("explain")
def explain(
    round_number: RoundNumber = None,
    job: JobOption = None,
    scheduler: SchedulerOption = None,
    insecure: Insecure = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Say why the scheduler chose what it chose: the bottleneck, the limits that bind, what would help most."""
    with exit_codes(as_json), termination_as_interrupt():
        endpoint = find_endpoint(scheduler, insecure, tls_ca, tls_cert, tls_key, workspace)
        with client_for_records(endpoint, workspace, as_json) as client:
            job_id, number = _which(client, job, round_number)
            answer = client.explain(job_id, number - 1)
        lines = answer.explanation.splitlines()
        if as_json:
            decision = json.loads(answer.decision_json, parse_constant=_no_number)
            print_json({"round": number, "explanation": lines, "decision": decision})
            return
        say(f"job {job_id}, round {number}")
        for line in lines:
            say(f"  {line}")


@plan_app.command("replay")
def replay(
    round_number: RoundNumber = None,
    job: JobOption = None,
    scheduler: SchedulerOption = None,
    insecure: Insecure = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Decide a round again from the telemetry that was recorded with it; fails when the plan is another."""
    with exit_codes(as_json), termination_as_interrupt():
        endpoint = find_endpoint(scheduler, insecure, tls_ca, tls_cert, tls_key, workspace)
        with client_for_records(endpoint, workspace, as_json) as client:
            job_id, number = _which(client, job, round_number)
            answer = client.replay(job_id, number - 1)
        recorded = [plan.plan_id for plan in answer.recorded]
        replayed = [plan.plan_id for plan in answer.replayed]
        same = recorded == replayed
        if as_json:
            print_json({"round": number, "recorded": recorded, "replayed": replayed, "same": same})
        elif same:
            say(f"job {job_id}, round {number}: the same plan again ({', '.join(recorded)})")
        else:
            say(f"job {job_id}, round {number}: another plan; recorded was")
            for plan in answer.recorded:
                _say_plan(plan)
            say("and now it would be")
            for plan in answer.replayed:
                _say_plan(plan)
        if not same:
            raise typer.Exit(FAILED)


def _which(client: CollaPipeClient, job: str | None, number: int | None) -> tuple[str, int]:
    """The job and the round that are meant; the newest job and its last committed round by default."""
    if job is not None:
        status = client.find_job(job)
    else:
        jobs = client.jobs()
        if not jobs:
            raise NotFoundError("there is no job yet: train one with `collapipe train`")
        status = jobs[-1]
    return status.job_id, number or max(1, status.num_rounds_committed)


def _no_number(constant: str) -> None:
    """Infinity and NaN as null: JSON has neither, and other programs than Python's refuse them."""


def _say_plan(plan: Plan) -> None:
    say(
        f"cluster {plan.cluster_index}: plan {plan.plan_id}, {plan.num_micro_batches} micro-batches"
    )
    for position, (stage, view) in enumerate(zip(plan.stages, plan_stages(plan), strict=True)):
        say(f"  {view.host_id:20} {view.units:20} in flight {stage.in_flight}")
        if position < len(plan.links):
            link = plan.links[position]
            given = [
                f"{link.rate_limit_bps / 1e6:.3g} Mbit/s" if link.rate_limit_bps else "",
                f"{link.bandwidth_hz / 1e6:.3g} MHz" if link.bandwidth_hz else "",
                f"{link.transmit_power_watts:.3g} W there" if link.transmit_power_watts else "",
                f"{link.return_transmit_power_watts:.3g} W back"
                if link.return_transmit_power_watts
                else "",
                CODEC_NAMES.get(link.codec, "") if link.codec != CODEC_FP32 else "",
            ]
            if any(given):
                say(f"    link to the next: {', '.join(word for word in given if word)}")
