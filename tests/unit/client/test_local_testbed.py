import inspect
import json
import os
import runpy
import socket
import textwrap
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from killed_processes import kill, restart
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from collapipe.certificates import pki
from collapipe.certificates.private_files import PASSPHRASE_VARIABLE
from collapipe.documents import write_document
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation, EmulationFile
from collapipe.errors import InvalidInputError, PeerLostError, WrongStateError
from collapipe.rpc import Security
from collapipe_client import local_testbed
from collapipe_client.client import CollaPipeClient
from collapipe_client.endpoint import EndpointOptions, find_endpoint
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.testbed_certificates import USER, LocalCertificates
from collapipe_client.testbed_options import share_out
from collapipe_client.testbed_processes import (
    Device,
    command,
    expand_clusters,
    say_shared_cores,
    services,
)
from collapipe_client.workspace import Workspace

from .fake_services import FakeServices
from .pretended_processes import PretendedProcesses

_NAMES = ["scheduler", "edge-server", "control-unit-0", "device-0-0", "device-0-1"]
PI = Emulation(devices={"device-0-0": EmulatedDevice(profile="raspberry-pi-4")}, time_scale=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "w"


@pytest.fixture
def detached(processes: PretendedProcesses, folder: Path) -> Iterator[Callable[..., LocalTestbed]]:
    """Starts a detached testbed in the folder. The last one ends with the test."""

    def start(*clusters: int, **options: Any) -> LocalTestbed:
        testbed = LocalTestbed(clusters or [1], folder, detached=True, **options)
        testbed.start()
        return testbed

    yield start
    LocalTestbed.end(folder)


def certificate_of(folder: Path, name: str) -> Any:
    path = folder / "certificates" / "issued" / name / "cert.pem"
    return pki.read_certificate(path.read_bytes())


@pytest.mark.parametrize(("num_cores", "named"), [(1, "1 core "), (2, "2 cores "), (8, None)])
def test_processes_that_share_cores_are_told(num_cores: int, named: str | None) -> None:
    told = say_shared_cores(8, num_cores)
    assert (named is not None) == bool(told)
    assert named is None or (told.startswith("8 processes ") and named in told)


def test_metrics_are_read_without_the_proxy_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # Nothing listens there.
    monkeypatch.delenv("no_proxy", raising=False)
    registry = CollectorRegistry()
    Gauge("answer", "A value.", registry=registry).set(42)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        address = f"127.0.0.1:{server.server_port}"
        write_document(Workspace(folder).ready_file("host"), {"metrics_address": address})
        assert "answer 42.0" in LocalTestbed([1], folder, insecure=True).metrics("host")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_testbed_starts_every_process_and_ends_it(
    processes: PretendedProcesses, folder: Path
) -> None:
    told: list[tuple[int, int]] = []
    with LocalTestbed([2], folder, serving=lambda *numbers: told.append(numbers)) as testbed:
        started = testbed.processes
        assert [p.name for p in started] == _NAMES
        assert all(p.alive and p.address for p in started)
        assert Workspace(folder).read_record() is not None
        assert told[-1] == (5, 5) and told == sorted(told)
        # Only the user can read the keys.
        keys = [*folder.rglob("*key.pem"), *folder.rglob("issuing.pem")]
        others = ("local", "prometheus", "certificates", "root")
        assert {key.parent.name for key in keys} == {*_NAMES, *others}
        assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}
        with pytest.raises(WrongStateError, match=f"pid {os.getpid()}"):
            LocalTestbed([2], folder).start()
    assert not any(p.alive for p in started)
    assert Workspace(folder).read_record() is None


@pytest.mark.parametrize(
    ("behaviour", "words", "seconds"),
    [("dies", "RuntimeError: no such device", 0), ("hangs", "hello from", 10)],
)
def test_failure_of_a_start_shows_the_log_and_leaves_nothing(
    processes: PretendedProcesses,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str,
    words: str,
    seconds: float,
) -> None:
    processes.behaviours["device-0-1"] = behaviour
    naps: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(naps), sleep=naps.append)
    monkeypatch.setattr(local_testbed, "time", clock)
    told: list[str] = []
    limit = timedelta(seconds=10)
    testbed = LocalTestbed([2], folder, start_timeout=limit, progress=told.append)
    with pytest.raises(PeerLostError, match="device-0-1") as error:
        testbed.start()
    assert words in str(error.value)
    assert sum(naps) == pytest.approx(seconds, abs=0.1)
    # A long wait is told once.
    assert [" 1 of 5 " in each and "device-0-1" in each for each in told] == [True] * bool(seconds)
    assert testbed.processes == ()
    assert Workspace(folder).read_record() is None


def test_restarted_process_keeps_its_address(processes: PretendedProcesses, folder: Path) -> None:
    with LocalTestbed([1], folder) as testbed:
        before = {p.name: p for p in testbed.processes}
        kill(testbed, "device-0-0")
        assert testbed.lost() == ["device-0-0"]
        assert "SIGKILL" in testbed.describe_loss("device-0-0")
        restart(testbed, "device-0-0")
        assert testbed.lost() == []
        with pytest.raises(WrongStateError, match="device-0-0 at https://"):
            testbed.metrics("device-0-0")  # It serves none.
        after = {p.name: p for p in testbed.processes}
        assert after["device-0-0"].pid != before["device-0-0"].pid
        assert after["device-0-0"].address == before["device-0-0"].address
        log = testbed.workspace.log_file("device-0-0").read_text(encoding="utf-8")
        assert log.count("hello from device-0-0") == 2


def test_leftovers_of_a_killed_command_are_ended_first(
    detached: Callable[..., LocalTestbed], folder: Path
) -> None:
    leftovers = detached().processes
    workspace = Workspace(folder)
    record = workspace.read_record()
    assert record is not None
    workspace.write_record(type(record)(False, record.shape, record.processes))
    with LocalTestbed([1], folder) as testbed:
        assert not any(p.alive for p in leftovers)
        assert all(p.alive for p in testbed.processes)


def test_detached_testbed_outlives_its_starter_and_the_next_start_repairs_it(
    processes: PretendedProcesses, detached: Callable[..., LocalTestbed], folder: Path
) -> None:
    first = LocalTestbed([1], folder, detached=True, listen="127.0.0.2:0")
    with first:
        before = {p.name: p for p in first.processes}
    assert all(p.alive for p in before.values())
    kill(first, "control-unit-0")
    second = detached()
    after = {p.name: p for p in second.processes}
    assert [name for name in before if before[name] != after[name]] == ["control-unit-0"]
    assert second.scheduler_address == before["scheduler"].address
    # It keeps the addresses in the certificates, too.
    assert after["device-0-0"].address.startswith("127.0.0.2:")
    assert "127.0.0.2" in pki.hosts_of(certificate_of(folder, "device-0-0"))

    kill(second, "scheduler")
    processes.behaviours["scheduler"] = "dies"
    with pytest.raises(PeerLostError):
        detached()
    del processes.behaviours["scheduler"]
    # The hosts that still run call the scheduler at its former address.
    assert detached().scheduler_address == before["scheduler"].address

    with pytest.raises(WrongStateError, match="2 devices"):
        detached(2)
    with pytest.raises(WrongStateError, match="4 processes"):
        LocalTestbed([1], folder).start()
    ended = LocalTestbed.end(folder)
    assert ended is not None
    assert ended.alive == []
    assert LocalTestbed.end(folder) is None


def test_port_in_use_is_reported_before_anything_starts(
    processes: PretendedProcesses, folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        testbed = LocalTestbed([1], folder, listen=address)
        with pytest.raises(InvalidInputError, match=address):
            testbed.start()
    assert testbed.processes == ()


def test_docstring_example_trains(
    processes: PretendedProcesses,
    fake: FakeServices,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.succeed_with(name="demo", files={"config.json": b"{}"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        LocalTestbed, "client", lambda _: CollaPipeClient(fake.address, Security.insecure())
    )
    text = inspect.getdoc(LocalTestbed) or ""
    example = text.split("train a model:\n", 1)[1].split("\nArgs:", 1)[0]
    (tmp_path / "example.py").write_text(textwrap.dedent(example), encoding="utf-8")
    runpy.run_path(str(tmp_path / "example.py"))
    assert (tmp_path / "model" / "config.json").read_bytes() == b"{}"


def test_processes_get_their_options_and_no_settings_of_another_deployment(
    processes: PretendedProcesses, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLAPIPE_TLS_CA", "ca.pem")
    monkeypatch.setenv("PYTHONPATH", "relative")
    monkeypatch.chdir(folder.parent)
    options = ["--telemetry", "prometheus", "--prometheus-url", "http://127.0.0.1:9"]
    with LocalTestbed([1], folder, scheduler_options=options, listen="127.0.0.2:0") as testbed:
        started = [processes.of(testbed, name) for name in _NAMES[:4]]
    scheduler, *hosts = started
    first = scheduler.line.index("--telemetry")
    assert scheduler.line[first : first + 4] == options
    assert scheduler.option("--web") == "127.0.0.1:0"
    assert not {"--telemetry", "--web"} & {part for host in hosts for part in host.line}
    # A scheduler on an address of a network has hosts with that address.
    assert {process.option("--listen") for process in started} == {"127.0.0.2:0"}
    assert "127.0.0.2" in pki.hosts_of(certificate_of(folder, "device-0-0"))
    environment = scheduler.options["env"]
    assert environment["PYTHONPATH"] == str(folder.parent / "relative")
    assert not [name for name in environment if name.startswith("COLLAPIPE_")]
    assert scheduler.options["start_new_session"]


def test_command_lines_have_the_flags_that_each_service_needs(tmp_path: Path) -> None:
    limited = Device(energy_budget_joules=40.0, busy_watts=4.5, max_transmit_watts=0.1)
    listed = services([[Device(memory_bytes=5, speed=2.5), Device(), limited]])
    lines = {
        service.name: " ".join(
            command(
                service,
                Workspace(tmp_path),
                ["--insecure"],
                scheduler_address="127.0.0.1:7",
                parent=7,
            )
        )
        for service in listed
    }
    assert "--memory-bytes 5 --speed 2.5" in lines["device-0-0"]
    assert "--scheduler 127.0.0.1:7 " in lines["device-0-0"]
    assert "--exit-with-parent 7" in lines["device-0-0"]
    for name, line in lines.items():
        assert f"--state-dir {tmp_path / 'state' / name}" in line
    # Only values that are set have a flag.
    assert lines["device-0-1"].endswith("--exit-with-parent 7")
    assert lines["device-0-2"].endswith(
        "--energy-budget-joules 40.0 --busy-watts 4.5 --max-transmit-watts 0.1"
    )


def test_cluster_without_devices_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="cluster 1"):
        expand_clusters([1, 0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1], [[1, 1], [1, 1]]),
        ([1, 2], [[1, 2], [1, 2]]),
        ([1, 2, 3, 4], [[1, 2], [3, 4]]),
    ],
)
def test_share_out_takes_a_value_for_all_for_each_cluster_or_for_each_device(
    values: list[int], expected: list[list[int]]
) -> None:
    assert share_out(values, [2, 2], "--device-speed") == expected
    with pytest.raises(InvalidInputError, match=r"--device-speed.*\b3\b.*\b4\b"):
        share_out([1, 2, 3], [2, 2], "--device-speed")


# --- emulation


def test_every_process_gets_the_emulation_file_which_may_change(
    processes: PretendedProcesses, folder: Path
) -> None:
    path = folder / "emulation.json"
    read = EmulationFile(path)
    with LocalTestbed([1], folder, emulation=Emulation()) as testbed:
        for name in _NAMES[:4]:
            assert processes.of(testbed, name).option("--emulation") == str(path)
        kill(testbed, "device-0-0")
        restart(testbed, "device-0-0")
        assert "--emulation" in processes.of(testbed, "device-0-0").line
        assert read.current() == Emulation()
        testbed.emulate(PI)
        assert read.current() == PI == testbed.emulation
    # A testbed without an emulation removes that of an earlier one.
    with LocalTestbed([1], folder, web="") as testbed:
        assert "--emulation" not in processes.of(testbed, "device-0-0").line
        with pytest.raises(WrongStateError):
            testbed.emulate(PI)
        assert "--web" not in processes.of(testbed, "scheduler").line
        assert testbed.workspace.page_link() == ""


def test_detached_testbed_accepts_an_emulation_only_if_it_was_started_with_one(
    detached: Callable[..., LocalTestbed], folder: Path
) -> None:
    read = EmulationFile(folder / "emulation.json")
    detached()
    with pytest.raises(WrongStateError, match="collapipe down"):
        detached(emulation=PI)
    LocalTestbed.end(folder)
    detached(emulation=Emulation())
    detached(emulation=PI)
    assert read.current() == PI
    detached()
    assert read.current() == PI


# --- certificates


@pytest.mark.parametrize(("is_detached", "days"), [(False, 1), (True, 30)])
def test_certificates_are_short_lived_and_those_that_are_due_are_renewed(
    processes: PretendedProcesses, folder: Path, is_detached: bool, days: int
) -> None:
    for _ in range(2):
        with LocalTestbed([1], folder, detached=is_detached):
            pass
        LocalTestbed.end(folder)
        certificate = certificate_of(folder, "device-0-0")
        left = certificate.not_valid_after_utc - pki.utc_now()
        assert timedelta(days=days) - timedelta(hours=1) < left <= timedelta(days=days)
        # The next start finds a certificate that has nearly expired.
        identity = pki.identity_of(certificate)
        assert identity is not None
        (folder / "certificates" / "issued" / "device-0-0" / "cert.pem").unlink()
        LocalCertificates(folder / "certificates").issue({identity: ()}, timedelta(minutes=1))


def test_certificates_that_cannot_be_renewed_are_told_once_for_each_reason(
    processes: PretendedProcesses, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapipe_client.local_testbed._RENEWAL_SECONDS", 0.001)
    told: list[str] = []
    tries, enough = iter(["full", "full", "full", "", "full", "locked"]), threading.Event()
    testbed = LocalTestbed([1], folder, progress=told.append)
    with testbed:

        def issue() -> None:
            reason = next(tries, "locked")
            if reason == "locked" and len(told) == 3:
                enough.set()
            if reason:
                raise WrongStateError(reason)

        monkeypatch.setattr(testbed, "_issue_certificates", issue)
        assert enough.wait(60)
    assert [message.rpartition(": ")[2] for message in told] == ["full", "full", "locked"]


def test_testbed_of_an_older_version_is_not_continued_but_made_anew(
    detached: Callable[..., LocalTestbed], folder: Path
) -> None:
    detached()
    authority = folder / "certificates"
    (authority / "ca-key.pem").write_text("the only key, as in older versions")
    before = (authority / "ca.pem").read_bytes()
    with pytest.raises(WrongStateError, match="collapipe down"):
        detached()
    LocalTestbed.end(folder)
    detached()
    assert (authority / "ca.pem").read_bytes() != before
    assert not (authority / "ca-key.pem").exists()
    # Even older versions had no certificates.
    record = json.loads((folder / "testbed.json").read_text())
    del record["insecure"]
    (folder / "testbed.json").write_text(json.dumps(record))
    endpoint = find_endpoint(EndpointOptions(workspace=folder))
    assert endpoint is not None and endpoint.security.is_insecure
    with pytest.raises(WrongStateError, match="plain text"):
        detached()


def test_passphrase_of_a_deployment_does_not_encrypt_the_authority_of_a_testbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = LocalCertificates(tmp_path)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "secret")
    certificates.issue({USER: ()}, timedelta(days=1))
    monkeypatch.delenv(PASSPHRASE_VARIABLE)
    certificates.issue({USER: ()}, timedelta(days=1))


# --- workspace


def test_only_the_user_can_enter_a_workspace(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    Workspace(folder).create()
    assert folder.stat().st_mode & 0o777 == 0o700
    if os.getuid() == 0:  # Only root can give a folder away.
        os.chown(folder, 12345, 12345)
        with pytest.raises(WrongStateError, match="belongs to"):
            Workspace(folder).create()
