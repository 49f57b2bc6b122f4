from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe_client.job_files import load_preset
from collapipe_client.job_plots import draw_plots
from collapipe_client.job_report import JobRecords, parts_of, write_job_report

from .report_pages import Page


def records(*rounds: dict[str, Any], **job: Any) -> JobRecords:
    first = {
        "id": "demo-1",
        "name": "demo",
        "state": "running",
        "message": "",
        "committed": len(rounds),
        "rounds": 9,
        "owner": "",
        "strategy": "dssra",
        "submitted": 1.7e9,
        "ended": None,
        "written": 1.7e9 + 60,
        "stored_bytes": 0,
        "evaluation": None,
        "settings": load_preset("demo").model_dump(mode="json"),
        "trouble": [],
        "events": None,
        **job,
    }
    return JobRecords(first, [{"every": 1, "round": n, **r} for n, r in enumerate(rounds, 1)])


def test_job_without_rounds_has_a_report_and_words_of_others_are_no_html(tmp_path: Path) -> None:
    found = records(message="<script>alert(1)</script>", trouble=["a & b"], state="preparing")
    assert draw_plots(found) == []
    path = tmp_path / "report.html"
    write_job_report(path, found, [], "collapipe jobs report demo-1")
    page = Page(path)
    assert "Preparing: 0 of 9 rounds" in page.text
    assert "<script>alert(1)</script>" in page.text and "a & b" in page.text
    assert "<script" not in path.read_text(encoding="utf-8")
    assert "No round is committed yet." in page.text and not page.tables


def test_rounds_with_gaps_are_drawn_and_told_as_far_as_they_go(tmp_path: Path) -> None:
    phases = {"configure": 1.0, "evaluation": 0.0, "training": 5.0, "gather": 2.0}
    slow = {"cluster": 1, "pipeline": [], "links": [], "needs_bytes": {}, "phases": phases}
    quick = {**slow, "cluster": 0, "phases": {**phases, "training": 1.0}}
    measured = {"seconds": 9.0, "clusters": [quick, slow], "queues": {"d": 0.0}, "late": [0]}
    found = records({}, {**measured, "losses": [None, 2.0], "attempt": 1})
    assert parts_of(found.rounds[0]) == {}
    assert parts_of(found.rounds[1])["train"] == 5.0 and parts_of(found.rounds[1])["other"] == 1.0
    assert found.losses == [(2.0, 2.0)] and found.curve("queues", "d") == ([2], [0.0])
    plots = draw_plots(found)
    assert [plot.name for plot in plots] == ["loss", "time", "parts", "queues"]
    write_job_report(tmp_path / "report.html", found, plots, "")
    rows = Page(tmp_path / "report.html").tables[0]
    assert [row[0].text for row in rows[1:]] == ["1", "2 (attempt 2) (late: 0)"]


def test_file_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="choose another file"):
        write_job_report(tmp_path / "no" / "report.html", records(), [], "")
