import csv
from pathlib import Path

import pytest

from collapipe.simulation.records import DeviceRecord, RoundRecord, StrategyRun
from collapipe.simulation.results import Interval, interval, summarize, write_devices, write_rounds


def _run(
    strategy: str, seed: int, delays: list[float], value: float | None = None, budget: float = 4.0
) -> StrategyRun:
    records = [
        RoundRecord(i, delay_seconds=delay, predicted_seconds=1.1 * delay, memory_bytes_max=delay)
        for i, delay in enumerate(delays)
    ]
    return StrategyRun(
        strategy, seed, value, records, [DeviceRecord("device-0-0", budget, 6.0, num_rounds=2)]
    )


def test_interval_holds_the_median_and_narrows_with_more_values() -> None:
    few, many = interval([1.0, 2.0, 3.0, 4.0, 5.0]), interval([1.0, 2.0, 3.0, 4.0, 5.0] * 20)
    assert few.low < few.median < few.high
    assert (few.median, many.median) == (3.0, 3.0)
    assert many.high - many.low < few.high - few.low
    equal = interval([2.0] * 5)
    assert (equal.median, equal.low, equal.high) == (2.0, 2.0, 2.0)


def test_summary_takes_the_median_over_seeds_of_means_over_rounds() -> None:
    runs = [_run("pipeline", seed, [base, base + 2]) for seed, base in enumerate([1, 5, 9])]
    (summary,) = summarize(runs)
    assert _median(summary.delay_seconds) == 6.0
    assert _median(summary.memory_bytes) == 7.0
    assert _median(summary.prediction_error) == pytest.approx(0.1)
    assert _median(summary.energy_joules_max) == 3.0
    assert (summary.num_seeds, summary.infeasible_rounds, summary.budget_joules) == (3, 0, 4)
    assert (summary.reduction, summary.rounds_until_empty) == (None, None)


def _median(found: Interval | None) -> float | None:
    return None if found is None else found.median


def test_reduction_compares_seed_by_seed() -> None:
    # dssra is twice as fast for each seed, although rounds of one seed take a hundred times as long.
    runs = [
        *(_run("dssra", seed, [delay]) for seed, delay in enumerate([1.0, 100.0])),
        *(_run("pipeline", seed, [2 * delay]) for seed, delay in enumerate([1.0, 100.0])),
    ]
    _, summary = summarize(runs)
    assert summary.reduction is not None
    assert (summary.reduction.low, summary.reduction.high) == (0.5, 0.5)


def test_reduction_compares_within_a_value_of_the_sweep() -> None:
    given = [("dssra", 1.0, 1), ("pipeline", 4.0, 1), ("pipeline", 4.0, 2)]
    runs = [_run(strategy, 0, [delay], value=value) for strategy, delay, value in given]
    assert [_median(summary.reduction) for summary in summarize(runs)] == [0.0, 0.75, None]


def test_reduction_compares_the_rounds_that_both_strategies_have() -> None:
    records = [RoundRecord(0, delay_seconds=2.0), RoundRecord(1, "gone")]
    missing = StrategyRun("pipeline", 0, None, records, [])
    _, summary = summarize([_run("dssra", 0, [1.0, 9.0]), missing])
    assert _median(summary.reduction) == 0.5


def test_summary_says_how_long_batteries_last_and_which_budgets_hold() -> None:
    rounds = [RoundRecord(i, delay_seconds=1.0) for i in range(4)]

    def run(seed: int, *empty_after: int | None) -> StrategyRun:
        devices = [
            DeviceRecord(f"device-0-{i}", 2.0, 5.0 if after is None else 9.0, 0.0, 0.0, 0, 4, 8.0)
            for i, after in enumerate(empty_after)
        ]
        for device, after in zip(devices, empty_after, strict=True):
            device.empty_after = after
        return StrategyRun("pipeline", seed, None, rounds, devices)

    (summary,) = summarize([run(0, 3, None), run(1, None, None)])
    assert summary.budgets_kept == 0.75
    assert _median(summary.rounds_until_empty) == 3.5


def test_infeasible_strategy_is_in_the_summary_with_its_reason() -> None:
    never = StrategyRun("vanilla_fl", 0, None, [RoundRecord(0, "too large")], [])
    records = [RoundRecord(0, "faded"), RoundRecord(1, delay_seconds=3.0)]
    none, some = summarize([never, StrategyRun("titanic", 0, None, records, [])])
    assert (none.infeasible_rounds, none.reason, none.delay_seconds) == (1.0, "too large", None)
    assert (some.infeasible_rounds, some.reason) == (0.5, "faded")
    assert _median(some.delay_seconds) == 3.0


def test_rounds_file_has_a_row_a_round(tmp_path: Path) -> None:
    infeasible = StrategyRun("vanilla_fl", 7, 2.0, [RoundRecord(0, "too large")], [])
    write_rounds(tmp_path / "r.csv", "bandwidth", [_run("pipeline", 7, [1, 2], 2.0), infeasible])
    columns = ("strategy", "delay_seconds", "feasible", "reason")
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ("pipeline", "1", "1", ""),
        ("pipeline", "2", "1", ""),
        ("vanilla_fl", "", "0", "too large"),
    ]
    assert {(r["parameter"], r["value"], r["seed"]) for r in rows} == {("bandwidth", "2.0", "7")}


def test_devices_file_has_a_row_a_device(tmp_path: Path) -> None:
    write_devices(tmp_path / "d.csv", None, [_run("pipeline", 7, [1, 2])])
    (row,) = csv.DictReader((tmp_path / "d.csv").read_text().splitlines())
    assert (row["host_id"], row["value"], row["mean_energy_joules"]) == ("device-0-0", "", "3.0")
