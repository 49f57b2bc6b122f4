"""Turns runs into results: a CSV file of rounds, one of devices, and a summary with confidence intervals."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from collapipe.simulation.records import DeviceRecord, RoundRecord, StrategyRun

_CONFIDENCE = 0.95
_NUM_RESAMPLES = 2000

_RUN_COLUMNS = ("parameter", "value", "seed", "strategy")


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % confidence interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class StrategySummary:
    """A strategy at one value of the swept parameter, over all seeds that have a feasible round.

    Each seed contributes the mean over its feasible rounds, and for memory the maximum. Measures of feasible
    rounds are `None` if there are none.

    Args:
        value: Value of the swept parameter. `None` if the scenario has no sweep.
        num_seeds: Number of all seeds.
        infeasible_rounds: Share of the rounds without a feasible plan. A seed without any feasible round
            counts as 1.
        reason: First reason of an infeasible round.
        delay_seconds, predicted_seconds: Simulated and predicted time of a round.
        prediction_error: |predicted / simulated - 1|, the median over the rounds of a seed.
        energy_joules: Energy of a device in a round.
        energy_joules_max: Energy in a round of the device that uses most over all rounds.
        budget_joules: Mean budget of the devices that have one. `None` if none has.
        backlog: Backlog of a device with a budget. `None` if none has.
        budgets_kept: Share of the devices with a budget whose energy over all rounds is within their budgets.
            `None` if none has one.
        rounds_until_empty: Rounds until the first battery is empty, or all rounds if none becomes empty.
            `None` without batteries.
        memory_bytes: Memory of the device that needs most. If no device runs a block, of the host that does.
        bubble_ratio: Idle share of the slowest cluster.
        reduction: Share of the time that `dssra` saves against this strategy, seed by seed, in the rounds that
            are feasible for both. `None` without `dssra`.
    """

    strategy: str
    value: float | None
    num_seeds: int
    infeasible_rounds: float
    reason: str
    delay_seconds: Interval | None = None
    predicted_seconds: Interval | None = None
    prediction_error: Interval | None = None
    energy_joules: Interval | None = None
    energy_joules_max: Interval | None = None
    budget_joules: float | None = None
    backlog: Interval | None = None
    budgets_kept: float | None = None
    rounds_until_empty: Interval | None = None
    memory_bytes: Interval | None = None
    bubble_ratio: Interval | None = None
    reduction: Interval | None = None


def interval(values: Sequence[float]) -> Interval:
    """Returns the median and its percentile bootstrap interval (Efron 1979), which assumes no distribution.

    Resampling has a fixed seed, so equal values give equal intervals. The interval of a single value is that
    value.
    """
    sample = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(sample), size=(_NUM_RESAMPLES, len(sample)))
    medians = np.median(sample[drawn], axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(np.median(sample)), float(low), float(high))


def summarize(runs: Iterable[StrategyRun]) -> list[StrategySummary]:
    """Summarises runs by value and strategy, in the order of their first run."""
    groups: dict[tuple[float | None, str], list[StrategyRun]] = {}
    for run in runs:
        groups.setdefault((run.value, run.strategy), []).append(run)
    return [
        _summarize(group, groups.get((value, "dssra"), [])) for (value, _), group in groups.items()
    ]


def write_rounds(path: Path, parameter: str | None, runs: Iterable[StrategyRun]) -> None:
    """Writes one row for each round. The row of an infeasible round has its reason and no measures."""
    columns = ["feasible", *(field.name for field in fields(RoundRecord))]
    rows = []
    for run in runs:
        for record in run.rounds:
            row = asdict(record)
            if not record.feasible:
                row = {"round_index": record.round_index, "reason": record.reason}
            rows.append(_run_cells(parameter, run) | {"feasible": int(record.feasible)} | row)
    _write_csv(path, columns, rows)


def write_devices(path: Path, parameter: str | None, runs: Iterable[StrategyRun]) -> None:
    """Writes one row for each device of each run."""
    columns = [*(field.name for field in fields(DeviceRecord)), "mean_energy_joules"]
    rows = [
        _run_cells(parameter, run)
        | asdict(device)
        | {"mean_energy_joules": device.mean_energy_joules}
        for run in runs
        for device in run.devices
    ]
    _write_csv(path, columns, rows)


def _run_cells(parameter: str | None, run: StrategyRun) -> dict[str, Any]:
    values = (parameter, run.value, run.seed, run.strategy)
    return dict(zip(_RUN_COLUMNS, values, strict=True))  # An empty cell stands for `None`.


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*_RUN_COLUMNS, *columns], restval="")
        writer.writeheader()
        writer.writerows(rows)


def _summarize(group: Sequence[StrategyRun], dssra: Sequence[StrategyRun]) -> StrategySummary:
    """Summarises the runs of a strategy at one value, compared with those of `dssra` at the same value."""
    reasons = [record.reason for run in group for record in run.rounds if record.reason]
    feasible = _feasible_rounds(group)
    shares = [1 - len(feasible.get(run.seed, [])) / len(run.rounds) for run in group]
    summary = StrategySummary(
        group[0].strategy,
        group[0].value,
        len(group),
        float(np.mean(shares)),
        reasons[0] if reasons else "",
    )
    if not feasible:
        return summary
    budgets, kept, until_empty = [], [], []
    for run in (run for run in group if run.seed in feasible):
        for device in run.devices:
            if (budget := device.energy_budget_joules) is not None:
                budgets.append(budget)
                kept.append(device.energy_joules <= budget * len(run.rounds))
        batteries = [device for device in run.devices if device.battery_joules is not None]
        if batteries:
            until_empty.append(min(device.empty_after or len(run.rounds) for device in batteries))

    def over_seeds(
        of_round: Callable[[RoundRecord], float],
        of_seed: Callable[[Sequence[float]], Any] = np.mean,
    ) -> Interval:
        return interval([float(of_seed([of_round(r) for r in rs])) for rs in feasible.values()])

    dssra_rounds = _feasible_rounds(dssra)
    reductions = []
    for seed, records in feasible.items():
        seconds = {record.round_index: record.delay_seconds for record in records}
        own = {r.round_index: r.delay_seconds for r in dssra_rounds.get(seed, ())}
        if both := seconds.keys() & own.keys():
            reductions.append(1 - sum(own[i] for i in both) / sum(seconds[i] for i in both))
    return replace(
        summary,
        delay_seconds=over_seeds(lambda r: r.delay_seconds),
        predicted_seconds=over_seeds(lambda r: r.predicted_seconds),
        prediction_error=over_seeds(
            lambda r: abs(r.predicted_seconds / r.delay_seconds - 1), np.median
        ),
        energy_joules=over_seeds(lambda r: r.energy_joules_mean),
        energy_joules_max=interval(
            [
                max((device.mean_energy_joules for device in run.devices), default=0.0)
                for run in group
                if run.seed in feasible
            ]
        ),
        budget_joules=float(np.mean(budgets)) if budgets else None,
        backlog=over_seeds(lambda r: r.backlog_mean) if budgets else None,
        budgets_kept=float(np.mean(kept)) if kept else None,
        rounds_until_empty=interval(until_empty) if until_empty else None,
        memory_bytes=over_seeds(lambda r: r.memory_bytes_max, max),
        bubble_ratio=over_seeds(lambda r: r.bubble_ratio),
        reduction=interval(reductions) if reductions else None,
    )


def _feasible_rounds(runs: Iterable[StrategyRun]) -> dict[int, list[RoundRecord]]:
    """Returns the feasible rounds by seed, without seeds that have none."""
    found = {run.seed: [record for record in run.rounds if record.feasible] for run in runs}
    return {seed: records for seed, records in found.items() if records}
