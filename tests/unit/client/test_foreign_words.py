"""Words of other machines in a terminal and in lines: a terminal obeys nothing in them, and they begin no line of their own."""

import io
import json
import os
import sys
import tty
from dataclasses import replace
from typing import Any

import pytest
import typer
from rich.console import Console

from collapipe.errors import InvalidInputError
from collapipe.rpc import Security
from collapipe.v1.job_pb2 import Evaluation, RoundProgress
from collapipe.v1.model_use_pb2 import AnswerPiece
from collapipe.v1.plan_pb2 import Plan, Stage
from collapipe.v1.scheduler_pb2 import (
    INCIDENT_CODE_HOST_LOST,
    JOB_STATE_FAILED,
    JOB_STATE_PREPARING,
    DataNote,
    ExplainDecisionResponse,
    GetTraceResponse,
    Host,
    HostStatus,
    Incident,
    JobStatus,
    JobTrouble,
    JobWarning,
    MissingHost,
    RoundStarted,
    WatchJobResponse,
)
from collapipe.v1.trace_pb2 import Span
from collapipe_client import CollaPipeClient
from collapipe_client.live_picture import render
from collapipe_client.live_view import LiveDisplay, PlainDisplay
from collapipe_client.model_commands import _print_answers
from collapipe_client.reporting import exit_codes
from collapipe_client.view_state import JobView, apply_event

from .commands import run
from .fake_services import FakeServices

FORGED = "[    9.0 s] succeeded"
NAME = (
    "\x1b[2J\x1b]0;title\x07\x1b]8;;https://evil.example\x1b\\ \x9b2J \x00 \r\x0b"
    "\u202e\u2066 [red]b[/red] [link=https://evil.example]c[/link] :warning: \x7f"
)
"""Sequences that clear the screen, name the window and make links; an override of the direction; markup of rich."""
WORDS = f"{NAME}\n{FORGED}\u2028{FORGED}\n"
"""The same, with lines that look like those of a command."""


def check_harmless(printed: str) -> None:
    assert {c for c in printed if not c.isprintable()} <= {"\n"}
    assert not any(line.startswith(FORGED) for line in printed.splitlines())
    words = printed.replace("\n", " ")
    assert "evil.example" in words and "[red]b[/red]" in words and ":warning:" in words


@pytest.fixture
def hostile(fake: FakeServices) -> FakeServices:
    """A scheduler with a failed job, and a host, all of whose texts are hostile."""
    host = Host(host_id=NAME, address=NAME)
    fake.hosts.append(
        HostStatus(host=host, alive=True, suspicion=WORDS, unshaped=WORDS, twin_address=WORDS)
    )
    trouble = JobTrouble(missing=[MissingHost(host_id=NAME)], num_failures=1, failure="x\x1b")
    evaluation = Evaluation(metric=NAME, definitions={NAME: NAME})
    fake.jobs = [
        JobStatus(
            job_id="job-1",
            name=NAME,
            state=JOB_STATE_FAILED,
            message=WORDS,
            owner=NAME,
            trouble=trouble,
            evaluation=evaluation,
        ),
        JobStatus(job_id=f"job-3{NAME}", name="job-2", state=JOB_STATE_FAILED),
    ]
    fake.plans = [Plan(plan_id=NAME, stages=[Stage(host_id=NAME, stop_unit=3)])]
    fake.explanation = ExplainDecisionResponse(explanation=NAME)
    fake.trace = [
        GetTraceResponse(host_id="a", spans=[Span(track="t", name="n", ended_seconds=1.0)]),
        GetTraceResponse(host_id=NAME, missing=WORDS),
    ]
    fake.events = events()
    return fake


def events() -> list[WatchJobResponse]:
    incident = Incident(code=INCIDENT_CODE_HOST_LOST, message=WORDS)
    plan = Plan(stages=[Stage(host_id=NAME, stop_unit=3)])
    waits = RoundProgress(local_steps=4, waiting_for=WORDS)
    told: list[dict[str, Any]] = [
        {"status": JobStatus(name=NAME, state=JOB_STATE_PREPARING, message=WORDS)},
        {"incident": incident},
        {"warning": JobWarning(message=WORDS, advice=WORDS)},
        {"data_note": DataNote(message=WORDS, is_warning=True)},
        {"round_started": RoundStarted(plans=[plan], change=WORDS)},
        *({"progress": waits} for _ in range(4)),
        {"evaluation": Evaluation(metric=NAME)},
        {"status": JobStatus(name=NAME, state=JOB_STATE_FAILED, message=WORDS)},
    ]
    return [
        WatchJobResponse(number=n, elapsed_seconds=2.0, **each) for n, each in enumerate(told, 1)
    ]


@pytest.mark.parametrize(
    ("code", "command"),
    [
        (0, ["jobs", "list"]),
        (0, ["jobs", "show", "job-1"]),
        (0, ["status"]),
        (1, ["watch", "job-1"]),
        (0, ["plan", "show", "--job", "job-1"]),
        (0, ["plan", "explain", "--job", "job-1"]),
        (0, ["trace", "--job", "job-1"]),
        (1, ["jobs", "delete", "job-2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("in_empty_folder")
def test_commands_print_words_of_others_as_words(
    hostile: FakeServices, code: int, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # Tables cut words to the width of the terminal.
    check_harmless(run(*command, *hostile.options, code=code, typed="n\n").output)


@pytest.mark.usefixtures("in_empty_folder")
def test_json_has_words_of_others_unchanged_and_in_ascii(hostile: FakeServices) -> None:
    result = run("jobs", "show", "job-1", "--json", *hostile.options)
    assert result.stdout.isascii() and result.stdout.rstrip("\n").isprintable()
    assert json.loads(result.stdout)["message"] == WORDS


def test_errors_are_printed_as_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), exit_codes(as_json=False):
        raise InvalidInputError(WORDS)
    check_harmless(capsys.readouterr().err)


def test_lines_of_a_job_can_be_printed(hostile: FakeServices) -> None:
    with CollaPipeClient(hostile.address, Security.insecure()) as client:
        check_harmless("\n".join(client.lines("job-1")))


@pytest.mark.parametrize("display_class", [PlainDisplay, LiveDisplay])
def test_displays_show_words_of_others_as_words(display_class: Any) -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, height=40, emoji=False)
    given = [console] * (2 if display_class is PlainDisplay else 1)
    host = {"id": NAME, "state": "lost", "suspicion": WORDS, "busy": 0.5}
    detail = {"pipeline": [host], "links": [], "bottleneck": "stage 0", "others": [host], "more": 0}
    with display_class(*given) as display:
        display.take({"details": {"0": detail}, "job": {"held_back": [{"by": WORDS}]}})
        for event in events()[:-1]:
            display.show(event)
    check_harmless(file.getvalue())


def test_long_words_hide_no_cluster_in_the_picture() -> None:
    view = JobView()
    for event in events()[:-1]:
        view = apply_event(view, event)
    trouble = JobTrouble(missing=[MissingHost(host_id="h" * 250)] * 1000)
    view = replace(view, message="m" * 100_000, trouble=trouble, change="c\n" * 1000)
    file = io.StringIO()
    Console(file=file, width=80, height=40).print(render(view, 0.0, width=80, height=40))
    lines = file.getvalue().splitlines()
    assert len(lines) <= 40 and any("cluster 0" in line for line in lines)


def test_answers_of_a_model_are_exact_in_a_file_and_words_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = f"\tone\ntwo {WORDS}"
    pieces = [AnswerPiece(text=answer, is_last=True)]
    _print_answers(iter(pieces))
    assert capsys.readouterr().out == f"{answer}\n"
    reader, writer = os.openpty()
    tty.setraw(writer)
    with open(reader, newline="", encoding="utf-8") as screen, open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        _print_answers(iter(pieces))
        told = "".join(screen.readline() for _ in range(3))
    assert "\x1b" not in told and told.startswith("\tone\ntwo ") and "evil.example" in told
