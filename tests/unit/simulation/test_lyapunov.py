"""DSSRA under energy budgets, over enough rounds for stable averages."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from collapipe.simulation import Scenario, StrategyRun, run_strategy

from .scenarios import document, scenario

_ROUNDS = 300
_LOW, _HIGH = 1.0, 10.0
"""Values of V."""
_BUDGETS = (12.0, 35.0, 35.0)
"""In J for a round. The blocks need 67 J on the three devices together."""


def _scenario(
    penalty_weight: float, budgets: tuple[float, ...] | None = _BUDGETS, hysteresis: float = 0.0
) -> Scenario:
    """Returns two fast devices, the first with a low budget, and a slow one. A block needs the same energy on each."""
    devices = [
        {"gigaflops": 40.0, "busy_watts": 10.0},
        {"gigaflops": 40.0, "busy_watts": 10.0},
        {"gigaflops": 20.0, "busy_watts": 5.0},
    ]
    if budgets is not None:
        for device, budget in zip(devices, budgets, strict=True):
            device["energy_budget_joules"] = budget
    return scenario(
        rounds=_ROUNDS if budgets is not None else 20,
        training=document()["training"] | {"micro_batches": [4]},
        channel={"kind": "wire", "rate_bps": 2e8, "fluctuation": 0.2},
        schedule={"penalty_weight": penalty_weight, "hysteresis": hysteresis},
        clusters=[{"devices": devices}],
    )


@pytest.fixture(scope="module")
def runs() -> Mapping[float, StrategyRun]:
    """Returns a run for each V."""
    return {weight: run_strategy(_scenario(weight), "dssra", 0) for weight in (_LOW, _HIGH)}


def _mean(run: StrategyRun, of_round: Callable[..., float]) -> float:
    return float(np.mean([of_round(record) for record in run.rounds]))


def test_average_energy_is_within_budget_for_every_device(
    runs: Mapping[float, StrategyRun],
) -> None:
    for device in runs[_LOW].devices:
        assert device.num_rounds == _ROUNDS
        assert device.energy_budget_joules is not None
        assert device.mean_energy_joules <= 1.005 * device.energy_budget_joules


def test_energy_of_later_rounds_is_within_budget_for_a_large_penalty_weight(
    runs: Mapping[float, StrategyRun],
) -> None:
    # A backlog that no longer grows shows it, because (12) adds the excess of each round.
    rounds = runs[_HIGH].rounds[_ROUNDS // 2 :]
    assert (rounds[-1].backlog_max - rounds[0].backlog_max) / len(rounds) < 0.02


def test_delay_falls_and_backlog_grows_with_the_penalty_weight(
    runs: Mapping[float, StrategyRun],
) -> None:
    low, high = runs[_LOW], runs[_HIGH]
    assert _mean(high, lambda r: r.delay_seconds) < 0.97 * _mean(low, lambda r: r.delay_seconds)
    assert _mean(high, lambda r: r.backlog_mean) > 2 * _mean(low, lambda r: r.backlog_mean)


def test_device_with_a_low_budget_gets_fewer_blocks(runs: Mapping[float, StrategyRun]) -> None:
    unlimited = run_strategy(_scenario(_LOW, budgets=None), "dssra", 0)
    before, after = (
        [device.blocks / device.num_rounds for device in run.devices]
        for run in (unlimited, runs[_LOW])
    )
    assert before[0] >= 4  # Without budgets it is as fast as the second device.
    assert after[0] < 0.6 * before[0]
    assert sum(after) == pytest.approx(sum(before))


def test_delay_that_the_hysteresis_costs_vanishes_with_a_large_penalty_weight() -> None:
    best, small, large = (
        _mean(
            run_strategy(_scenario(weight, budgets=None, hysteresis=hysteresis), "dssra", 0),
            lambda r: r.delay_seconds,
        )
        for weight, hysteresis in ((100.0, 0.0), (100.0, 0.05), (1600.0, 0.05))
    )
    assert small > 1.05 * best
    assert large == pytest.approx(best, rel=0.05 * 100 / 1600)
