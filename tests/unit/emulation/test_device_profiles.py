import pytest
from pydantic import ValidationError

from collapipe.emulation.device_profiles import DEVICE_PROFILES, device_profile
from collapipe.emulation.emulation_file import EmulatedDevice
from collapipe.errors import InvalidInputError

FASTER = ["raspberry-pi-4", "raspberry-pi-5", "laptop", "jetson-orin-nano"]


def test_every_profile_has_positive_figures() -> None:
    assert set(DEVICE_PROFILES) >= set(FASTER)
    for name, profile in DEVICE_PROFILES.items():
        assert device_profile(name) is profile
        assert device_profile(profile.short_name) is profile
        assert all(value > 0 for value in profile.model_dump(exclude={"short_name"}).values())


def test_profiles_keep_the_order_of_published_benchmarks() -> None:
    rates = [DEVICE_PROFILES[name].flops_per_second for name in FASTER]
    assert rates == sorted(rates)
    assert rates[1] / rates[0] == pytest.approx(30.249 / 11.889, rel=0.05)  # HPL


def test_busy_board_has_the_power_that_was_measured_at_the_wall() -> None:
    for name, watts in (("raspberry-pi-4", 7.2), ("raspberry-pi-5", 11.0)):
        profile = DEVICE_PROFILES[name]
        assert profile.busy_watts + profile.idle_watts == pytest.approx(watts)


def test_unknown_profile_is_refused_with_the_known_ones() -> None:
    message = "no device profile 'raspberry-pi-9': use one of raspberry-pi-4, raspberry-pi-5"
    with pytest.raises(InvalidInputError, match=message):
        device_profile("raspberry-pi-9")
    with pytest.raises(ValidationError, match=message):
        EmulatedDevice(profile="raspberry-pi-9")
