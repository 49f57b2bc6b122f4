"""Shells complete commands, options and what a workspace and the user's files name."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe.database import FILE_NAME, Database
from collapipe.scheduler.job_store import SCHEMA, SERVICE
from collapipe_client.cli import app


@pytest.fixture(autouse=True)
def _jobs_and_a_context(tmp_path: Path, in_empty_folder: None) -> None:
    jobs = Database(tmp_path / ".collapipe/state/scheduler" / FILE_NAME, SERVICE, 1, SCHEMA)
    for job in ("questions-1a2b", "quick-3c4d"):
        jobs.execute("INSERT INTO job VALUES (?, '{}')", job)
    (tmp_path / "collapipe").mkdir()
    contexts = {"used": "", "by_name": {"lab": {"scheduler": "lab:7100", "insecure": True}}}
    (tmp_path / "collapipe" / "contexts.json").write_text(json.dumps(contexts))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("collapipe contex", ["context"]),
        ("collapipe jobs show que", ["questions", "questions-1a2b"]),
        ("collapipe trace --job quick-", ["quick-3c4d"]),
        ("collapipe jobs list --workspace other --jso", ["--json"]),
        ("collapipe jobs show --workspace other q", []),
        ("collapipe context use ", ["lab"]),
        ("collapipe train --preset cl", ["classification"]),
    ],
)
def test_names_that_fit_are_offered_in_bash(typed: str, offered: list[str]) -> None:
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert _complete("bash", asked).split() == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_names(shell: str) -> None:
    asked = {"_TYPER_COMPLETE_ARGS": "collapipe jobs show que"}
    answer = _complete(shell, {**asked, "_TYPER_COMPLETE_FISH_ACTION": "get-args"})
    assert "questions-1a2b" in answer
    assert "quick" not in answer


def _complete(shell: str, asked: dict[str, str]) -> str:
    environment = {"_COLLAPIPE_COMPLETE": f"complete_{shell}", **asked}
    result = CliRunner().invoke(app, [], prog_name="collapipe", env=environment)
    assert result.exit_code == 0, result.output
    return result.stdout
