import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_client.cli import app
from collapipe_client.contexts import contexts_file

from .conftest import FakeServices

_RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))


def _run(*arguments: str) -> str:
    result = _RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_commands_use_the_context_that_is_named_or_in_use(fake: FakeServices) -> None:
    _run("context", "add", "lab", "--scheduler", fake.address, "--insecure")
    assert "nothing is up here" in _run("status")
    assert json.loads(_run("status", "--json", "--context", "lab"))["scheduler"] == fake.address
    _run("context", "use", "lab")
    result = _RUNNER.invoke(app, ["status", "--json"])
    assert json.loads(result.stdout)["scheduler"] == fake.address
    assert "using the context lab" in result.stderr
    assert json.loads(_run("context", "list", "--json"))["used"] == "lab"
    _run("context", "use")
    assert "nothing is up here" in _run("status")


def test_removed_context_is_in_use_no_more() -> None:
    _run("context", "add", "lab", "--scheduler", "h:1", "--insecure")
    _run("context", "use", "lab")
    _run("context", "remove", "lab")
    assert json.loads(_run("context", "list", "--json")) == {"used": "", "contexts": {}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["context", "add", "lab"], "--scheduler is not given"),
        (["context", "add", "lab", "--scheduler", "h:1"], "--insecure"),
        (["context", "use", "lba"], "choose one of lab"),
        (["status", "--context", "lba"], "there is no context 'lba'"),
        (["status", "--context", "lab", "--scheduler", "h:1"], "contradict each other"),
    ],
)
def test_bad_input_exits_2_with_a_remedy(arguments: list[str], message: str) -> None:
    _run("context", "add", "lab", "--scheduler", "h:1", "--insecure")
    result = _RUNNER.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_damaged_file_is_named() -> None:
    contexts_file().parent.mkdir(parents=True)
    contexts_file().write_text('{"used": 7}')
    result = _RUNNER.invoke(app, ["status"])
    assert result.exit_code == 1
    assert str(contexts_file()) in result.stderr
