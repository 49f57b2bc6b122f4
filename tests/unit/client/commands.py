"""Runs commands of the client in the process of the test."""

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from collapipe_client.cli import app


def run(*arguments: object, code: int = 0, typed: str | None = None) -> Result:
    """Runs a command, and checks its exit code. `typed` is what its user types."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)
    assert result.exit_code == code, result.output
    return result


def run_lines(*arguments: object, code: int = 0, typed: str | None = None) -> list[Any]:
    """Runs a command with `--json`, and returns the documents that it prints, one for each line."""
    lines = run(*arguments, "--json", code=code, typed=typed).stdout.splitlines()
    return [json.loads(line) for line in lines]


def run_json(*arguments: object, code: int = 0) -> Any:
    """Runs a command with `--json`, and returns the only document that it prints."""
    (document,) = run_lines(*arguments, code=code)
    return document
