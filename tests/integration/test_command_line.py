"""What only the program itself shows: terminals, pipes, signals and shells. Other tests call the commands within pytest."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner
from unit.client.fake_services import FakeServices, serve_fake

from collapipe.database import FILE_NAME, Database
from collapipe.scheduler.job_store import SCHEMA, SERVICE
from collapipe.v1.scheduler_pb2 import Host, HostStatus
from collapipe_client.cli import app
from collapipe_client.doctor.kernel import check_memory_cgroup
from collapipe_client.doctor.machine import TorchFacts, ask_torch

_COLLAPIPE = "import sys; sys.argv[0] = 'collapipe'; from collapipe_client.cli import app; app()"


@pytest.fixture
def fake() -> Iterator[FakeServices]:
    with serve_fake() as services:
        yield services


def command(line: str, folder: Path, **environment: str) -> "subprocess.Popen[str]":
    """Starts the command as a user does."""
    return subprocess.Popen(
        [sys.executable, "-m", "collapipe_client", *shlex.split(line)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XDG_CONFIG_HOME": str(folder),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TERM": "dumb"},
        {"COLUMNS": "1", "NO_COLOR": "1"},
    ],
)
def test_message_is_whole_in_every_terminal(environment: dict[str, str], tmp_path: Path) -> None:
    with command("train dé.toml --preset dmeo", tmp_path, **environment) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Traceback" not in output
    assert "leave one out" in output
    assert "\x1b" not in output


def test_table_is_shown_in_a_terminal_without_a_width(tmp_path: Path) -> None:
    with command("testbed shape --list", tmp_path, COLUMNS="0") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "profile" in output


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    with command("testbed shape --list", tmp_path) as process:
        assert process.stdout is not None
        process.stdout.close()  # As `| head -0` does.
        errors = process.wait(timeout=120)
    assert errors in (0, 1)


def test_interrupt_during_the_imports_has_no_traceback(tmp_path: Path) -> None:
    slow = tmp_path / "sitecustomize.py"
    slow.write_text(
        "import signal, sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'collapipe_client.cli':\n"
        "            print('imports', flush=True)\n"
        "            signal.pause()\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    # A shell starts background jobs with Ctrl-C ignored, and processes inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with command("status", tmp_path, PYTHONPATH=path) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout is not None
        assert process.stdout.readline() == "imports\n"
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        process.wait(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert rest == ""


def test_targets_with_follow_adds_new_hosts_until_it_is_terminated(
    fake: FakeServices, tmp_path: Path
) -> None:
    file = tmp_path / "hosts.json"
    line = f"targets {file} --follow --every 0.1 --scheduler {fake.address} --insecure"
    with command(line, tmp_path) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert json.loads(file.read_text()) == []  # the edge server serves no metrics
            host = Host(host_id="raspi", metrics_address="10.0.0.7:9100")
            fake.hosts = [HostStatus(host=host, alive=True)]
            process.stdout.readline()
            [group] = json.loads(file.read_text())
            assert group["labels"]["service"] == "raspi"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def test_bash_completes(tmp_path: Path) -> None:
    jobs = Database(tmp_path / ".collapipe/state/scheduler" / FILE_NAME, SERVICE, 1, SCHEMA)
    jobs.execute("INSERT INTO job VALUES ('questions-1a2b', '{}')")
    program = tmp_path / "bin" / "collapipe"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(_COLLAPIPE)} "$@"\n')
    program.chmod(0o755)
    script = """
    eval "$(collapipe --show-completion)" || exit 1
    COMP_WORDS=(collapipe jobs show que)
    COMP_CWORD=3
    _collapipe_completion collapipe
    echo "${COMPREPLY[*]}"
    """
    answer = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == ["questions", "questions-1a2b"]


def test_remedy_of_the_doctor_for_a_disabled_memory_cgroup_enables_it(tmp_path: Path) -> None:
    for name, text in (
        ("boot/cmdline.txt", "console=tty1 root=PARTUUID=1 rootwait\n"),
        ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io pids\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    remedy = check_memory_cgroup(tmp_path).remedy
    edit = remedy.removeprefix("sudo ").partition(" && ")[0]
    subprocess.run(["sh", "-c", edit], check=True)
    edited = (tmp_path / "boot/cmdline.txt").read_text(encoding="ascii")
    assert edited.endswith("rootwait cgroup_enable=memory cgroup_memory=1\n")


def test_estimate_and_the_question_about_torch_are_answered_by_processes(tmp_path: Path) -> None:
    command_line = "plan estimate --preset demo --devices 3xpi4 --set clusters=1 --json"
    result = CliRunner().invoke(app, command_line.split())
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["fits"]
    found = ask_torch()
    assert isinstance(found, TorchFacts) and found.version.startswith("2.")
