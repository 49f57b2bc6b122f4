import itertools
import math
from typing import Any

import pytest
from emulated_links import ChangingEmulation

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.radio_rate import radio_rate_bps
from collapipe.traffic_shaping.radio_driver import (
    NOMINAL_BANDWIDTH_HZ,
    NOMINAL_POWER_WATTS,
    EmulatedRadioDriver,
    RadioState,
)

CHANNEL = {"gain": 1e-9, "noise_watts_per_hertz": 4e-21}


@pytest.fixture
def radio(emulation: ChangingEmulation) -> EmulatedRadioDriver:
    emulation.set(radios={"a>b": CHANNEL, "a>c": CHANNEL})
    return EmulatedRadioDriver(emulation.file)


def state(radio: EmulatedRadioDriver, *link: Any) -> RadioState:
    state = radio.transmit(*link)
    assert state is not None
    return state


def test_rate_is_the_capacity_of_shannon() -> None:
    # the signal is 3 times the noise, which gives 2 bit/s per Hz
    assert radio_rate_bps(1e6, 3 * 1e6 * 4e-21 / 1e-9, 1e-9, 4e-21) == pytest.approx(2e6)


def test_rate_grows_with_bandwidth_towards_the_power_limit() -> None:
    rates = [radio_rate_bps(10.0**exponent, 1e-6, 1e-9, 4e-21) for exponent in range(3, 15)]
    assert all(less < more for less, more in itertools.pairwise(rates))
    assert rates[-1] == pytest.approx(1e-6 * 1e-9 / 4e-21 / math.log(2), rel=0.01)


def test_rate_without_bandwidth_or_power_is_zero() -> None:
    assert radio_rate_bps(0.0, 1.0, 1e-9, 4e-21) == 0.0
    assert radio_rate_bps(1e6, 0.0, 1e-9, 4e-21) == 0.0
    assert radio_rate_bps(1e6, 1e-18, 1e-18, 4e-21) > 0.0


@pytest.mark.parametrize(("share_hz", "used_hz"), [(1e6, 1e6), (0.0, NOMINAL_BANDWIDTH_HZ)])
def test_emulated_radio_has_the_rate_of_its_power_and_bandwidth(
    radio: EmulatedRadioDriver, share_hz: float, used_hz: float
) -> None:
    rate = radio_rate_bps(used_hz, 0.05, 1e-9, 4e-21)
    assert state(radio, "a", "b", share_hz, 0.05) == RadioState(1e-9, 4e-21, 0.05, rate)


def test_emulated_radio_remembers_the_power_of_each_link(radio: EmulatedRadioDriver) -> None:
    used = [("b", 0.0), ("b", 0.02), ("c", 0.0), ("b", 0.0)]
    powers = [state(radio, "a", receiver, 1e6, power).power_watts for receiver, power in used]
    assert powers == [NOMINAL_POWER_WATTS, 0.02, NOMINAL_POWER_WATTS, 0.02]


def test_emulated_radio_follows_a_channel_that_fades(
    emulation: ChangingEmulation, radio: EmulatedRadioDriver
) -> None:
    before = state(radio, "a", "b", 1e6, 0.1)
    emulation.set(radios={"a>b": {**CHANNEL, "gain": 1e-12}})
    after = state(radio, "a", "b", 1e6, 0.1)
    assert after.gain == 1e-12
    assert after.rate_bps < before.rate_bps


def test_links_without_a_radio_have_no_state(radio: EmulatedRadioDriver) -> None:
    assert radio.transmit("b", "a", 1e6, 0.1) is None
    assert EmulatedRadioDriver(EmulationFile(None)).transmit("a", "b", 1e6, 0.1) is None
