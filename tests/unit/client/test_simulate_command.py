import csv
import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_client.cli import app

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
    assert "pip install 'collapipe[simulation]'" in result.stderr
    assert {path.name for path in Path("simulations/tiny").iterdir()} == {
        "rounds.csv",
        "devices.csv",
    }


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
