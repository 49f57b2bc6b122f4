"""`collapipe jobs report`: a page from the records of a real job, while its testbed runs and after it has ended."""

import json
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from reference.tiny_jobs import make_job
from stored_jobs import stored_ids
from typer.testing import CliRunner
from unit.client.report_pages import Cell, Page

from collapipe.database import FILE_NAME
from collapipe_client import LocalTestbed
from collapipe_client.cli import app
from integration.running import run_job

_RUNNER = CliRunner()
LIMIT_SECONDS = 120.0


def write_report(job_id: str, workspace: Path, file: Path) -> tuple[dict[str, Any], Page]:
    command = ["jobs", "report", job_id, str(file), "--workspace", str(workspace), "--json"]
    result = _RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), Page(file)


def test_report_has_the_numbers_of_the_records_and_titles_units_and_legends(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(tmp_path, devices_per_cluster=3, num_rows=(40,), training={"local_steps": 6})
    finished = run_job(testbed, job)
    found, page = write_report(finished.job_id, testbed.workspace.root, tmp_path / "report.html")
    assert not page.addresses
    losses = [loss for each in found["rounds"] for loss in each["losses"]]
    assert losses == pytest.approx(finished.losses(0), rel=1e-3)
    [rounds, plan, costs, events] = page.tables
    check_rounds(rounds, found)
    last = found["rounds"][-1]["clusters"][0]
    assert [row[0].text for row in plan[1:]] == [host["id"] for host in last["pipeline"]]
    busy = [last["busy"].get(host["id"]) for host in last["pipeline"]]
    assert [value(row[3]) for row in plan[1:]] == busy
    computed = {row[0].text: value(row[1]) for row in costs[1:]}
    for host, seconds in computed.items():
        parts = [each["clusters"][0]["computing_seconds"][host] for each in found["rounds"]]
        assert seconds == pytest.approx(sum(parts)) and sum(parts) > 0
    assert any("round 2 is committed" in row[1].text for row in events[1:])
    metric = finished.evaluations[-1].metric
    for title, label, legend in (
        ("Loss", "loss", "mean over the clusters"),
        (metric.capitalize(), metric, f"{metric} on held-out rows"),
        ("Samples per second", "samples/s", "all clusters"),
        ("Time of a round", "time, s", "predicted"),
        ("Parts of a round", "time, s", "push weights"),
    ):
        words = next(words for words in page.pictures if title in words)
        assert {label, "round", legend, f"job {finished.job_id}, 2 of 2 rounds"} <= set(words)
    assert '"local_steps": 6' in page.text and "Succeeded: 2 of 2 rounds" in page.text


def test_report_of_a_job_whose_testbed_has_ended_has_all_rounds_and_events(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(tmp_path, num_rows=(24, 24), use_clusters=[1, 2])
    finished = run_job(testbed, job)
    # The events are stored when the job has ended, so after its last event.
    scheduler = testbed.workspace.state / "scheduler"
    deadline = time.monotonic() + LIMIT_SECONDS
    while finished.job_id not in stored_ids(scheduler, "events"):
        assert time.monotonic() < deadline, "the events were not stored"
        time.sleep(0.1)

    def others(folder: str, names: list[str]) -> list[str]:
        """Returns what belongs to other jobs, which the testbed may be deleting, and the database, which it may be changing."""
        if Path(folder).name == "jobs":
            return [name for name in names if name != finished.job_id]
        return [name for name in names if name.startswith(FILE_NAME)]

    for name in ("scheduler", "edge-server"):
        state = testbed.workspace.root / "state" / name
        shutil.copytree(state, tmp_path / "past/state" / name, ignore=others)
    with (
        closing(sqlite3.connect(scheduler / FILE_NAME)) as source,
        closing(sqlite3.connect(tmp_path / "past/state/scheduler" / FILE_NAME)) as copy,
    ):
        source.backup(copy)
    found, page = write_report(finished.job_id, tmp_path / "past", tmp_path / "past.html")
    rounds, plan, costs, events = page.tables
    assert any("round 2 is committed" in row[1].text for row in events[1:])
    check_rounds(rounds, found)
    assert {row[1].text for row in plan[1:]} == {"0", "1"} and len(costs) > 1


def check_rounds(table: list[list[Cell]], found: dict[str, Any]) -> None:
    titles = [cell.text for cell in table[0]]
    assert len(table) == 1 + len(found["rounds"]) == 1 + found["job"]["committed"]
    for row, each in zip(table[1:], found["rounds"], strict=True):
        shown = dict(zip(titles, map(value, row), strict=True))
        assert row[0].text == str(each["round"])
        assert shown["took, s"] == each["seconds"]
        assert shown["predicted, s"] == each["predicted_seconds"]
        assert shown["last loss"] == each["losses"][-1]
        assert shown["samples/s"] == each["samples_per_second"]
        pushed = sum(cluster["pushed_bytes"] for cluster in each["clusters"])
        assert shown["pushed, MB"] == pushed > 0
        parts = [c["phases"] for c in each["clusters"]]
        slowest = max(parts, key=lambda phases: sum(phases.values()))
        assert (shown["train, s"], shown["push weights, s"]) == (
            slowest["training"],
            slowest["gather"],
        )
        for name, measured in each.get("metrics", {}).items():
            assert shown[name] == measured


def value(cell: Cell) -> float | None:
    return float(cell.values[0]) if cell.values else None
