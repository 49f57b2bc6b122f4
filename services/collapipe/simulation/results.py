"""From runs to numbers that one can read: a table of rounds, one of devices, and a summary with confidence intervals."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from collapipe.simulation.rounds import DeviceRecord, RoundRecord, StrategyRun

_CONFIDENCE = 0.95
_RESAMPLES = 2000

_RUN_COLUMNS = ("parameter", "value", "seed", "strategy")


@dataclass(frozen=True)
class Interval:
    """A median, and the bounds of its 95 % confidence interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class StrategySummary:
    """A strategy at one value of the swept parameter, over all seeds with a feasible round.

    A seed counts with its mean over feasible rounds, memory with its maximum.

    Args:
        strategy: Its name.
        value: Of the swept parameter; `None` when nothing is swept.
        num_seeds: All of them.
        infeasible_rounds: Share of the rounds in which it had no plan; 1 for a seed that never had one.
        reason: Why, the first time.
        delay_seconds, predicted_seconds: Of a round; `None` where nothing was feasible, as with all that follow.
        prediction_error: |predicted / simulated - 1|, the median over rounds.
        energy_joules: Of a device in a round.
        energy_joules_max: Of the device that uses most over all rounds, in a round.
        budget_joules: Mean budget of the devices that have one; `None` for none.
        backlog: Of a device with a budget.
        memory_bytes: Of the device that needs most.
        bubble_ratio: Of the slowest cluster.
        reduction: By how much `dssra` is faster, 1 - its delay over this one's, seed by seed; `None` without it.
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
    memory_bytes: Interval | None = None
    bubble_ratio: Interval | None = None
    reduction: Interval | None = None


def interval(values: Sequence[float]) -> Interval:
    """Median with its percentile bootstrap (Efron 1979): assumes nothing of how values are distributed.

    A single value is its own interval. Equal values give equal intervals: resampling has a fixed seed.
    """
    sample = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(sample), size=(_RESAMPLES, len(sample)))
    medians = np.median(sample[drawn], axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(np.median(sample)), float(low), float(high))


def summarize(runs: Iterable[StrategyRun]) -> list[StrategySummary]:
    """Summarises runs by strategy and value, in the order of their first run."""
    groups: dict[tuple[float | None, str], list[StrategyRun]] = {}
    for run in runs:
        groups.setdefault((run.value, run.strategy), []).append(run)
    return [
        _summarize(group, groups.get((value, "dssra"), [])) for (value, _), group in groups.items()
    ]


def write_rounds(path: Path, parameter: str | None, runs: Iterable[StrategyRun]) -> None:
    """Writes one row a round; infeasible rounds have their reason, and nothing else."""
    names = [field.name for field in fields(RoundRecord)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*_RUN_COLUMNS, "feasible", *names], restval="")
        writer.writeheader()
        for run in runs:
            for record in run.rounds:
                row = _key(parameter, run) | {"feasible": int(record.feasible)}
                if record.feasible:
                    row |= asdict(record)
                else:
                    row |= {"round_index": record.round_index, "reason": record.reason}
                writer.writerow(row)


def write_devices(path: Path, parameter: str | None, runs: Iterable[StrategyRun]) -> None:
    """Writes one row a device and run."""
    names = [field.name for field in fields(DeviceRecord)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*_RUN_COLUMNS, *names, "mean_energy_joules"])
        writer.writeheader()
        for run in runs:
            for device in run.devices:
                row = _key(parameter, run) | asdict(device)
                writer.writerow(row | {"mean_energy_joules": device.mean_energy_joules})


def _key(parameter: str | None, run: StrategyRun) -> dict[str, Any]:
    values = (parameter or "", "" if run.value is None else run.value, run.seed, run.strategy)
    return dict(zip(_RUN_COLUMNS, values, strict=True))


def _summarize(group: Sequence[StrategyRun], rivals: Sequence[StrategyRun]) -> StrategySummary:
    first = group[0]
    reasons = [record.reason for run in group for record in run.rounds if record.reason]
    feasible = {run.seed: _feasible(run) for run in group if _feasible(run)}
    shares = [1 - len(_feasible(run)) / len(run.rounds) for run in group]
    summary = StrategySummary(
        first.strategy,
        first.value,
        len(group),
        float(np.mean(shares)),
        reasons[0] if reasons else "",
    )
    if not feasible:
        return summary
    budgets = [
        device.energy_budget_joules
        for run in group
        for device in run.devices
        if device.energy_budget_joules is not None
    ]

    def over_seeds(
        of_round: Callable[[RoundRecord], float],
        of_seed: Callable[[Sequence[float]], Any] = np.mean,
    ) -> Interval:
        return interval([float(of_seed([of_round(r) for r in rs])) for rs in feasible.values()])

    rival_rounds = {run.seed: _feasible(run) for run in rivals if _feasible(run)}
    reductions = [
        1 - _mean_delay(rival_rounds[seed]) / _mean_delay(records)
        for seed, records in feasible.items()
        if seed in rival_rounds
    ]
    return StrategySummary(
        summary.strategy,
        summary.value,
        summary.num_seeds,
        summary.infeasible_rounds,
        summary.reason,
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
        memory_bytes=over_seeds(lambda r: r.memory_bytes_max, max),
        bubble_ratio=over_seeds(lambda r: r.bubble_ratio),
        reduction=interval(reductions) if reductions else None,
    )


def _feasible(run: StrategyRun) -> list[RoundRecord]:
    return [record for record in run.rounds if record.feasible]


def _mean_delay(records: Sequence[RoundRecord]) -> float:
    return float(np.mean([record.delay_seconds for record in records]))
