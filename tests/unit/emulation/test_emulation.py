import json
import logging
from pathlib import Path

import pytest

from collapipe.emulation.world import Emulation, EmulationFile
from collapipe.errors import InvalidInputError


def test_most_specific_link_is_taken() -> None:
    rates = {"*": 1.0, "*>b": 2.0, "a>*": 3.0, "a>b": 4.0}
    world = Emulation.model_validate(
        {"links": {key: {"rate_bps": rate} for key, rate in rates.items()}}
    )
    found = [
        world.link(*ends).rate_bps for ends in (("a", "b"), ("a", "c"), ("c", "b"), ("c", "d"))
    ]
    assert found == [4.0, 3.0, 2.0, 1.0]
    assert Emulation().link("a", "b").rate_bps is None
    assert Emulation().radio("a", "b") is None


def test_delays_of_wire_and_radio_add_up() -> None:
    radio = {"gain": 1.0, "noise_watts_per_hertz": 1.0, "delay_seconds": 0.5}
    world = Emulation.model_validate(
        {"links": {"*": {"delay_seconds": 0.25}}, "radios": {"a>b": radio}}
    )
    assert (world.delay_seconds("a", "b"), world.delay_seconds("b", "a")) == (0.75, 0.25)


def test_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "world.json"
    path.write_text('{"links": {"*": {"rate_bps": 8}}}')
    file = EmulationFile(path)
    assert file.current().link("a", "b").rate_bps == 8
    path.write_text(json.dumps({"links": {"*": {"rate_bps": 2000}}}))
    assert file.current().link("a", "b").rate_bps == 2000


@pytest.mark.parametrize("said", ["", "{", '{"links": {"*": {"rate_bps": -1}}}', '{"wires": {}}'])
def test_file_that_is_no_world_is_refused(tmp_path: Path, said: str) -> None:
    path = tmp_path / "world.json"
    path.write_text(said)
    with pytest.raises(InvalidInputError, match=r"world.json cannot be used"):
        EmulationFile(path).current()
    with pytest.raises(InvalidInputError, match="cannot be used"):
        EmulationFile(tmp_path / "missing").current()


def test_file_that_breaks_later_leaves_the_world_as_it_was_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "world.json"
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
