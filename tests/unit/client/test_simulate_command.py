import csv
import importlib.util
import json
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from typer.testing import CliRunner

from collapipe_client.cli import app

from .report_pages import Page

_RUNNER = CliRunner()

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


def test_simulate_writes_rows_and_plots_and_prints_the_results(scenario: Path) -> None:
    result = _RUNNER.invoke(app, ["simulate", str(scenario)])
    assert result.exit_code == 0, result.output
    assert "pipeline" in result.stdout
    assert "vanilla_fl: no plan in 100% of the rounds: no device holds the whole" in result.stdout
    with Path("simulations/tiny/rounds.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len([row for row in rows if row["feasible"] == "1"]) == 4
    for name in ("delay", "memory", "energy", "backlog"):
        root = ElementTree.parse(f"simulations/tiny/{name}.svg").getroot()
        texts = {"".join(element.itertext()).strip() for element in root.iter()}
        assert {"pipeline", "vanilla_fl", "infeasible"} <= texts


def test_simulate_as_json_prints_one_document(scenario: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = _RUNNER.invoke(
        app,
        [
            "simulate",
            str(scenario),
            "--json",
            "--output",
            str(output),
            "--seeds",
            "1",
            "--rounds",
            "3",
        ],
    )
    document = json.loads(result.stdout)
    pipeline, vanilla = document["strategies"]
    assert (pipeline["strategy"], pipeline["num_seeds"]) == ("pipeline", 1)
    assert pipeline["delay_seconds"]["median"] > 0
    assert (vanilla["infeasible_rounds"], vanilla["delay_seconds"]) == (1.0, None)
    assert str(output / "rounds.csv") in document["files"]
    assert all(Path(file).exists() for file in document["files"])


@pytest.mark.parametrize(
    ("parameter", "values", "plots"),
    [
        ("penalty_weight", "[1, 100]", {"delay-and-backlog", "memory"}),
        ("bandwidth", "[1e7, 1e8]", {"delay", "memory"}),
        ("energy_budget_joules", "[5, 9]", {"delay", "memory", "energy", "backlog"}),
    ],
)
def test_each_sweep_has_its_plots(
    scenario: Path, parameter: str, values: str, plots: set[str]
) -> None:
    sweep = f'\n[sweep]\nparameter = "{parameter}"\nvalues = {values}\n'
    scenario.write_text(_SCENARIO + sweep, encoding="utf-8")
    result = _RUNNER.invoke(app, ["simulate", str(scenario)])
    assert result.exit_code == 0, result.output
    drawn = {path.stem for path in Path("simulations/tiny").glob("*.svg")}
    assert drawn == plots


def test_same_scenario_draws_the_same_files(scenario: Path) -> None:
    for name in ("one", "two"):
        _RUNNER.invoke(app, ["simulate", str(scenario), "--output", name])
    assert Path("one/delay.svg").read_bytes() == Path("two/delay.svg").read_bytes()


def test_simulate_without_matplotlib_writes_rows_and_gives_the_remedy(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hide(monkeypatch, "matplotlib")
    result = _RUNNER.invoke(app, ["simulate", str(scenario)])
    assert result.exit_code == 0, result.output
    assert "pip install -e '.[simulation]'" in result.stderr
    written = {path.name for path in Path("simulations/tiny").iterdir()}
    assert written == {"rounds.csv", "devices.csv", "report.html"}
    page = Page(Path("simulations/tiny/report.html"))
    assert page.tables and not page.pictures


def test_report_has_every_number_of_the_result_and_asks_no_other_site(scenario: Path) -> None:
    scenario.write_text(_SCENARIO.replace('"vanilla_fl"', '"dssra", "centralized"'), "utf-8")
    result = _RUNNER.invoke(app, ["simulate", str(scenario), "--output", "out", "--json"])
    assert result.exit_code == 0, result.output
    page = Page(Path("out/report.html"))
    assert not page.addresses
    rows = {row[0].text: row for table in page.tables for row in table[1:]}
    assert list(rows) == ["pipeline", "dssra", "centralized"] and len(page.tables) == 2
    measures = ["delay_seconds", "reduction", "memory_bytes", "energy_joules_max", "backlog"]
    measures += ["budgets_kept", "bubble_ratio", "prediction_error"]
    for summary in json.loads(result.stdout)["strategies"]:
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


def test_centralized_is_apart_with_the_memory_that_it_needs(scenario: Path) -> None:
    scenario.write_text(_SCENARIO.replace('"vanilla_fl"', '"centralized"'), "utf-8")
    result = _RUNNER.invoke(app, ["simulate", str(scenario)])
    assert result.exit_code == 0, result.output
    said = next(line for line in result.stdout.splitlines() if line.startswith("centralized has"))
    assert "GB of memory there. The largest device may use 1.6 GB, so no device can hold it" in said
    with Path("simulations/tiny/rounds.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["strategy"] == "centralized"]
    assert all(float(row["memory_bytes_max"]) > 1.6e9 for row in rows)


def test_pictures_are_png_files_that_open(scenario: Path) -> None:
    _RUNNER.invoke(app, ["simulate", str(scenario), "--rounds", "1", "--seeds", "1"])
    data = Path("simulations/tiny/delay.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert matplotlib.image.imread("simulations/tiny/delay.png").shape == (height, width, 4)
    assert width > 800


def test_without_a_terminal_lines_tell_how_far_it_is(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapipe_client.simulate_command._LINE_SECONDS", 0.0)
    result = _RUNNER.invoke(app, ["simulate", str(scenario), "--seeds", "1", "--rounds", "4"])
    lines = result.stderr.splitlines()
    assert lines[:2] == [f"reading {scenario}", "simulating 8 rounds"]
    assert lines[2].startswith("2 of 8 rounds, about ") and len(lines) == len(set(lines))


def test_simulate_without_cvxpy_fails_with_the_remedy(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hide(monkeypatch, "cvxpy")
    result = _RUNNER.invoke(app, ["simulate", str(scenario)])
    assert result.exit_code == 2
    assert "needs cvxpy, which is not installed here: pip install" in result.stderr


def _hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec

    def found(name: str, *arguments: object) -> object:
        return None if name == package else find(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(importlib.util, "find_spec", found)


def test_misspelt_key_is_bad_input(scenario: Path) -> None:
    scenario.write_text(_SCENARIO.replace("seeds", "seads"), encoding="utf-8")
    result = _RUNNER.invoke(app, ["simulate", str(scenario)])
    assert result.exit_code == 2
    assert "unknown key 'seads'; did you mean 'seeds'?" in result.stderr


def test_missing_file_is_bad_input(tmp_path: Path) -> None:
    result = _RUNNER.invoke(app, ["simulate", str(tmp_path / "no.toml")])
    assert result.exit_code == 2
    assert "does not exist: give a scenario file" in result.stderr


def test_output_that_is_a_file_is_bad_input(scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    result = _RUNNER.invoke(app, ["simulate", str(scenario), "--output", str(tmp_path / "taken")])
    assert result.exit_code == 2
    assert "give another --output" in result.stderr
