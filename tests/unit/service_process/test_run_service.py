"""A service from its start to its end, in this process."""

import errno
import json
import os
import resource
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collapipe import service_process
from collapipe.documents import user_name
from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.service_process import Running, ServiceSettings, run_service


class Ended(BaseException):
    """Takes the place of the end of this process."""


def end_process(status: int) -> None:
    raise Ended(status)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Lists the calls of what would change this process. Restores the handlers of signals."""
    made: list[tuple[Any, ...]] = []
    for name in ("configure_logging", "tune_allocator", "raise_open_files", "_exit_with_parent"):
        monkeypatch.setattr(
            service_process, name, lambda *given, name=name: made.append((name, *given))
        )
    monkeypatch.setattr(os, "_exit", end_process)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def run(
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    start: Callable[[], None] = lambda: None,
    drain: Callable[[], None] = lambda: None,
) -> None:
    """Runs a service that gets SIGTERM when it has started."""

    def start_service(settings: ServiceSettings, metrics_address: str) -> Running:
        start()
        signal.raise_signal(signal.SIGTERM)
        return Running("somewhere:1", drain)

    monkeypatch.setattr("sys.argv", ["tester", "--insecure", *arguments])
    run_service("tester", ServiceSettings, start_service)


def test_ready_file_has_the_addresses_and_sigterm_drains(
    calls: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ready.json"
    drained: list[bytes] = []

    def drain() -> None:
        ready = json.loads(path.read_text())
        assert (ready["address"], ready["pid"]) == ("somewhere:1", os.getpid())
        with urllib.request.urlopen(f"http://{ready['metrics_address']}/metrics") as page:
            drained.append(page.read())

    run(
        monkeypatch,
        *("--ready-file", str(path), "--host-id", "me", "--exit-with-parent", "7"),
        drain=drain,
    )
    (page,) = drained
    for name in (b"collapipe_process_peak_resident_memory_bytes", b"process_max_fds"):
        assert b"\n" + name + b" " in page
    expected = {
        ("configure_logging", "text", "tester", "me"),
        ("tune_allocator",),
        ("raise_open_files",),
        ("_exit_with_parent", 7),
    }
    assert set(calls) == expected


@pytest.mark.usefixtures("calls")
def test_second_signal_ends_a_drain_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Ended, match="1"):
        run(monkeypatch, drain=lambda: signal.raise_signal(signal.SIGINT))


def refuse() -> None:
    raise InvalidInputError("nothing can be served here")


def lose() -> None:
    raise PeerLostError("device-1", "device-1 was lost")


def fill() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/state/page.json")


def lock_out() -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "/state/lock")


@pytest.mark.parametrize(
    ("arguments", "start", "said", "status"),
    [
        (["--threads", "0"], None, "--threads", 2),
        (["--nonsense"], None, "--nonsense", 2),
        (["--metrics-listen", "nowhere"], None, "nowhere", 2),
        ([], refuse, "nothing can be served here", 2),
        ([], lose, "device-1 was lost", 1),
        ([], fill, "No space left on device: '/state/page.json'", 1),
        ([], lock_out, f"/state/lock cannot be used by the user {user_name()}", 2),
        (["--ready-file", "/dev/null/ready"], lambda: None, "/dev/null", 1),
    ],
    ids=["value", "flag", "metrics", "refusal", "loss", "disk", "permission", "ready file"],
)
@pytest.mark.usefixtures("calls")
def test_process_that_cannot_serve_says_why_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    start: Callable[[], None] | None,
    said: str,
    status: int,
) -> None:
    path = tmp_path / "ready.json"
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--ready-file", str(path), *arguments, start=start or refuse)
    out, err = capsys.readouterr()
    assert ended.value.code == status
    assert out == ""
    assert err.startswith("tester: ") and said in err
    assert err.count("\n") == 1
    assert not path.exists()


def test_process_ends_itself_when_its_parent_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    parents, naps, signals = iter([7, 7, 1]), list[float](), list[tuple[int, int]]()
    fake_os = SimpleNamespace(
        getppid=lambda: next(parents),
        getpid=os.getpid,
        kill=lambda *given: signals.append(given),
        _exit=end_process,
    )
    monkeypatch.setattr(service_process, "os", fake_os)
    monkeypatch.setattr(service_process, "time", SimpleNamespace(sleep=naps.append))
    with pytest.raises(Ended, match="1"):
        service_process._exit_with_parent(7)
    assert signals == [(os.getpid(), signal.SIGTERM)]
    assert naps == [0.5, 0.5, 5.0]  # The process has 5 s to drain.


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 10**9), (service_process.MOST_OPEN_FILES, 10**9)),
        ((1024, resource.RLIM_INFINITY), (service_process.MOST_OPEN_FILES, resource.RLIM_INFINITY)),
        ((10**6, 10**6), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_limit_of_open_files_is_raised_as_far_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int] | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: before)
    monkeypatch.setattr(resource, "setrlimit", lambda which, given: limits.append(given))
    service_process.raise_open_files()
    assert limits == ([after] if after else [])
