"""What the settings of a host decide: what it registers, its shaper and radio, and where jobs may read files."""

import logging
from pathlib import Path
from typing import Any

import pytest

from collapipe.control_unit.app import ControlUnitSettings
from collapipe.emulation.device_profiles import DEVICE_PROFILES, DeviceProfile
from collapipe.emulation.emulation_file import EmulationFile
from collapipe.errors import InvalidInputError
from collapipe.rpc import Security
from collapipe.stage_host.host import (
    StageHostSettings,
    choose_radio,
    choose_shaper,
    data_root,
    describe_resources,
    make_data_root,
)
from collapipe.traffic_shaping.pacing import PacedShaper
from collapipe.traffic_shaping.radio_driver import EmulatedRadioDriver
from collapipe.v1.scheduler_pb2 import Host

PI = DEVICE_PROFILES["raspberry-pi-5"]


def settings_of(**values: Any) -> StageHostSettings:
    return StageHostSettings(_cli_parse_args=False, scheduler="127.0.0.1:1", **values)


@pytest.mark.parametrize("given", [None, Path("/srv/texts")])
@pytest.mark.parametrize("insecure", [True, False], ids=["plain text", "mutual TLS"])
def test_secured_host_reads_only_in_its_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, insecure: bool, given: Path | None
) -> None:
    files = [tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")]
    security = Security.insecure() if insecure else Security(*files)
    monkeypatch.setattr(ControlUnitSettings, "security", security)
    settings = ControlUnitSettings(
        _cli_parse_args=False, scheduler="127.0.0.1:1", state_dir=tmp_path, data_root=given
    )
    default = None if insecure else tmp_path / "data"
    assert data_root(settings) == (given or default)
    make_data_root(settings)
    assert (tmp_path / "data").is_dir() == (not insecure and given is None)


# --- what a host registers


def registered(emulated: DeviceProfile | None = None, **settings: Any) -> Host:
    host = Host()
    describe_resources(host, settings_of(**settings), emulated)
    return host


def test_host_registers_its_settings() -> None:
    resources = {
        "memory_bytes": 5,
        "speed": 2.5,
        "energy_budget_joules": 40.0,
        "busy_watts": 3.0,
        "idle_watts": 2.7,
        "max_transmit_watts": 0.5,
    }
    assert registered(**resources) == Host(**resources)  # type: ignore[arg-type]
    assert registered() == Host(max_transmit_watts=0.1)


def test_emulated_device_registers_its_profile_unless_settings_override_it() -> None:
    # A budget is for training only, unless the operator says otherwise.
    of_profile = Host(
        memory_bytes=PI.memory_bytes, busy_watts=PI.busy_watts, max_transmit_watts=0.1
    )
    assert registered(PI) == of_profile
    host = registered(PI, memory_bytes=7, busy_watts=1.5)
    assert (host.memory_bytes, host.busy_watts) == (7, 1.5)
    assert registered(PI, memory_bytes=0).memory_bytes == 0  # 0 means no limit.


# --- its shaper and its radio


@pytest.mark.parametrize("option", [{"shaper": "tc"}, {"radio": "iw"}], ids=str)
def test_missing_interface_is_refused(option: dict[str, str]) -> None:
    settings = settings_of(**option)
    with pytest.raises(InvalidInputError, match="(tc|iw) .*--interface"):
        choose_shaper(settings)
        choose_radio(settings, EmulationFile(None))


def test_refusal_of_the_kernel_falls_back_to_pacing_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        shaper = choose_shaper(settings_of(shaper="tc", interface="no-such0"))
    assert isinstance(shaper, PacedShaper)
    assert "paced" in caplog.text


def test_radio_is_emulated_by_default() -> None:
    nothing = EmulationFile(None)
    assert isinstance(choose_radio(settings_of(), nothing), EmulatedRadioDriver)
    assert choose_radio(settings_of(radio="none"), nothing) is None
