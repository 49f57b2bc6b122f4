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


def test_report_names_all_metrics_with_their_definitions(tmp_path: Path) -> None:
    evaluation = {
        "metric": "accuracy",
        "value": 0.99,
        "rows": 100,
        "round": 1,
        "metrics": {"accuracy": 0.99, "macro_f1": 0.4975},
        "definitions": {"accuracy": "a share of rows", "macro_f1": "a mean over labels"},
    }
    found = records({"metrics": evaluation["metrics"]}, evaluation=evaluation)
    path = tmp_path / "report.html"
    write_job_report(path, found, [], "collapipe jobs report demo-1")
    text = Page(path).text
    assert "accuracy 0.99, macro_f1 0.4975 on 100 held-out rows" in text
    assert "a share of rows" in text and "a mean over labels" in text


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
    measured |= {"seconds_without_evaluation": 7.5, "predicted_seconds": 7.0}
    found = records({}, {**measured, "losses": [None, 2.0], "attempt": 1})
    assert parts_of(found.rounds[0]) == {}
    assert parts_of(found.rounds[1])["train"] == 5.0 and parts_of(found.rounds[1])["other"] == 1.0
    assert found.losses == [(2.0, 2.0)] and found.curve("queues", "d") == ([2], [0.0])
    plots = draw_plots(found)
    assert [plot.name for plot in plots] == ["loss", "time", "parts", "queues"]
    assert plots[-1].title == "Energy backlog"
    write_job_report(tmp_path / "report.html", found, plots, "")
    rows = Page(tmp_path / "report.html").tables[0]
    assert [row[0].text for row in rows[1:]] == ["1", "2 (attempt 2) (without clusters 0)"]
    assert [cell.text for cell in rows[2][1:4]] == ["9", "7.5", "7"]


def test_sums_over_all_rounds_are_estimated_if_every_second_one_is_told(tmp_path: Path) -> None:
    phases = {"configure": 0.0, "evaluation": 0.0, "training": 3.0, "gather": 0.0}
    link = {"from": "a", "to": "b", "codec": "fp32", "limit_bps": 20e6}
    pipeline = [{"id": "a", "units": "embedding"}, {"id": "b", "units": "head"}]
    cluster = {"cluster": 0, "pipeline": pipeline, "links": [link], "needs_bytes": {}}
    cluster |= {"phases": phases, "computing_seconds": {"a": 1.0}}
    round_ = {"every": 2, "seconds": 4.0, "energy_joules": 5.0, "clusters": [cluster]}
    round_["pushed_bytes"] = 2_000_000
    rounds = [{**round_, "round": number, "losses": [3.0, 1.0]} for number in (1, 3, 5)]
    found = records(*rounds, committed=6, submitted=1.7e9, ended=1.7e9 + 185)
    write_job_report(tmp_path / "report.html", found, [], "")
    page = Page(tmp_path / "report.html")
    assert [place for place, _ in found.losses] == [0.5, 1.0, 2.5, 3.0, 4.5, 5.0]
    for words in ("about 24 s", "about 12 MB", "about 30 J", "estimated", "3 min 5 s"):
        assert words in page.text
    [host] = page.tables[-1][1:]
    assert [host[0].text, *(cell.values for cell in host[1:])] == ["a", ["6.0"], ["0.25"]]
    assert page.tables[1][1][-1].text == "fp32 to b, at most 20 Mbit/s"


def test_file_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="report.html"):
        write_job_report(tmp_path / "no" / "report.html", records(), [], "")
