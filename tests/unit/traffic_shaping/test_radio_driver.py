import itertools
import json
import math
from pathlib import Path

import pytest

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.radio_rate import radio_rate_bps
from collapipe.traffic_shaping.radio_driver import (
    NOMINAL_BANDWIDTH_HZ,
    NOMINAL_POWER_WATTS,
    EmulatedRadioDriver,
)

CHANNEL = {"gain": 1e-9, "noise_watts_per_hertz": 4e-21}


def make_emulation(path: Path, **radios: object) -> EmulationFile:
    file = path / "emulation.json"
    file.write_text(json.dumps({"radios": {"a>b": CHANNEL, **radios}}))
    return EmulationFile(file)


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


def test_emulated_radio_has_the_rate_of_its_power_and_bandwidth(tmp_path: Path) -> None:
    state = EmulatedRadioDriver(make_emulation(tmp_path)).transmit("a", "b", 1e6, 0.05)
    assert state is not None
    assert (state.gain, state.noise_watts_per_hertz, state.power_watts) == (1e-9, 4e-21, 0.05)
    assert state.rate_bps == radio_rate_bps(1e6, 0.05, 1e-9, 4e-21)


def test_emulated_radio_remembers_the_power_of_each_link(tmp_path: Path) -> None:
    radio = EmulatedRadioDriver(make_emulation(tmp_path, **{"a>c": CHANNEL}))
    powers = [
        state.power_watts
        for receiver, power in [("b", 0.0), ("b", 0.02), ("c", 0.0), ("b", 0.0)]
        if (state := radio.transmit("a", receiver, 1e6, power))
    ]
    assert powers == [NOMINAL_POWER_WATTS, 0.02, NOMINAL_POWER_WATTS, 0.02]


def test_emulated_radio_without_a_share_uses_a_whole_channel(tmp_path: Path) -> None:
    state = EmulatedRadioDriver(make_emulation(tmp_path)).transmit("a", "b", 0.0, 0.1)
    assert state is not None
    assert state.rate_bps == radio_rate_bps(NOMINAL_BANDWIDTH_HZ, 0.1, 1e-9, 4e-21)


def test_emulated_radio_follows_a_channel_that_fades(tmp_path: Path) -> None:
    emulation = make_emulation(tmp_path)
    radio = EmulatedRadioDriver(emulation)
    before = radio.transmit("a", "b", 1e6, 0.1)
    make_emulation(tmp_path, **{"a>b": {**CHANNEL, "gain": 1e-12}})
    after = radio.transmit("a", "b", 1e6, 0.1)
    assert before is not None and after is not None
    assert after.gain == 1e-12
    assert after.rate_bps < before.rate_bps


def test_links_without_a_radio_have_no_state(tmp_path: Path) -> None:
    assert EmulatedRadioDriver(make_emulation(tmp_path)).transmit("b", "a", 1e6, 0.1) is None
    assert EmulatedRadioDriver(EmulationFile(None)).transmit("a", "b", 1e6, 0.1) is None
