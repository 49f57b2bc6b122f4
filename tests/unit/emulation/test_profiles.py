import pytest
from pydantic import ValidationError

from collapipe.emulation.device_profiles import DEVICE_PROFILES, device_profile
from collapipe.emulation.emulation_file import EmulatedDevice
from collapipe.emulation.network_profiles import NETWORK_PROFILES, network_profile
from collapipe.errors import InvalidInputError

FASTER = ["raspberry-pi-4", "raspberry-pi-5", "laptop", "jetson-orin-nano"]


def test_every_device_profile_has_positive_figures() -> None:
    assert set(DEVICE_PROFILES) >= set(FASTER)
    for name, profile in DEVICE_PROFILES.items():
        assert device_profile(name) is profile
        assert device_profile(profile.short_name) is profile
        assert all(value > 0 for value in profile.model_dump(exclude={"short_name"}).values())


def test_device_profiles_keep_the_order_of_published_benchmarks() -> None:
    rates = [DEVICE_PROFILES[name].flops_per_second for name in FASTER]
    assert rates == sorted(rates)
    assert rates[1] / rates[0] == pytest.approx(30.249 / 11.889, rel=0.05)  # HPL


def test_busy_board_has_the_power_that_was_measured_at_the_wall() -> None:
    for name, watts in (("raspberry-pi-4", 7.2), ("raspberry-pi-5", 11.0)):
        profile = DEVICE_PROFILES[name]
        assert profile.busy_watts + profile.idle_watts == pytest.approx(watts)


def test_every_network_profile_has_a_description_sources_and_rates() -> None:
    # The documentation names these.
    names = {"lan", "wifi", "wifi-congested", "4g", "lte-lossy", "satellite"}
    assert set(NETWORK_PROFILES) >= names
    for profile in map(network_profile, NETWORK_PROFILES):
        assert len(profile.source) > 60 and profile.description
        assert profile.up.rate_bps and profile.down.rate_bps


def test_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"'pi-9'.*raspberry-pi-4"):
        device_profile("pi-9")
    with pytest.raises(ValidationError, match=r"'pi-9'.*raspberry-pi-4"):
        EmulatedDevice(profile="pi-9")
    with pytest.raises(InvalidInputError, match=r"'5g'.*lan, wifi"):
        network_profile("5g")
