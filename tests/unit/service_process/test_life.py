"""A real process of a service, from its start to its end."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

SERVICE = """
import threading
from collapipe.errors import InvalidInputError
from collapipe.service_process import Running, ServiceSettings, run_service

def start(settings, metrics_address):
    if settings.host_id == "refuses":
        raise InvalidInputError("nothing can be served here")
    def drain():
        print("drained", flush=True)
        if settings.host_id == "slow":
            threading.Event().wait(60)
    return Running("somewhere:1", drain)

run_service("tester", ServiceSettings, start)
"""


@contextmanager
def service(tmp_path: Path, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """Starts a service in its own process."""
    command = [sys.executable, "-c", SERVICE, "--ready-file", str(tmp_path / "ready.json")]
    command += ["--insecure"]
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_ready(tmp_path: Path) -> dict[str, Any]:
    path, deadline = tmp_path / "ready.json", time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, "the service is not ready"
        time.sleep(0.02)
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_ready_file_has_the_address_and_sigterm_drains(tmp_path: Path) -> None:
    with service(tmp_path) as process:
        ready = wait_until_ready(tmp_path)
        assert ready["address"] == "somewhere:1"
        assert ready["pid"] == process.pid
        page = urllib.request.urlopen(f"http://{ready['metrics_address']}/metrics", timeout=10)
        assert b"collapipe_process_peak_resident_memory_bytes" in page.read()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "drained\n")
    assert "Traceback" not in err


def test_second_signal_ends_a_drain_that_takes_too_long(tmp_path: Path) -> None:
    with service(tmp_path, "--host-id", "slow") as process:
        wait_until_ready(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "drained\n"
        for _ in range(60):  # Python may miss a signal just before a wait.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                break
        assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threads", "0"], "tester: --threads: Input should be greater than or equal to 1"),
        (["--nonsense"], "tester: error parsing CLI: unrecognized arguments: --nonsense"),
        (["--host-id", "refuses"], "tester: nothing can be served here"),
        (["--metrics-listen", "nowhere"], "tester: cannot serve metrics on nowhere"),
    ],
    ids=str,
)
def test_process_that_cannot_serve_says_why_in_one_line(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    with service(tmp_path, *arguments) as process:
        out, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith(said)
    assert err.count("\n") == 1
    assert not (tmp_path / "ready.json").exists()


def test_process_ends_with_its_parent(tmp_path: Path) -> None:
    parent_code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], '--ready-file', sys.argv[2],"
        " '--insecure', '--exit-with-parent', str(os.getpid())])\n"
        "time.sleep(60)\n"
    )
    ready_file = str(tmp_path / "ready.json")
    parent = subprocess.Popen([sys.executable, "-c", parent_code, SERVICE, ready_file])
    try:
        child = psutil.Process(wait_until_ready(tmp_path)["pid"])
        assert child.ppid() == parent.pid
        parent.kill()
        parent.wait(10)
        psutil.wait_procs([child], timeout=20)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        if (tmp_path / "ready.json").exists():
            _kill(wait_until_ready(tmp_path)["pid"])


def test_process_stays_while_its_parent_lives(tmp_path: Path) -> None:
    with service(tmp_path, "--exit-with-parent", str(os.getpid())) as process:
        wait_until_ready(tmp_path)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.2)  # The service looks at its parent twice in this time.


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
