import pytest

from collapipe.emulation.network_profiles import NETWORK_PROFILES, network_profile
from collapipe.errors import InvalidInputError


@pytest.mark.parametrize("name", NETWORK_PROFILES)
def test_every_profile_has_a_description_sources_and_rates(name: str) -> None:
    profile = network_profile(name)
    assert len(profile.source) > 60 and profile.description
    assert profile.up.rate_bps and profile.down.rate_bps


@pytest.mark.parametrize("name", ["lan", "wifi", "wifi-congested", "4g", "lte-lossy", "satellite"])
def test_profile_that_the_documentation_names_exists(name: str) -> None:
    assert name in NETWORK_PROFILES


def test_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"no network profile '5g': use one of lan, wifi"):
        network_profile("5g")
