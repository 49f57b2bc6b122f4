"""Shells complete commands, options and what a workspace and the user's files name."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

_COLLAPIPE = "import sys; sys.argv[0] = 'collapipe'; from collapipe_client.cli import app; app()"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Puts the command `collapipe` on the path, and makes two jobs and a context."""
    for job in ("questions-1a2b", "quick-3c4d"):
        (tmp_path / "work" / ".collapipe" / "state" / "scheduler" / "jobs" / job).mkdir(
            parents=True
        )
    (tmp_path / "collapipe").mkdir()
    contexts = {"used": "", "by_name": {"lab": {"scheduler": "lab:7100", "insecure": True}}}
    (tmp_path / "collapipe" / "contexts.json").write_text(json.dumps(contexts))
    script = tmp_path / "bin" / "collapipe"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(_COLLAPIPE)} "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join(part for part in sys.path if part)
    return {
        **os.environ,
        "PATH": f"{script.parent}:{os.environ['PATH']}",
        "PYTHONPATH": path,
        "XDG_CONFIG_HOME": str(tmp_path),
    }


_TYPED = {
    "collapipe contex": ["context"],
    "collapipe jobs show que": ["questions", "questions-1a2b"],
    "collapipe trace --job quick-": ["quick-3c4d"],
    "collapipe jobs list --workspace other --jso": ["--json"],
    "collapipe jobs show --workspace other q": [],
    "collapipe context use ": ["lab"],
    "collapipe train --preset cl": ["classification"],
}


def test_bash_completes(environment: dict[str, str], tmp_path: Path) -> None:
    lines = [
        f"COMP_WORDS=({' '.join(map(shlex.quote, typed.split(' ')))}); complete" for typed in _TYPED
    ]
    script = """
    eval "$(collapipe --show-completion)" || exit 1
    complete() {
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        _collapipe_completion collapipe
        echo "${COMPREPLY[*]}"
    }
    """
    answer = subprocess.run(
        ["bash", "-c", "\n".join([script, *lines])],
        cwd=tmp_path / "work",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split() for line in answer.stdout.splitlines()] == list(_TYPED.values())


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_names(
    environment: dict[str, str], tmp_path: Path, shell: str
) -> None:
    answer = subprocess.run(
        ["collapipe"],
        cwd=tmp_path / "work",
        env={
            **environment,
            "_COLLAPIPE_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_ARGS": "collapipe jobs show que",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert "questions-1a2b" in answer.stdout
    assert "quick" not in answer.stdout
