from pathlib import Path

import pytest

from collapipe.errors import InvalidInputError
from collapipe_client.scenario_files import read_scenario_file


def _write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")


def test_values_replace_those_of_the_base_table_by_table(tmp_path: Path) -> None:
    _write(
        tmp_path,
        root='name = "root"\nseeds = 4\n[channel]\nkind = "radio"\nefficiency = 0.5',
        middle='base = "root"\nseeds = [1, 2]\n[channel]\nbandwidth_hz = 1e6',
        leaf='base = "middle"\nseeds = [3]\n[channel]\nefficiency = 0.1\n[world]\nabsence = 0.2',
    )
    assert read_scenario_file(tmp_path / "leaf.toml") == {
        "name": "leaf",
        "seeds": [3],
        "channel": {"kind": "radio", "efficiency": 0.1, "bandwidth_hz": 1e6},
        "world": {"absence": 0.2},
    }


def test_a_scenario_without_a_name_has_that_of_its_file(tmp_path: Path) -> None:
    _write(tmp_path, plain="seeds = 1", named='name = "other"')
    assert read_scenario_file(tmp_path / "plain.toml")["name"] == "plain"
    assert read_scenario_file(tmp_path / "named.toml")["name"] == "other"


def test_a_base_of_itself_is_refused_with_the_chain(tmp_path: Path) -> None:
    _write(tmp_path, one='base = "two"', two='base = "three"', three='base = "two"')
    with pytest.raises(InvalidInputError, match="'two' is a base of itself") as caught:
        read_scenario_file(tmp_path / "one.toml")
    assert "one -> two -> three -> two" in str(caught.value)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ('"missing"', "missing.toml does not exist: .*one.toml has it as base; give the name"),
        ("3", "one.toml: base = 3: give the name of a file in the same folder"),
    ],
)
def test_a_wrong_base_is_refused(tmp_path: Path, base: str, message: str) -> None:
    _write(tmp_path, one=f"base = {base}")
    with pytest.raises(InvalidInputError, match=message):
        read_scenario_file(tmp_path / "one.toml")
