"""The `collapipe simulate` command: compares strategies in networks that are larger than any testbed."""

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from collapipe.errors import InvalidInputError
from collapipe_client.cli_options import AsJson
from collapipe_client.reporting import complain, exit_codes, plain_table, print_json, say
from collapipe_client.scenario_files import read_scenario_file

if TYPE_CHECKING:
    from collapipe.simulation import Interval, Scenario, StrategyRun, StrategySummary

_INSTALL = "pip install 'collapipe[simulation]'"


def simulate(
    scenario_file: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", show_default=False)],
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds, instead of the scenario's.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds, instead of the scenario's.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes that compute.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the files. Default: ./simulations/NAME."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate strategies on many devices and compare them."""
    with exit_codes(as_json):
        _check_installed()
        # Imported here, because it needs numba and cvxpy, which many clients do not have.
        from collapipe.simulation import summarize, write_devices, write_rounds

        scenario = _load(scenario_file, seeds, rounds)
        directory = output or Path("simulations") / scenario.name
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(
                f"{directory} cannot be created ({error.strerror}): give another --output DIR"
            ) from error
        runs = _run(scenario, jobs)
        summaries = summarize(runs)
        parameter = scenario.sweep.parameter if scenario.sweep else None
        files = [directory / "rounds.csv", directory / "devices.csv"]
        write_rounds(files[0], parameter, runs)
        write_devices(files[1], parameter, runs)
        files += _plot(scenario, summaries, directory)
        if as_json:
            print_json(
                {
                    "scenario": scenario.name,
                    "parameter": parameter,
                    "strategies": [asdict(summary) for summary in summaries],
                    "files": [str(file) for file in files],
                }
            )
            return
        say("medians over seeds, with their 95 % confidence intervals in brackets")
        Console().print(_table(parameter, summaries))
        for summary in summaries:
            if summary.reason:
                value = "" if parameter is None else f" at {parameter} {summary.value:g}"
                say(
                    f"{summary.strategy}{value}: no plan in {summary.infeasible_rounds:.0%} of the rounds: "
                    f"{summary.reason}"
                )
        say("written: " + ", ".join(str(file) for file in files))


def _check_installed() -> None:
    missing = [name for name in ("numba", "cvxpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInputError(
            f"the simulator needs {' and '.join(missing)}, which is not installed here: {_INSTALL}"
        )


def _load(path: Path, seeds: int | None, rounds: int | None) -> "Scenario":
    from collapipe.simulation import read_scenario

    document = read_scenario_file(path)
    if seeds is not None:
        document["seeds"] = seeds
    if rounds is not None:
        document["rounds"] = rounds
    return read_scenario(document, str(path))


def _run(scenario: "Scenario", jobs: int) -> list["StrategyRun"]:
    from collapipe.simulation import num_rounds, run_scenario

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(scenario.name, total=num_rounds(scenario))
        return run_scenario(
            scenario, jobs=jobs, on_rounds=lambda count: progress.advance(task, count)
        )


def _plot(
    scenario: "Scenario", summaries: Sequence["StrategySummary"], directory: Path
) -> list[Path]:
    if importlib.util.find_spec("matplotlib") is None:
        complain(f"no plots, because matplotlib is not installed here: {_INSTALL}")
        return []
    from collapipe_client.simulation_plots import draw_plots

    return draw_plots(scenario, summaries, directory)


def _table(parameter: str | None, summaries: Sequence["StrategySummary"]) -> Table:
    """Makes a table with a row for each strategy and each value of the swept parameter."""
    has_budgets = any(summary.budget_joules for summary in summaries)
    has_batteries = any(summary.rounds_until_empty for summary in summaries)
    table = plain_table()
    if parameter is not None:
        table.add_column(parameter)
    table.add_column("strategy", no_wrap=True)
    columns = ["delay, s", "dssra saves, %", "largest memory, GB"]
    columns += ["largest energy, J", "backlog", "budgets kept, %"] if has_budgets else []
    columns += ["rounds until empty"] if has_batteries else []
    for column in [*columns, "idle, %", "prediction error, %"]:
        table.add_column(column)
    for summary in summaries:
        cells = [] if parameter is None else [f"{summary.value:g}"]
        cells.append(summary.strategy)
        if summary.delay_seconds is None:
            cells.append("infeasible")
        else:
            saved = None if summary.strategy == "dssra" else summary.reduction
            cells += [_with_bounds(summary.delay_seconds), _with_bounds(saved, 100)]
            cells.append(_median(summary.memory_bytes, 1e-9))
            if has_budgets:
                cells += [_median(summary.energy_joules_max), _median(summary.backlog)]
                cells.append(f"{100 * (summary.budgets_kept or 0.0):.0f}")
            if has_batteries:
                cells.append(_with_bounds(summary.rounds_until_empty))
            cells += [_median(summary.bubble_ratio, 100), _median(summary.prediction_error, 100)]
        table.add_row(*cells)
    return table


def _median(interval: "Interval | None", scale: float = 1.0) -> str:
    return "" if interval is None else f"{round(interval.median * scale, 9):.3g}"


def _with_bounds(interval: "Interval | None", scale: float = 1.0) -> str:
    if interval is None:
        return ""
    low, high = (f"{round(value * scale, 9):.3g}" for value in (interval.low, interval.high))
    median = _median(interval, scale)
    return median if low == high else f"{median} ({low} to {high})"
