import logging
from pathlib import Path

import pytest

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.wifi_radio import WifiRadioDriver

LINK = """Connected to 02:00:00:00:01:00 (on wlan0)
	SSID: field
	freq: 5180
	signal: -50 dBm
	rx bitrate: 433.3 MBit/s VHT-MCS 9 80MHz short GI VHT-NSS 1
	tx bitrate: 200.0 MBit/s VHT-MCS 4 80MHz VHT-NSS 1
"""
INFO = """Interface wlan0
	type managed
	channel 36 (5180 MHz), width: 80 MHz, center1: 5210 MHz
	txpower 20.00 dBm
"""
SURVEY = """Survey data from wlan0
	frequency:			5160 MHz
	noise:				-60 dBm
Survey data from wlan0
	frequency:			5180 MHz [in use]
	noise:				-91 dBm
"""


@pytest.fixture
def iw(tmp_path: Path) -> Path:
    """A program in place of iw. It prints the files beside it, and writes its arguments to the file calls."""
    for name, text in (("link", LINK), ("info", INFO), ("survey", SURVEY), ("set", "")):
        (tmp_path / name).write_text(text)
    program = tmp_path / "iw"
    program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\nexec cat {tmp_path}/"$3"\n')
    program.chmod(0o755)
    return program


def settings(iw: Path) -> list[str]:
    """The calls of iw that set a power."""
    calls = (iw.parent / "calls").read_text().splitlines()
    return [call for call in calls if " set " in call]


def test_state_is_what_iw_reports(iw: Path) -> None:
    state = WifiRadioDriver("wlan0", [str(iw)]).transmit("a", "b", 20e6, 0.0)
    assert state is not None
    assert state.gain == pytest.approx(1e-7)  # -50 dBm received, 20 dBm sent
    assert state.noise_watts_per_hertz == pytest.approx(10**-9.1 / 1000 / 80e6)
    assert state.power_watts == pytest.approx(0.1)
    assert state.rate_bps == pytest.approx(200e6 * 20 / 80)
    assert settings(iw) == []


def test_power_is_set_once_for_each_value(iw: Path) -> None:
    radio = WifiRadioDriver("wlan0", [str(iw)])
    for power in (0.1, 0.1, 0.05, 0.0):
        radio.transmit("a", "b", 0.0, power)
    assert settings(iw) == [
        "dev wlan0 set txpower fixed 2000",
        "dev wlan0 set txpower fixed 1699",
    ]


def test_rate_without_a_share_is_not_limited(iw: Path) -> None:
    state = WifiRadioDriver("wlan0", [str(iw)]).transmit("a", "b", 0.0, 0.0)
    assert state is not None and state.rate_bps == 0.0


def test_noise_that_iw_does_not_report_is_thermal(iw: Path) -> None:
    (iw.parent / "survey").unlink()
    state = WifiRadioDriver("wlan0", [str(iw)]).transmit("a", "b", 0.0, 0.0)
    assert state is not None and state.noise_watts_per_hertz == 4.0e-21


def test_radio_that_is_not_connected_has_no_state(iw: Path) -> None:
    (iw.parent / "link").write_text("Not connected.\n")
    assert WifiRadioDriver("wlan0", [str(iw)]).transmit("a", "b", 1e6, 0.0) is None


def test_power_that_iw_refuses_is_logged_once_and_harmless(
    iw: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (iw.parent / "set").unlink()
    radio = WifiRadioDriver("wlan0", [str(iw)])
    with caplog.at_level(logging.WARNING):
        states = [radio.transmit("a", "b", 1e6, power) for power in (0.05, 0.02)]
    assert all(state is not None and state.power_watts == pytest.approx(0.1) for state in states)
    assert len(caplog.records) == 1
    assert "txpower fixed 1699` failed" in caplog.text


def test_missing_program_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"no-iw dev wlan0 info` did not run .*--radio none"
    ):
        WifiRadioDriver("wlan0", [str(tmp_path / "no-iw")])


def test_interface_that_iw_does_not_know_is_refused(iw: Path) -> None:
    (iw.parent / "info").unlink()
    with pytest.raises(InvalidInputError, match=r"info` failed \(cat: .*Wi-Fi interface"):
        WifiRadioDriver("eth7", [str(iw)])
