"""`collapipe simulate`, and the scenario files that it reads."""

import csv
import importlib.util
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from collapipe.errors import InvalidInputError
from collapipe_client.scenario_files import read_scenario_file

from .commands import run, run_json
from .report_pages import Page

_SHORT = ("--seeds", "1", "--rounds", "1")
_SCENARIO = """
name = "tiny"
seeds = 2
rounds = 2
strategies = ["pipeline", "vanilla_fl"]

[model]
sequence_length = 32

[training]
mini_batch = 8
micro_batches = [2, 4]

[channel]
kind = "wire"

[[clusters]]
devices = [{ gigaflops = 40.0, memory_gb = 1.6, energy_budget_joules = 5.0, count = 2 }]
"""


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(_SCENARIO, encoding="utf-8")
    return path


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the files of plots empty, because drawing takes most of the time."""
    monkeypatch.setattr(Figure, "savefig", Mock())


def test_simulate_writes_rows_and_plots_and_prints_the_results(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapipe_client.simulate_command._LINE_SECONDS", 0.0)
    result = run("simulate", scenario)
    assert "pipeline" in result.stdout
    assert "vanilla_fl: no plan in 100%" in result.stdout
    rows = _rows()
    assert len([row for row in rows if row["feasible"] == "1"]) == 4
    for name in ("delay", "memory", "energy", "backlog"):
        root = ElementTree.parse(f"simulations/tiny/{name}.svg").getroot()
        texts = {"".join(element.itertext()).strip() for element in root.iter()}
        assert {"pipeline", "vanilla_fl", "infeasible"} <= texts
    data = Path("simulations/tiny/delay.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert matplotlib.image.imread("simulations/tiny/delay.png").shape == (height, width, 4)
    assert width > 800
    # Without a terminal, lines tell how far it is.
    lines = result.stderr.splitlines()
    assert lines[:2] == [f"reading {scenario}", "simulating 8 rounds"]
    assert lines[2].startswith("2 of 8 rounds") and len(lines) == len(set(lines))


def _rows() -> list[dict[str, str]]:
    with Path("simulations/tiny/rounds.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_simulate_as_json_prints_one_document_and_draws_the_same_files_again(
    scenario: Path, tmp_path: Path
) -> None:
    # Without a budget, there are fewer plots to draw.
    scenario.write_text(_SCENARIO.replace(", energy_budget_joules = 5.0", ""), "utf-8")
    for name in ("one", "two"):
        options = ("--output", tmp_path / name, "--seeds", "1", "--rounds", "3")
        document = run_json("simulate", scenario, *options)
    pipeline, vanilla = document["strategies"]
    assert (pipeline["strategy"], pipeline["num_seeds"]) == ("pipeline", 1)
    assert pipeline["delay_seconds"]["median"] > 0
    assert (vanilla["infeasible_rounds"], vanilla["delay_seconds"]) == (1.0, None)
    assert str(tmp_path / "two" / "rounds.csv") in document["files"]
    assert all(Path(file).exists() for file in document["files"])
    assert Path("one/delay.svg").read_bytes() == Path("two/delay.svg").read_bytes()


@pytest.mark.parametrize(
    ("parameter", "values", "plots"),
    [
        ("penalty_weight", "[1, 100]", {"delay-and-backlog", "memory"}),
        ("bandwidth", "[1e7, 1e8]", {"delay", "memory"}),
        ("energy_budget_joules", "[5, 9]", {"delay", "memory", "energy", "backlog"}),
    ],
)
@pytest.mark.usefixtures("no_drawing")
def test_each_sweep_has_its_plots(
    scenario: Path, parameter: str, values: str, plots: set[str]
) -> None:
    sweep = f'\n[sweep]\nparameter = "{parameter}"\nvalues = {values}\n'
    scenario.write_text(_SCENARIO + sweep, encoding="utf-8")
    run("simulate", scenario, *_SHORT)
    drawn = {path.stem for path in Path("simulations/tiny").glob("*.svg")}
    assert drawn == plots


def test_simulate_without_matplotlib_writes_rows_and_gives_the_remedy(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hide(monkeypatch, "matplotlib")
    result = run("simulate", scenario, *_SHORT)
    assert "pip install -e '.[simulation]'" in result.stderr
    written = {path.name for path in Path("simulations/tiny").iterdir()}
    assert written == {"rounds.csv", "devices.csv", "report.html"}
    page = Page(Path("simulations/tiny/report.html"))
    assert page.tables and not page.pictures


def test_report_has_every_number_of_the_result_and_asks_no_other_site(scenario: Path) -> None:
    scenario.write_text(_SCENARIO.replace('"vanilla_fl"', '"dssra", "centralized"'), "utf-8")
    result = run_json("simulate", scenario, "--output", "out")
    page = Page(Path("out/report.html"))
    assert not page.addresses
    rows = {row[0].text: row for table in page.tables for row in table[1:]}
    assert list(rows) == ["pipeline", "dssra", "centralized"] and len(page.tables) == 2
    measures = ["delay_seconds", "reduction", "memory_bytes", "energy_joules_max", "backlog"]
    measures += ["budgets_kept", "bubble_ratio", "prediction_error"]
    for summary in result["strategies"]:
        cells = [[float(each) for each in cell.values] for cell in rows[summary["strategy"]][1:]]
        known = [_numbers(summary[name]) for name in measures]
        if summary["strategy"] == "dssra":
            known[1] = []
        assert cells == known
    shown = rows["pipeline"][1].text.split()
    assert shown[0] == f"{float(rows['pipeline'][1].values[0]):.3g}"
    text = page.text
    assert "Scenario tiny, seeds 0 to 1, 2 rounds each" in text
    assert f"collapipe simulate {scenario} --output out" in text
    for name in ("delay", "memory", "energy", "backlog"):
        assert Path(f"out/{name}.png").is_file()
    assert len(page.pictures) == 4
    for title, unit, words in zip(
        ("Time of a round", "Memory", "Energy of the busiest", "Energy used beyond"),
        ("time of a round, s", "memory, GB", "energy of a round, J", "round budgets"),
        page.pictures,
        strict=True,
    ):
        assert any(each.startswith(title) for each in words)
        assert any(unit in each for each in words) and "strategy" in words
        assert {"median", "95 % confidence interval of the median over 2 seeds"} <= set(words)
        assert "Scenario tiny, seeds 0 to 1, 2 rounds each" in words


def _numbers(value: Any) -> list[float]:
    """Returns the numbers that a cell has for a value of the JSON result."""
    if not isinstance(value, dict):
        return [] if value is None else [value]
    spread = [] if value["low"] == value["high"] else [value["low"], value["high"]]
    return [value["median"], *spread]


@pytest.mark.usefixtures("no_drawing")
def test_centralized_is_apart_with_the_memory_that_it_needs(scenario: Path) -> None:
    scenario.write_text(_SCENARIO.replace('"vanilla_fl"', '"centralized"'), "utf-8")
    printed = run("simulate", scenario, *_SHORT).stdout.splitlines()
    assert "1.6 GB" in next(line for line in printed if line.startswith("centralized has"))
    rows = [row for row in _rows() if row["strategy"] == "centralized"]
    assert all(float(row["memory_bytes_max"]) > 1.6e9 for row in rows)


def test_simulate_without_cvxpy_fails_with_the_remedy(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hide(monkeypatch, "cvxpy")
    said = run("simulate", scenario, code=2).stderr
    assert "cvxpy" in said and "pip install" in said


def _hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec

    def found(name: str, *arguments: object) -> object:
        return None if name == package else find(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(importlib.util, "find_spec", found)


def test_output_that_is_a_file_is_bad_input(scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    assert "--output" in run("simulate", scenario, "--output", tmp_path / "taken", code=2).stderr


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
    with pytest.raises(InvalidInputError, match="one -> two -> three -> two"):
        read_scenario_file(tmp_path / "one.toml")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ('"missing"', "missing.toml .*one.toml"),
        ("3", "one.toml: base = 3"),
    ],
)
def test_a_wrong_base_is_refused(tmp_path: Path, base: str, message: str) -> None:
    _write(tmp_path, one=f"base = {base}")
    with pytest.raises(InvalidInputError, match=message):
        read_scenario_file(tmp_path / "one.toml")
