import json
from datetime import timedelta
from pathlib import Path

import pytest

from collapipe.v1.scheduler_pb2 import HOST_ROLE_DEVICE_AGENT, Host, HostStatus
from collapipe_client.targets_command import target_groups

from .commands import run
from .fake_services import FakeServices

NOW = 1_000_000.0
HOUR = timedelta(hours=1)


def device(name: str, *, silent_seconds: float = 0.0, metrics: str = "10.0.0.7:9100") -> HostStatus:
    host = Host(host_id=name, role=HOST_ROLE_DEVICE_AGENT, metrics_address=metrics)
    status = HostStatus(host=host, alive=silent_seconds < 10)
    status.last_seen.FromMilliseconds(int((NOW - silent_seconds) * 1000))
    return status


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
    command = ["targets", file, *fake.options]
    assert "1 hosts" in run(*command).output
    [group] = json.loads(file.read_text())
    assert group["labels"]["service"] == "raspi"
    written = file.stat().st_mtime_ns
    assert run(*command).output == ""
    assert file.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.json"]


def test_missing_folder_is_reported(fake: FakeServices, tmp_path: Path) -> None:
    file = tmp_path / "missing" / "hosts.json"
    assert str(file) in run("targets", file, *fake.options, code=2).output
