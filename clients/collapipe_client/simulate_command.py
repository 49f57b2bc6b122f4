"""The `collapipe simulate` command: compares strategies in networks that are larger than any testbed."""

import importlib.util
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from collapipe.errors import InvalidInputError
from collapipe_client.cli_options import AsJson
from collapipe_client.quantities import say_duration
from collapipe_client.reporting import (
    complain,
    exit_codes,
    plain_table,
    print_json,
    print_table,
    say,
)
from collapipe_client.scenario_files import read_scenario_file

if TYPE_CHECKING:
    from collapipe.simulation import Interval, Scenario, StrategyRun, StrategySummary
    from collapipe_client.plot_files import Plot
    from collapipe_client.simulation_report import Column

_INSTALL = "pip install -e '.[simulation]' in the folder of the repository"
_LINE_SECONDS = 10.0
"""Least time between two lines of progress, where no terminal shows a bar."""


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
    """Simulate strategies on many devices and compare them. A page, report.html, has the tables and the plots."""
    with exit_codes(as_json):
        _check_installed()
        complain(f"reading {scenario_file}")
        # Imported here, because it needs numba and cvxpy, which many clients do not have.
        from collapipe.simulation import summarize, write_devices, write_rounds
        from collapipe_client.simulation_report import (
            columns,
            on_devices,
            say_centralized,
            write_simulation_report,
        )

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
        plots = _draw(scenario, summaries)
        for plot in plots:
            files += plot.save(directory)
        page = directory / "report.html"
        given = {"--seeds": seeds, "--rounds": rounds, "--output": output}
        options = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
        command = shlex.join(["collapipe", "simulate", str(scenario_file), *options])
        write_simulation_report(page, scenario, summaries, plots, command=command, files=files)
        files.append(page)
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
        shown = columns(summaries)
        print_table(_table(parameter, on_devices(summaries), shown))
        for summary, words in say_centralized(scenario, summaries):
            say(words if parameter is None else f"at {parameter} {summary.value:g}, {words}")
        for summary in summaries:
            if summary.reason:
                value = "" if parameter is None else f" at {parameter} {summary.value:g}"
                say(
                    f"{summary.strategy}{value}: no plan in {summary.infeasible_rounds:.0%} of the rounds: "
                    f"{summary.reason}"
                )
        say(f"report: {page}")
        say(f"also in {directory}: {', '.join(file.name for file in files[:-1])}")


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

    total = num_rounds(scenario)
    if not sys.stderr.isatty():
        return run_scenario(scenario, jobs=jobs, on_rounds=_line_printer(total))
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds,"),
        TimeElapsedColumn(),
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(scenario.name, total=total)
        return run_scenario(
            scenario, jobs=jobs, on_rounds=lambda count: progress.advance(task, count)
        )


def _line_printer(total: int) -> Callable[[int], None]:
    """Returns a function that counts rounds, and sometimes writes how many there are and how long the others may take."""
    complain(f"simulating {total} rounds")
    done = first = 0
    said = first_at = time.monotonic()

    def count(rounds: int) -> None:
        nonlocal done, first, first_at, said
        done, now = done + rounds, time.monotonic()
        if not first:  # Until then, code was compiled.
            first, first_at = done, now
        elif now - said >= _LINE_SECONDS and done < total:
            said, left = now, (now - first_at) * (total - done) / (done - first)
            complain(f"{done} of {total} rounds, about {say_duration(left)} left")

    return count


def _draw(scenario: "Scenario", summaries: Sequence["StrategySummary"]) -> list["Plot"]:
    if importlib.util.find_spec("matplotlib") is None:
        complain(f"no plots, because matplotlib is not installed here: {_INSTALL}")
        return []
    from collapipe_client.simulation_plots import draw_plots

    return draw_plots(scenario, summaries)


def _table(
    parameter: str | None, summaries: Sequence["StrategySummary"], shown: Sequence["Column"]
) -> Table:
    """Makes a table with a row for each strategy and each value of the swept parameter."""
    table = plain_table()
    if parameter is not None:
        table.add_column(parameter)
    table.add_column("strategy", no_wrap=True)
    for column in shown:
        table.add_column(column.title)
    for summary in summaries:
        cells = [] if parameter is None else [f"{summary.value:g}"]
        cells.append(summary.strategy)
        if summary.delay_seconds is None:
            cells.append("infeasible")
        else:
            cells += [_cell(column, summary) for column in shown]
        table.add_row(*cells)
    return table


def _cell(column: "Column", summary: "StrategySummary") -> str:
    value = column.value(summary)
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{round(value * column.scale, 9):.3g}"
    return (_with_bounds if column.bounded else _median)(value, column.scale)


def _median(interval: "Interval", scale: float) -> str:
    return f"{round(interval.median * scale, 9):.3g}"


def _with_bounds(interval: "Interval", scale: float) -> str:
    low, high = (f"{round(value * scale, 9):.3g}" for value in (interval.low, interval.high))
    median = _median(interval, scale)
    return median if low == high else f"{median} ({low} to {high})"
