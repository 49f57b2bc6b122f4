import logging
from pathlib import Path

import pytest

from collapipe.emulation.emulation_file import Emulation, EmulationFile
from collapipe.emulation.network_profiles import NETWORK_PROFILES, LinkConditions, network_profile
from collapipe.errors import InvalidInputError


def with_links(links: dict[str, dict[str, object]]) -> Emulation:
    return Emulation.model_validate({"links": links})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "emulation.json"


def test_most_specific_link_is_taken() -> None:
    rates = {"*": 1.0, "*>b": 2.0, "a>*": 3.0, "a>b": 4.0}
    emulation = with_links({key: {"rate_bps": rate} for key, rate in rates.items()})
    ends = (("a", "b"), ("a", "c"), ("c", "b"), ("c", "d"))
    assert [emulation.link(*pair).rate_bps for pair in ends] == [4.0, 3.0, 2.0, 1.0]
    assert Emulation().link("a", "b").rate_bps is None
    assert Emulation().radio("a", "b") is None


def test_only_the_first_of_two_matching_links_counts() -> None:
    links = {"*>b": {"rate_bps": 1e3, "delay_seconds": 1.0}, "a>*": {"rate_bps": 1e6}}
    assert with_links(links).link("a", "b") == LinkConditions(rate_bps=1e6)


def test_delays_of_wire_and_radio_add_up() -> None:
    radio = {"gain": 1.0, "noise_watts_per_hertz": 1.0, "delay_seconds": 0.5}
    emulation = Emulation.model_validate(
        {"links": {"*": {"delay_seconds": 0.25}}, "radios": {"a>b": radio}}
    )
    assert (emulation.delay_seconds("a", "b"), emulation.delay_seconds("b", "a")) == (0.75, 0.25)


@pytest.mark.parametrize("name", NETWORK_PROFILES)
def test_link_takes_rate_and_delay_from_a_network_profile(name: str) -> None:
    profile = network_profile(name)
    emulation = with_links(
        {"a>*": {"profile": name}, "*>a": {"profile": name, "direction": "down"}}
    )
    assert emulation.link("a", "b") == profile.up
    assert emulation.link("b", "a") == profile.down
    assert emulation.delay_seconds("a", "b") == profile.up.delay_seconds
    # A value that is given replaces that of the profile.
    link = with_links({"*": {"profile": name, "rate_bps": 5.0}}).link("a", "b")
    assert (link.rate_bps, link.delay_seconds) == (5.0, profile.up.delay_seconds)


def test_jitter_and_loss_are_warned_about_once_for_each_version_of_the_file(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text('{"links": {"a>*": {"profile": "lte-lossy"}, "*": {"profile": "lan"}}}')
    file = EmulationFile(path)
    for _ in range(3):
        file.current()
    assert len(caplog.records) == 1
    assert "a>*" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "emulation.json"),
        ("{", "emulation.json"),
        ('{"links": {"*": {"rate_bps": -1}}}', r"emulation.json.*rate_bps"),
        ('{"links": {"a>*": {"profile": "5g"}}}', r"links\.a>\*.*'5g'.* lan"),
        ('{"wires": {}}', "emulation.json.*wires"),
        (None, "emulation.json"),
    ],
)
def test_file_that_is_not_an_emulation_is_refused(
    path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        EmulationFile(path).current()


def test_file_is_read_again_when_it_changes_and_kept_while_it_is_unusable(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text('{"time_scale": 2}')
    file = EmulationFile(path)
    assert file.current().time_scale == 2
    path.write_text('{"time_scale": ')
    with caplog.at_level(logging.WARNING):
        assert [file.current().time_scale for _ in range(3)] == [2, 2, 2]
        assert len(caplog.records) == 1
        path.unlink()
        assert file.current().time_scale == 2
    path.write_text('{"time_scale": 3}')
    assert file.current().time_scale == 3
