import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collapipe.emulation.emulation_file import EmulatedDevice, Emulation, EmulationFile
from collapipe.emulation.network_profiles import NETWORK_PROFILES
from collapipe.traffic_shaping.shaper_process.links_file import LinksFile
from collapipe.traffic_shaping.shaper_process.status import AppliedLink, ShaperStatus
from collapipe_client import shaping_files
from collapipe_client.processes import ProcessRecord, start_seconds
from collapipe_client.workspace import Workspace, WorkspaceRecord

from .commands import run

INITIAL = Path(__file__).parents[3] / "deploy/netem/state/initial.json"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    shutil.copy(INITIAL, tmp_path)
    return tmp_path / "links.json"


def invoke(*arguments: str, code: int = 0) -> str:
    return run("testbed", *arguments, code=code).output


def shape(state: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    return json.loads(invoke("shape", *arguments, f"--state={state}", "--json", code=code))


def test_host_is_shaped_in_both_directions_and_other_links_stay(state: Path) -> None:
    before = LinksFile.read(state)
    shape(state, "device-1-0", "4g", "--loss", "2%")
    after = LinksFile.read(state)
    assert after.hosts == before.hosts
    changed = {key for key in after.links if after.links[key] != before.links.get(key)}
    assert changed == {"device-1-0>*", "*>device-1-0"}
    assert after.links["*>device-1-0"].direction == "down"
    assert after.links["device-1-0>*"].conditions_at(0).loss_ratio == 0.02


def test_one_link_is_shaped_in_its_direction_and_with_both_in_the_opposite_one_too(
    state: Path,
) -> None:
    arguments = ("device-0-0>device-0-1", "none", "--rate", "10mbit", "--delay", "20ms")
    shape(state, *arguments)
    links = LinksFile.read(state).links
    assert links["device-0-0>device-0-1"].conditions_at(0).delay_seconds == 0.02
    assert "device-0-1>device-0-0" not in links
    shape(state, *arguments, "--both")
    assert LinksFile.read(state).links["device-0-1>device-0-0"].rate_bps == 1e7


def test_unshape_removes_one_link_or_all_and_keeps_the_hosts(state: Path) -> None:
    invoke("unshape", "device-1-0", f"--state={state}")
    assert "device-1-0>*" not in LinksFile.read(state).links
    invoke("unshape", "--all", f"--state={state}")
    assert LinksFile.read(state).links == {}
    assert len(LinksFile.read(state).hosts) == 10


def test_trace_from_a_file_is_copied_into_links_json(state: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    file.write_text("at_seconds,rate_bps\n0,1e6\n5,2e6\n")
    shape(state, "device-0-0>*", "--trace", str(file))
    file.unlink()
    link = LinksFile.read(state).links["device-0-0>*"]
    assert link.conditions_at(link.started_at + 6).rate_bps == 2e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("device-9-9", "4g"), "device-9-9"),
        (("device-0-0", "5g"), "'5g'"),
        (("device-0-0>", "4g"), "sender>receiver"),
        (("device-0-0",), "device-0-0"),
        ((), "profile"),
        (("device-0-0", "4g", "--rate", "fast"), "'fast'"),
        (("device-0-0", "none", "--jitter", "5ms"), "0.005 s"),
        (("device-0-0", "4g", "--trace", "walk-away"), "profile"),
        (("device-0-0", "--trace", "nowhere"), "'nowhere'"),
    ],
)
def test_mistake_is_refused_with_its_description_and_changes_nothing(
    state: Path, arguments: tuple[str, ...], message: str
) -> None:
    output = shape(state, *arguments, code=2)
    assert message in output["message"]
    assert not state.exists()


def running_shaper(state: Path) -> tuple[ShaperStatus, Path]:
    """Returns the status that a shaper process has told, and its file."""
    status = ShaperStatus(
        host="device-0-0", interface="eth0", running=True, digest="old", in_force=True, at=0
    )
    file = state.parent / "applied" / "device-0-0.json"
    file.parent.mkdir()
    file.write_text(status.model_dump_json())
    return status, file


def test_command_waits_for_the_running_shaper_processes_and_reports_their_links(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, file = running_shaper(state)

    def answer(seconds: float) -> None:
        """Answers while the command waits."""
        link = AppliedLink(keys=["device-0-0>device-0-1"], addresses=["10.0.0.2"], rate_bps=1e7)
        update = {
            "digest": LinksFile.read(state).digest,
            "links": {"device-0-1": link, "device-0-2": link},
            "problems": ["no netem here"],
        }
        file.write_text(status.model_copy(update=update).model_dump_json())

    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=answer)
    monkeypatch.setattr(shaping_files, "time", clock)
    output = shape(state, "device-0-0>device-0-1", "none", "--rate", "10mbit")
    assert set(output["applied"]["device-0-0"]) == {"device-0-1"}
    assert output["problems"] == {"device-0-0": ["no netem here"]}
    assert not output["not_confirmed"]


def test_sender_that_does_not_confirm_is_named_and_fails_the_command(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running_shaper(state)
    naps: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(naps), sleep=naps.append)
    monkeypatch.setattr(shaping_files, "time", clock)
    output = shape(state, "device-0-0>*", "4g", "--wait", "20", code=1)
    assert 20 <= sum(naps) < 21
    assert output["not_confirmed"] == ["device-0-0"]
    assert LinksFile.read(state).links["device-0-0>*"].profile == "4g"


@pytest.fixture
def local_testbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """The workspace of a running testbed whose only process is this one."""
    monkeypatch.chdir(tmp_path)
    workspace = Workspace(tmp_path / ".collapipe")
    workspace.create()
    me = ProcessRecord("device-0-0", os.getpid(), start_seconds(os.getpid()))
    workspace.write_record(WorkspaceRecord(True, [[(0, 0.0)]], (me,)))
    return workspace


def test_local_testbed_takes_rate_and_delay_and_reports_what_it_does_not_emulate(
    local_testbed: Workspace,
) -> None:
    devices = {"device-0-0": EmulatedDevice(profile="laptop")}
    local_testbed.emulation_file.write_text(Emulation(devices=devices).model_dump_json())
    output = json.loads(invoke("shape", "device-0-0", "lte-lossy", "--json"))
    assert "jitter and loss" in output["problems"][""][0]
    emulation = EmulationFile(local_testbed.emulation_file).current()
    assert emulation.devices == devices
    assert emulation.links["device-0-0>*"].profile == "lte-lossy"
    assert emulation.link("device-0-0", "edge-server").rate_bps == 2.4e6
    assert emulation.link("edge-server", "device-0-0").rate_bps == 13.9e6
    assert emulation.link("edge-server", "device-0-0").delay_seconds == 0.035
    assert "lte-lossy (down)" in invoke("shape", "--list")
    invoke("unshape", "--all")
    assert EmulationFile(local_testbed.emulation_file).current().links == {}


def test_local_testbed_refuses_traces_and_hosts_without_an_emulation(
    local_testbed: Workspace,
) -> None:
    local_testbed.emulation_file.write_text("{}")
    output = json.loads(invoke("shape", "*", "--trace", "walk-away", "--json", code=2))
    assert "traces" in output["message"]
    assert local_testbed.emulation_file.read_text() == "{}"
    local_testbed.emulation_file.unlink()
    output = json.loads(invoke("shape", "device-0-0", "4g", "--json", code=2))
    assert "--emulation FILE" in output["message"]


def test_help_and_list_show_profiles_traces_and_links(state: Path) -> None:
    helped = " ".join(invoke("shape", "--help").split())
    assert [name for name in NETWORK_PROFILES if name not in helped] == []
    printed = invoke("shape", "--list", f"--state={state}")
    for name in ("wifi-congested", "walk-away", "4g (up)", "device-1-3>*"):
        assert name in printed
    assert json.loads(invoke("shape", "--list", f"--state={state}", "--json"))["links"]
