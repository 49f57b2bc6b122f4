"""Tests the age of records of the campaign, and that its faults still fit the code."""

import shlex
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from benchmarks.campaign import MOST_DAYS, PARTS, Record, mistake
from benchmarks.disturbed_jobs import read_mutations
from benchmarks.mutants import read_mutants

ROOT = Path(__file__).parents[2]
RAN_AT = datetime(2030, 1, 1, tzinfo=timezone.utc)
PASSED = Record("abc", RAN_AT.isoformat(), 60.0, PARTS["chaos"].command, 0, ["all passed"])


@pytest.mark.parametrize("record", [PASSED, None])
def test_record_is_refused_if_what_it_covers_changed_more_than_30_days_later(
    record: Record | None,
) -> None:
    later = RAN_AT + timedelta(days=MOST_DAYS)
    assert mistake("chaos", record, later, RAN_AT) is None
    refusal = mistake("chaos", record, later + timedelta(days=1), RAN_AT)
    assert refusal and "'chaos'" in refusal and 'PARTS="chaos"' in refusal


def test_record_of_a_failed_part_or_of_another_command_is_refused() -> None:
    refusal = mistake("chaos", replace(PASSED, exit_status=3), RAN_AT, RAN_AT)
    assert refusal and "3" in refusal
    shorter = "-m benchmarks.chaos --runs 3"
    refusal = mistake("chaos", replace(PASSED, command=shorter), RAN_AT, RAN_AT)
    assert refusal and shorter in refusal


@pytest.mark.parametrize("name", PARTS)
def test_part_names_files_that_exist(name: str) -> None:
    words = shlex.split(PARTS[name].command)
    paths = [*PARTS[name].covers, *(word for word in words if word.startswith("tests/"))]
    if words[1].startswith("benchmarks."):
        paths.append(f"{words[1].replace('.', '/')}.py")
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_fault_replaces_text_that_occurs_once() -> None:
    mutants, of_decisions = read_mutants(), read_mutations()
    every = [*mutants, *of_decisions]
    wrong = [m.name for m in every if (ROOT / m.file).read_text("utf-8").count(m.old) != 1]
    assert wrong == []
    assert len({m.name for m in every}) == len(every)
    assert (len(mutants) >= 60, len(of_decisions) >= 30) == (True, True)
    assert sum(m.concurrency for m in mutants) >= 10
