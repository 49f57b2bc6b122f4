import json
import logging
from pathlib import Path

import pytest

from collapipe.emulation.emulation_file import Emulation, EmulationFile
from collapipe.emulation.network_profiles import NETWORK_PROFILES, LinkConditions, network_profile
from collapipe.errors import InvalidInputError


def test_most_specific_link_is_taken() -> None:
    rates = {"*": 1.0, "*>b": 2.0, "a>*": 3.0, "a>b": 4.0}
    emulation = Emulation.model_validate(
        {"links": {key: {"rate_bps": rate} for key, rate in rates.items()}}
    )
    found = [
        emulation.link(*ends).rate_bps for ends in (("a", "b"), ("a", "c"), ("c", "b"), ("c", "d"))
    ]
    assert found == [4.0, 3.0, 2.0, 1.0]
    assert Emulation().link("a", "b").rate_bps is None
    assert Emulation().radio("a", "b") is None


def test_only_the_first_of_two_matching_links_counts() -> None:
    links = {"*>b": {"rate_bps": 1e3, "delay_seconds": 1.0}, "a>*": {"rate_bps": 1e6}}
    emulation = Emulation.model_validate({"links": links})
    assert emulation.link("a", "b") == LinkConditions(rate_bps=1e6)


def test_delays_of_wire_and_radio_add_up() -> None:
    radio = {"gain": 1.0, "noise_watts_per_hertz": 1.0, "delay_seconds": 0.5}
    emulation = Emulation.model_validate(
        {"links": {"*": {"delay_seconds": 0.25}}, "radios": {"a>b": radio}}
    )
    assert (emulation.delay_seconds("a", "b"), emulation.delay_seconds("b", "a")) == (0.75, 0.25)


@pytest.mark.parametrize("name", NETWORK_PROFILES)
def test_link_takes_rate_and_delay_from_a_network_profile(name: str) -> None:
    links = {"a>*": {"profile": name}, "*>a": {"profile": name, "direction": "down"}}
    emulation = Emulation.model_validate({"links": links})
    assert emulation.link("a", "b") == network_profile(name).up
    assert emulation.link("b", "a") == network_profile(name).down
    assert emulation.delay_seconds("a", "b") == network_profile(name).up.delay_seconds


def test_value_replaces_the_same_value_of_a_network_profile() -> None:
    links = {"*": {"profile": "4g", "rate_bps": 5e6}}
    link = Emulation.model_validate({"links": links}).link("a", "b")
    assert (link.rate_bps, link.delay_seconds) == (5e6, network_profile("4g").up.delay_seconds)


def test_unknown_network_profile_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "emulation.json"
    path.write_text('{"links": {"a>*": {"profile": "5g"}}}')
    with pytest.raises(
        InvalidInputError, match=r"links\.a>\*.*no network profile '5g': use one of lan"
    ):
        EmulationFile(path).current()


def test_jitter_and_loss_are_warned_about_once_for_each_version_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "emulation.json"
    path.write_text('{"links": {"a>*": {"profile": "lte-lossy"}, "*": {"profile": "lan"}}}')
    file = EmulationFile(path)
    for _ in range(3):
        file.current()
    assert len(caplog.records) == 1
    assert "emulated link a>*: jitter and loss are not emulated" in caplog.text


def test_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "emulation.json"
    path.write_text('{"links": {"*": {"rate_bps": 8}}}')
    file = EmulationFile(path)
    assert file.current().link("a", "b").rate_bps == 8
    path.write_text(json.dumps({"links": {"*": {"rate_bps": 2000}}}))
    assert file.current().link("a", "b").rate_bps == 2000


@pytest.mark.parametrize("text", ["", "{", '{"links": {"*": {"rate_bps": -1}}}', '{"wires": {}}'])
def test_file_that_is_not_an_emulation_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "emulation.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=r"emulation.json cannot be used"):
        EmulationFile(path).current()
    with pytest.raises(InvalidInputError, match="cannot be used"):
        EmulationFile(tmp_path / "missing").current()


def test_file_that_becomes_unusable_leaves_the_emulation_unchanged_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "emulation.json"
    path.write_text('{"time_scale": 2}')
    file = EmulationFile(path)
    file.current()
    path.write_text('{"time_scale": ')
    with caplog.at_level(logging.WARNING):
        assert [file.current().time_scale for _ in range(3)] == [2, 2, 2]
        assert len(caplog.records) == 1
        path.unlink()
        assert file.current().time_scale == 2
    path.write_text('{"time_scale": 3}')
    assert file.current().time_scale == 3
