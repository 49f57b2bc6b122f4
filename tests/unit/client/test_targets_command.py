import json
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe.v1.scheduler_pb2 import HOST_ROLE_DEVICE_AGENT, Host, HostStatus
from collapipe_client.cli import app
from collapipe_client.targets_command import target_groups

from .conftest import FakeServices

NOW = 1_000_000.0
HOUR = timedelta(hours=1)


def device(name: str, *, silent_seconds: float = 0.0, metrics: str = "10.0.0.7:9100") -> HostStatus:
    host = Host(host_id=name, role=HOST_ROLE_DEVICE_AGENT, metrics_address=metrics)
    status = HostStatus(host=host, alive=silent_seconds < 10)
    status.last_seen.FromMilliseconds(int((NOW - silent_seconds) * 1000))
    return status


def services_of(groups: list[dict[str, dict[str, str]]]) -> list[str]:
    return [group["labels"]["service"] for group in groups]


def test_hosts_are_targets_with_their_id_and_role() -> None:
    groups = target_groups([device("raspi"), device("jetson", metrics="10.0.0.8:9100")], NOW, HOUR)
    assert groups == [
        {
            "targets": ["10.0.0.8:9100"],
            "labels": {"service": "jetson", "host_role": "device_agent"},
        },
        {"targets": ["10.0.0.7:9100"], "labels": {"service": "raspi", "host_role": "device_agent"}},
    ]


@pytest.mark.parametrize(
    ("silent_seconds", "listed"), [(5.0, True), (3000.0, True), (3700.0, False)]
)
def test_silent_host_is_kept_for_a_while_under_the_same_labels(
    silent_seconds: float, listed: bool
) -> None:
    groups = target_groups([device("raspi", silent_seconds=silent_seconds)], NOW, HOUR)
    assert groups == (target_groups([device("raspi")], NOW, HOUR) if listed else [])


def test_host_without_metrics_is_no_target() -> None:
    assert target_groups([device("raspi", metrics="")], NOW, HOUR) == []


def test_command_leaves_the_file_of_the_same_hosts_unchanged(
    fake: FakeServices, tmp_path: Path
) -> None:
    file = tmp_path / "hosts.json"
    fake.hosts = [HostStatus(host=device("raspi").host, alive=True)]
    command = ["targets", str(file), "--scheduler", fake.address, "--insecure"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert "1 hosts in" in first.output
    assert services_of(json.loads(file.read_text())) == ["raspi"]
    written = file.stat().st_mtime_ns
    assert CliRunner().invoke(app, command).output == ""
    assert file.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.json"]


def test_command_with_follow_adds_new_hosts_until_it_is_terminated(
    fake: FakeServices, tmp_path: Path
) -> None:
    file = tmp_path / "hosts.json"
    command = [sys.executable, "-m", "collapipe_client", "targets", str(file), "--follow"]
    options = ["--every", "0.1", "--scheduler", fake.address, "--insecure"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert json.loads(file.read_text()) == []  # the edge server serves no metrics
        fake.hosts = [HostStatus(host=device("raspi").host, alive=True)]
        process.stdout.readline()
        assert services_of(json.loads(file.read_text())) == ["raspi"]
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    assert process.wait() == 0


def test_missing_folder_is_reported(fake: FakeServices, tmp_path: Path) -> None:
    file = tmp_path / "missing" / "hosts.json"
    options = ["--scheduler", fake.address, "--insecure"]
    result = CliRunner().invoke(app, ["targets", str(file), *options])
    assert result.exit_code == 2
    assert "cannot write" in result.output


def test_missing_scheduler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["targets", "hosts.json"])
    assert result.exit_code == 2
    assert "--scheduler HOST:PORT" in result.output
