"""The results of a simulation as tables, and the page that has them with their plots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from collapipe.simulation import Interval, Scenario, StrategySummary
from collapipe.simulation.scenario import ClusterSection, HardwareSection
from collapipe.simulation.simulated_system import SimulatedSystem
from collapipe_client import report_page as page

if TYPE_CHECKING:  # It needs matplotlib, which may be missing.
    from collapipe_client.plot_files import Plot


@dataclass(frozen=True)
class Column:
    """A measure in a table.

    Args:
        scale: What the shown number is multiplied by.
        bounded: Whether a terminal shows the confidence interval, too.
    """

    title: str
    value: Callable[[StrategySummary], Interval | float | None]
    scale: float = 1.0
    bounded: bool = False


def columns(summaries: Sequence[StrategySummary]) -> list[Column]:
    """Returns the measures that some summary has."""
    saved = Column(
        "dssra saves, %",
        lambda s: None if s.strategy == "dssra" else s.reduction,
        100,
        bounded=True,
    )
    found = [Column("delay, s", lambda s: s.delay_seconds, bounded=True), saved]
    found.append(Column("largest memory, GB", lambda s: s.memory_bytes, 1e-9))
    if any(summary.budget_joules for summary in summaries):
        found += [
            Column("largest energy, J", lambda s: s.energy_joules_max),
            Column("backlog", lambda s: s.backlog),
            Column("budgets kept, %", lambda s: s.budgets_kept, 100),
        ]
    if any(summary.rounds_until_empty for summary in summaries):
        found.append(Column("rounds until empty", lambda s: s.rounds_until_empty, bounded=True))
    found.append(Column("idle, %", lambda s: s.bubble_ratio, 100))
    return [*found, Column("prediction error, %", lambda s: s.prediction_error, 100)]


def on_devices(summaries: Sequence[StrategySummary]) -> list[StrategySummary]:
    """Returns the strategies that train on devices: all but `centralized`."""
    return [summary for summary in summaries if summary.strategy != "centralized"]


def say_centralized(
    scenario: Scenario, summaries: Sequence[StrategySummary]
) -> list[tuple[StrategySummary, str]]:
    """Says of each summary of `centralized` what it would need, and what the devices have."""
    largest = _largest_device(scenario)
    said = []
    for summary in summaries:
        if summary.strategy != "centralized":
            continue
        words = "centralized has the whole model on the control unit, and no device takes part"
        if summary.memory_bytes is not None and summary.delay_seconds is not None:
            needed = summary.memory_bytes.median
            words += f": {summary.delay_seconds.median:.3g} s a round, with {needed / 1e9:.3g} GB of memory there"
            if largest is not None:
                holds = "no device can hold it" if needed > largest else "it could hold it"
                words += f". The largest device may use {largest / 1e9:.3g} GB, so {holds}"
        said.append((summary, words))
    return said


def _largest_device(scenario: Scenario) -> float | None:
    """Returns the memory of the largest device, in bytes; `None` if a device has no limit."""
    limits = [
        device.memory_bytes
        for _, point in scenario.points()
        for device in SimulatedSystem(point, scenario.seed_list[0]).devices
    ]
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


_ENOUGH_SEEDS = 5
"""The bootstrap of fewer values knows hardly more than their range."""
_FEW_SEEDS = f" With fewer than {_ENOUGH_SEEDS} seeds, these intervals say little."


def say_runs(scenario: Scenario) -> str:
    """Names a scenario with its seeds and rounds."""
    seeds = scenario.seed_list
    if len(seeds) == 1:
        listed = f"seed {seeds[0]}"
    elif isinstance(scenario.seeds, int):
        listed = f"seeds {seeds[0]} to {seeds[-1]}"
    else:
        listed = f"seeds {', '.join(map(str, seeds))}"
    return f"Scenario {scenario.name}, {listed}, {scenario.rounds} round{'s' * (scenario.rounds != 1)} each"


def write_simulation_report(
    path: Path,
    scenario: Scenario,
    summaries: Sequence[StrategySummary],
    plots: Sequence["Plot"],
    *,
    command: str,
    files: Sequence[Path],
) -> None:
    """Writes the page with all results.

    Args:
        command: What makes the same results again.
        files: What was written beside the page.

    Raises:
        InvalidInputError: The file cannot be written.
    """
    compared = on_devices(summaries)
    parameter = scenario.sweep.parameter if scenario.sweep else None
    shown = columns(summaries)
    central = say_centralized(scenario, summaries)
    reasons = [
        f"{_name(parameter, summary)}: no plan in {summary.infeasible_rounds:.0%} of the rounds: {summary.reason}"
        for summary in summaries
        if summary.reason
    ]
    page.write_page(
        path,
        f"Simulation {scenario.name}",
        page.tag("p", _lead(scenario, parameter, compared)),
        page.section("What was simulated", _facts(scenario, command)),
        page.section("Results", _table(parameter, compared, shown, _caption(scenario))),
        page.section(
            "Apart: the whole model on one host",
            page.items(dict.fromkeys(words for _, words in central)),
            _table(parameter, [one for one, _ in central], shown),
            kind="apart",
        )
        if central
        else "",
        page.section("Plots", page.tag("div", *(plot.html() for plot in plots), kind="plots"))
        if plots
        else "",
        page.section("Rounds without a plan", page.items(reasons)) if reasons else "",
        page.section("How to read it", page.items(_HOW_TO_READ)),
        page.section(
            "Files and settings",
            page.tag("p", "Beside this page: ", ", ".join(file.name for file in files), "."),
            page.folded(
                "The whole scenario, with its defaults",
                page.tag("pre", scenario.model_dump_json(indent=2)),
            ),
        ),
    )


_HOW_TO_READ = (
    "Each seed draws other hosts, links and conditions. Its value is the mean over its rounds that have a plan; for memory, "
    "the largest.",
    "A number is the median over the seeds. Below it is its 95 % confidence interval (percentile bootstrap). In plots, "
    "whiskers and bands are this interval.",
    "Delay is the simulated time of a round, with all transfers of weights. “dssra saves” compares seed by seed, so it need "
    "not follow from the medians.",
    "Idle is the share of time in which the stages of the slowest cluster wait. The prediction error compares the time that "
    "the strategy expected with the simulated one.",
)


def _lead(
    scenario: Scenario, parameter: str | None, compared: Sequence[StrategySummary]
) -> page.Html:
    best = min(
        (s for s in compared if s.delay_seconds is not None),
        key=lambda s: s.delay_seconds.median if s.delay_seconds else 0.0,
        default=None,
    )
    start = f"{say_runs(scenario)}. "
    if best is None or best.delay_seconds is None:
        return page.join(start, "No strategy found a plan on the devices.")
    return page.join(
        start,
        "The shortest round on devices is that of ",
        page.tag("b", _name(parameter, best)),
        f": {best.delay_seconds.median:.3g} s.",
    )


def _name(parameter: str | None, summary: StrategySummary) -> str:
    return summary.strategy + ("" if parameter is None else f" at {parameter} {summary.value:g}")


def _caption(scenario: Scenario) -> str:
    count = len(scenario.seed_list)
    spread = ""
    if count > 1:
        spread = f" Medians over {count} seeds, with their 95 % confidence intervals below."
        spread += _FEW_SEEDS if count < _ENOUGH_SEEDS else ""
    return f"{say_runs(scenario)}.{spread}"


def _table(
    parameter: str | None,
    summaries: Sequence[StrategySummary],
    shown: Sequence[Column],
    caption: str = "",
) -> page.Html:
    rows = []
    for summary in summaries:
        cells = [_cell(column.value(summary), column.scale) for column in shown]
        if summary.delay_seconds is None:
            cells[0] = page.Html("infeasible")
        swept = [] if parameter is None else [page.amount(summary.value)]
        rows.append([summary.strategy, *swept, *cells])
    swept_titles = [] if parameter is None else [parameter.replace("_", " ")]
    titles = ["strategy", *swept_titles, *(column.title for column in shown)]
    return page.table(titles, rows, caption)


def _cell(value: Interval | float | None, scale: float) -> page.Html:
    if not isinstance(value, Interval):
        return page.amount(value, scale)
    if value.low == value.high:
        return page.amount(value.median, scale)
    low, high = page.amount(value.low, scale), page.amount(value.high, scale)
    return page.join(page.amount(value.median, scale), page.tag("small", low, " to ", high))


def _facts(scenario: Scenario, command: str) -> page.Html:
    model, training, channel = scenario.model, scenario.training, scenario.channel
    if channel.kind == "radio":
        links = f"radio, {channel.bandwidth_hz / 1e6:g} MHz shared by the links of a cluster"
    else:
        links = f"wires of {channel.rate_bps / 1e6:g} Mbit/s"
    sweep = scenario.sweep
    return page.facts(
        [
            ("command", page.tag("code", command)),
            ("runs", say_runs(scenario)),
            ("strategies", ", ".join(scenario.strategies)),
            (
                "swept",
                f"{sweep.parameter}: {', '.join(f'{v:g}' for v in sweep.values)}" if sweep else "",
            ),
            ("model", f"{model.name}, {model.sequence_length} tokens a sample"),
            (
                "a round",
                f"{training.local_steps} mini-batches of {training.mini_batch} samples in each cluster",
            ),
            ("links", links),
            ("clusters", "; ".join(_cluster(cluster) for cluster in scenario.clusters)),
            ("control units", _hardware(scenario.control_unit)),
            ("edge server", _hardware(scenario.edge_server)),
            ("CollaPipe", version("collapipe")),
        ]
    )


def _cluster(cluster: ClusterSection) -> str:
    devices = ", ".join(f"{device.count} × {_hardware(device)}" for device in cluster.devices)
    return f"{cluster.count} with {devices}"


def _hardware(hardware: HardwareSection) -> str:
    speed = "" if hardware.gigaflops is None else f"{hardware.gigaflops:g} GFLOP/s"
    memory = "" if hardware.memory_gb is None else f"{hardware.memory_gb:g} GB"
    return " ".join(part for part in (hardware.profile or "", speed, memory) if part)
