import inspect
import json
import os
import runpy
import socket
import textwrap
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from killed_processes import kill, restart

from collapipe.certificates import pki
from collapipe.certificates.private_files import PASSPHRASE_VARIABLE
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation, EmulationFile
from collapipe.errors import InvalidInputError, PeerLostError, WrongStateError
from collapipe.rpc import Security
from collapipe_client.client import CollaPipeClient
from collapipe_client.endpoint import EndpointOptions, find_endpoint
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.testbed_certificates import USER, LocalCertificates
from collapipe_client.testbed_options import share_out
from collapipe_client.testbed_processes import Device, command, expand_clusters, services
from collapipe_client.workspace import Workspace

from .conftest import FakeServices

_NAMES = ["scheduler", "edge-server", "control-unit-0", "device-0-0", "device-0-1"]


def test_testbed_starts_every_process_and_ends_it(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    with LocalTestbed([2], tmp_path / "w") as testbed:
        processes = testbed.processes
        assert [p.name for p in processes] == _NAMES
        assert all(p.alive and p.address for p in processes)
        assert Workspace(tmp_path / "w").read_record() is not None
    assert not any(p.alive for p in processes)
    assert Workspace(tmp_path / "w").read_record() is None


def test_testbed_start_failure_shows_the_log_and_leaves_nothing(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    behaviours["device-0-1"] = "dies"
    testbed = LocalTestbed([2], tmp_path / "w")
    with pytest.raises(PeerLostError, match="device-0-1 ended with exit code 1") as error:
        testbed.start()
    assert "RuntimeError: no such device" in str(error.value)
    assert testbed.processes == ()
    assert Workspace(tmp_path / "w").read_record() is None


def test_error_names_a_process_that_does_not_serve_in_time(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    behaviours["edge-server"] = "hangs"
    testbed = LocalTestbed([1], tmp_path / "w", start_timeout=timedelta(seconds=1))
    with pytest.raises(PeerLostError, match=r"edge-server did not serve within 1 s"):
        testbed.start()


def test_restarted_process_keeps_its_address(behaviours: dict[str, str], tmp_path: Path) -> None:
    with LocalTestbed([1], tmp_path / "w") as testbed:
        before = {p.name: p for p in testbed.processes}
        kill(testbed, "device-0-0")
        assert testbed.lost() == ["device-0-0"]
        assert "SIGKILL" in testbed.describe_loss("device-0-0")
        restart(testbed, "device-0-0")
        assert testbed.lost() == []
        after = {p.name: p for p in testbed.processes}
        assert after["device-0-0"].pid != before["device-0-0"].pid
        assert after["device-0-0"].address == before["device-0-0"].address


def test_second_testbed_in_a_workspace_is_refused(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    second = LocalTestbed([1], tmp_path / "w")
    with (
        LocalTestbed([1], tmp_path / "w"),
        pytest.raises(WrongStateError, match=f"pid {os.getpid()}"),
    ):
        second.start()


def test_workspace_below_a_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WrongStateError, match="cannot be written.*--workspace DIR"):
        Workspace(tmp_path / "file" / "w").create()


def test_leftovers_of_a_killed_command_are_ended_first(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    killed = LocalTestbed([1], tmp_path / "w", detached=True)
    killed.start()
    leftovers = killed.processes
    workspace = Workspace(tmp_path / "w")
    record = workspace.read_record()
    assert record is not None
    workspace.write_record(type(record)(False, record.shape, record.processes))
    with LocalTestbed([1], tmp_path / "w") as testbed:
        assert not any(p.alive for p in leftovers)
        assert all(p.alive for p in testbed.processes)


def test_detached_testbed_outlives_its_starter_and_the_next_start_repairs_it(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    first = LocalTestbed([1], tmp_path / "w", detached=True)
    try:
        with first:
            before = {p.name: p for p in first.processes}
        assert all(p.alive for p in before.values())
        kill(first, "control-unit-0")

        second = LocalTestbed([1], tmp_path / "w", detached=True)
        second.start()
        after = {p.name: p for p in second.processes}
        replaced = [name for name in before if before[name] != after[name]]
        assert replaced == ["control-unit-0"]
        assert second.scheduler_address == before["scheduler"].address

        kill(second, "scheduler")
        behaviours["scheduler"] = "dies"
        with pytest.raises(PeerLostError):
            LocalTestbed([1], tmp_path / "w", detached=True).start()
        del behaviours["scheduler"]
        third = LocalTestbed([1], tmp_path / "w", detached=True)
        third.start()  # The hosts that still run call the scheduler at its former address.
        assert third.scheduler_address == before["scheduler"].address

        with pytest.raises(WrongStateError, match="collapipe down"):
            LocalTestbed([2], tmp_path / "w", detached=True).start()
        with pytest.raises(WrongStateError, match="collapipe down"):
            LocalTestbed([1], tmp_path / "w").start()
    finally:
        ended = LocalTestbed.end(tmp_path / "w")
    assert ended is not None
    assert ended.alive == []
    assert LocalTestbed.end(tmp_path / "w") is None


def test_port_in_use_is_reported_before_anything_starts(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        testbed = LocalTestbed([1], tmp_path / "w", listen=address)
        with pytest.raises(InvalidInputError, match=f"cannot listen on {address}"):
            testbed.start()
    assert testbed.processes == ()


def test_docstring_example_trains(
    behaviours: dict[str, str],
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


def test_command_lines_have_the_flags_that_each_service_needs(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    lines = {
        service.name: command(
            service,
            workspace,
            ["--insecure"],
            scheduler_address="127.0.0.1:7",
            parent=os.getpid(),
        )
        for service in services([[Device(memory_bytes=5, speed=2.5)]])
    }
    device = " ".join(lines["device-0-0"])
    assert "--memory-bytes 5 --speed 2.5" in device
    assert "--scheduler 127.0.0.1:7 " in device
    assert f"--exit-with-parent {os.getpid()}" in device
    for name, line in lines.items():
        assert f"--state-dir {tmp_path / 'state' / name}" in " ".join(line)


def test_cluster_without_devices_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="cluster 1 has no devices"):
        expand_clusters([1, 0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1], [[1, 1], [1, 1]]),
        ([1, 2], [[1, 2], [1, 2]]),
        ([1, 2, 3, 4], [[1, 2], [3, 4]]),
    ],
)
def test_share_out_takes_one_value_or_values_for_a_cluster_or_for_every_device(
    values: list[int], expected: list[list[int]]
) -> None:
    assert share_out(values, [2, 2], "--device-speed") == expected


def test_share_out_refuses_another_number_of_values() -> None:
    with pytest.raises(InvalidInputError, match="give 1 for all, 2 for each cluster, or 4"):
        share_out([1, 2, 3], [2, 2], "--device-speed")


def test_settings_of_another_deployment_do_not_reach_the_processes(
    behaviours: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLAPIPE_TLS_CA", "ca.pem")
    monkeypatch.setenv("PYTHONPATH", "relative")
    monkeypatch.chdir(tmp_path)
    with LocalTestbed([1], tmp_path / "w") as testbed:
        environment = Path(f"/proc/{testbed.processes[0].pid}/environ")
        if not environment.exists():
            pytest.skip("this machine has no /proc")
        settings = environment.read_bytes().split(b"\0")
    assert f"PYTHONPATH={tmp_path / 'relative'}".encode() in settings
    assert not [setting for setting in settings if setting.startswith(b"COLLAPIPE_")]


# --- emulation

PI = Emulation(devices={"device-0-0": EmulatedDevice(profile="raspberry-pi-4")}, time_scale=2)


def arguments_of(testbed: LocalTestbed, name: str) -> list[str]:
    pid = next(process.pid for process in testbed.processes if process.name == name)
    command_line = Path(f"/proc/{pid}/cmdline")
    if not command_line.exists():
        pytest.skip("this machine has no /proc")
    return command_line.read_text().split("\0")


def test_every_process_gets_the_emulation_file(behaviours: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "w" / "emulation.json"
    with LocalTestbed([1], tmp_path / "w", emulation=PI) as testbed:
        assert EmulationFile(path).current() == PI
        for name in ("scheduler", "edge-server", "control-unit-0", "device-0-0"):
            given = arguments_of(testbed, name)
            assert given[given.index("--emulation") + 1] == str(path)
        kill(testbed, "device-0-0")
        restart(testbed, "device-0-0")
        assert "--emulation" in arguments_of(testbed, "device-0-0")


def test_emulation_changes_while_the_testbed_runs(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    read = EmulationFile(tmp_path / "w" / "emulation.json")
    with LocalTestbed([1], tmp_path / "w", emulation=Emulation()) as testbed:
        assert read.current() == Emulation()
        testbed.emulate(PI)
        assert read.current() == PI == testbed.emulation


def test_testbed_without_an_emulation_removes_that_of_an_earlier_testbed(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    with LocalTestbed([1], tmp_path / "w", emulation=PI):
        pass
    with LocalTestbed([1], tmp_path / "w") as testbed:
        assert "--emulation" not in arguments_of(testbed, "device-0-0")
        with pytest.raises(WrongStateError, match="without an emulation"):
            testbed.emulate(PI)


def test_detached_testbed_accepts_an_emulation_only_if_it_was_started_with_one(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    read = EmulationFile(tmp_path / "w" / "emulation.json")
    try:
        LocalTestbed([1], tmp_path / "w", detached=True).start()
        with pytest.raises(WrongStateError, match="collapipe down"):
            LocalTestbed([1], tmp_path / "w", detached=True, emulation=PI).start()
        LocalTestbed.end(tmp_path / "w")
        LocalTestbed([1], tmp_path / "w", detached=True, emulation=Emulation()).start()
        LocalTestbed([1], tmp_path / "w", detached=True, emulation=PI).start()
        assert read.current() == PI
        LocalTestbed([1], tmp_path / "w", detached=True).start()
        assert read.current() == PI
    finally:
        LocalTestbed.end(tmp_path / "w")


def test_only_the_scheduler_gets_the_scheduler_options(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    options = ["--telemetry", "prometheus", "--prometheus-url", "http://127.0.0.1:9"]
    with LocalTestbed([1], tmp_path / "w", scheduler_options=options) as testbed:
        own = arguments_of(testbed, "scheduler")
        first = own.index("--telemetry")
        assert own[first : first + 4] == options
        assert own[own.index("--web") + 1] == "127.0.0.1:0"
        for option in ("--telemetry", "--web"):
            assert option not in arguments_of(testbed, "edge-server")


def test_testbed_without_a_page_asks_for_none(behaviours: dict[str, str], tmp_path: Path) -> None:
    with LocalTestbed([1], tmp_path / "w", web="") as testbed:
        assert "--web" not in arguments_of(testbed, "scheduler")
        assert testbed.workspace.page_link() == ""


def test_device_agent_gets_flags_only_for_values_that_are_set(tmp_path: Path) -> None:
    devices = [
        Device(),
        Device(energy_budget_joules=40.0, busy_watts=4.5, max_transmit_watts=0.1),
    ]
    plain, limited = (service.options for service in services([devices])[-2:])
    assert plain == ()
    assert limited == (
        *("--energy-budget-joules", "40.0"),
        *("--busy-watts", "4.5"),
        *("--max-transmit-watts", "0.1"),
    )


def test_only_the_user_can_read_the_keys_of_a_testbed(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    with LocalTestbed([1], tmp_path / "w"):
        keys = [*(tmp_path / "w").rglob("*key.pem"), *(tmp_path / "w").rglob("issuing.pem")]
        assert {key.parent.name for key in keys} == {
            *_NAMES[:4],
            "local",
            "prometheus",
            "certificates",
            "root",
        }
        assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}


@pytest.mark.parametrize(("detached", "days"), [(False, 1), (True, 30)])
def test_certificates_are_short_lived_and_those_that_are_due_are_renewed(
    behaviours: dict[str, str], tmp_path: Path, detached: bool, days: int
) -> None:
    folder = tmp_path / "w" / "certificates" / "issued"
    for _ in range(2):
        with LocalTestbed([1], tmp_path / "w", detached=detached):
            pass
        LocalTestbed.end(tmp_path / "w")
        certificate = pki.read_certificate((folder / "device-0-0" / "cert.pem").read_bytes())
        left = certificate.not_valid_after_utc - pki.utc_now()
        assert timedelta(days=days) - timedelta(minutes=5) < left <= timedelta(days=days)
        # The next start finds a certificate that has nearly expired.
        identity = pki.identity_of(certificate)
        assert identity is not None
        (folder / "device-0-0" / "cert.pem").unlink()
        LocalCertificates(folder.parent).issue({identity: ()}, timedelta(minutes=1))


def test_certificates_that_cannot_be_renewed_are_told_once_for_each_reason(
    behaviours: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapipe_client.local_testbed._RENEWAL_SECONDS", 0.01)
    told: list[str] = []
    tries, enough = iter(["full", "full", "full", "", "full", "locked"]), threading.Event()
    testbed = LocalTestbed([1], tmp_path / "w", progress=told.append)
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


def test_start_says_how_many_processes_serve(behaviours: dict[str, str], tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with LocalTestbed([2], tmp_path / "w", serving=lambda *numbers: told.append(numbers)):
        pass
    assert told[-1] == (5, 5) and told == sorted(told)


def test_second_start_keeps_the_addresses_in_the_certificates(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    try:
        LocalTestbed([1], tmp_path / "w", detached=True, listen="127.0.0.2:0").start()
        second = LocalTestbed([1], tmp_path / "w", detached=True)
        second.start()
        record = second._record.process("device-0-0")
        assert record is not None
        host = record.address.rpartition(":")[0]
        folder = tmp_path / "w" / "certificates" / "issued" / "device-0-0"
        certificate = pki.read_certificate((folder / "cert.pem").read_bytes())
        assert host == "127.0.0.2" and host in pki.hosts_of(certificate)
    finally:
        LocalTestbed.end(tmp_path / "w")


def test_testbed_of_a_version_without_certificates_is_not_continued(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path / "w")
    try:
        LocalTestbed([1], tmp_path / "w", detached=True).start()
        record = json.loads((workspace.root / "testbed.json").read_text())
        del record["insecure"]
        (workspace.root / "testbed.json").write_text(json.dumps(record))
        endpoint = find_endpoint(EndpointOptions(workspace=tmp_path / "w"))
        assert endpoint is not None and endpoint.security.is_insecure
        with pytest.raises(WrongStateError, match="speaks plain text.*collapipe down"):
            LocalTestbed([1], tmp_path / "w", detached=True).start()
    finally:
        LocalTestbed.end(tmp_path / "w")


def test_only_the_user_can_enter_a_workspace(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir(mode=0o755)
    Workspace(tmp_path / "w").create()
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o700
    if os.getuid() == 0:  # Only root can give a folder away.
        os.chown(tmp_path / "w", 12345, 12345)
        with pytest.raises(WrongStateError, match="belongs to somebody else"):
            Workspace(tmp_path / "w").create()


def test_passphrase_of_a_deployment_does_not_encrypt_the_authority_of_a_testbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = LocalCertificates(tmp_path)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "secret")
    certificates.issue({USER: ()}, timedelta(days=1))
    monkeypatch.delenv(PASSPHRASE_VARIABLE)
    certificates.issue({USER: ()}, timedelta(days=1))


def test_authority_of_an_older_version_is_made_anew_unless_its_processes_run(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "w" / "certificates"
    try:
        LocalTestbed([1], tmp_path / "w", detached=True).start()
        (folder / "ca-key.pem").write_text("the only key, as in older versions")
        before = (folder / "ca.pem").read_bytes()
        with pytest.raises(WrongStateError, match="older version .* `collapipe down` first"):
            LocalTestbed([1], tmp_path / "w", detached=True).start()
        LocalTestbed.end(tmp_path / "w")
        LocalTestbed([1], tmp_path / "w", detached=True).start()
        assert (folder / "ca.pem").read_bytes() != before
        assert not (folder / "ca-key.pem").exists()
    finally:
        LocalTestbed.end(tmp_path / "w")


def test_a_scheduler_on_an_address_of_a_network_has_hosts_with_that_address(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    with LocalTestbed([1], tmp_path / "w", listen="127.0.0.2:0") as testbed:
        lines = [Path(f"/proc/{p.pid}/cmdline").read_text().split("\0") for p in testbed.processes]
    assert {line[line.index("--listen") + 1] for line in lines} == {"127.0.0.2:0"}
    folder = tmp_path / "w" / "certificates" / "issued" / "device-0-0"
    certificate = pki.read_certificate((folder / "cert.pem").read_bytes())
    assert "127.0.0.2" in pki.hosts_of(certificate)
