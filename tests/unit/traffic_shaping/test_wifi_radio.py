import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping import wifi_radio
from collapipe.traffic_shaping.radio_driver import RadioState
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


@dataclass
class Iw:
    """Answers in place of the program iw. Without an answer, a call fails."""

    answers: dict[str, str] = field(
        default_factory=lambda: {"link": LINK, "info": INFO, "survey": SURVEY, "set": ""}
    )
    powers: list[str] = field(default_factory=list)
    """The arguments of the calls that set a power."""

    def __call__(self, line: Sequence[str], remedy: str) -> str:
        assert line[:3] == ["iw", "dev", "wlan0"]
        if line[3] == "set":
            self.powers.append(" ".join(line[4:]))
        if line[3] not in self.answers:
            raise InvalidInputError(f"{line} failed")
        return self.answers[line[3]]


@pytest.fixture
def iw(monkeypatch: pytest.MonkeyPatch) -> Iw:
    iw = Iw()
    monkeypatch.setattr(wifi_radio, "run_command", iw)
    return iw


def transmit(bandwidth_hz: float = 0.0) -> RadioState:
    state = WifiRadioDriver("wlan0").transmit("a", "b", bandwidth_hz, 0.0)
    assert state is not None
    return state


def test_state_is_what_iw_reports(iw: Iw) -> None:
    state = transmit(20e6)
    assert state.gain == pytest.approx(1e-7)  # -50 dBm received, 20 dBm sent
    assert state.noise_watts_per_hertz == pytest.approx(10**-9.1 / 1000 / 80e6)
    assert state.power_watts == pytest.approx(0.1)
    assert state.rate_bps == pytest.approx(200e6 * 20 / 80)
    assert iw.powers == []


def test_power_is_set_once_for_each_value(iw: Iw) -> None:
    radio = WifiRadioDriver("wlan0")
    for power in (0.1, 0.1, 0.05, 0.0):
        radio.transmit("a", "b", 0.0, power)
    assert iw.powers == ["txpower fixed 2000", "txpower fixed 1699"]


def test_radio_without_a_share_or_a_measured_noise_has_no_rate_and_thermal_noise(iw: Iw) -> None:
    del iw.answers["survey"]
    state = transmit()
    assert (state.rate_bps, state.noise_watts_per_hertz) == (0.0, 4.0e-21)


def test_radio_that_is_not_connected_has_no_state(iw: Iw) -> None:
    iw.answers["link"] = "Not connected.\n"
    assert WifiRadioDriver("wlan0").transmit("a", "b", 1e6, 0.0) is None


def test_power_that_iw_refuses_is_logged_once_and_harmless(
    iw: Iw, caplog: pytest.LogCaptureFixture
) -> None:
    del iw.answers["set"]
    radio = WifiRadioDriver("wlan0")
    with caplog.at_level(logging.WARNING):
        states = [radio.transmit("a", "b", 1e6, power) for power in (0.05, 0.02)]
    assert all(state is not None and state.power_watts == pytest.approx(0.1) for state in states)
    assert len(caplog.records) == 1
    assert iw.powers == ["txpower fixed 1699"]


def test_interface_that_iw_does_not_know_is_refused(iw: Iw) -> None:
    del iw.answers["info"]
    with pytest.raises(InvalidInputError):
        WifiRadioDriver("wlan0")
