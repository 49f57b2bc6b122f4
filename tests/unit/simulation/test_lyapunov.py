"""DSSRA under energy budgets, over enough rounds for stable averages."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from collapipe.simulation import Scenario, StrategyRun, run_strategy

from .scenarios import document, scenario

_ROUNDS = 150
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


def test_delay_falls_and_backlog_grows_with_the_penalty_weight_but_not_with_time(
    runs: Mapping[float, StrategyRun],
) -> None:
    low, high = runs[_LOW], runs[_HIGH]
    assert _mean(high, lambda r: r.delay_seconds) < 0.97 * _mean(low, lambda r: r.delay_seconds)
    assert _mean(high, lambda r: r.backlog_mean) > 2 * _mean(low, lambda r: r.backlog_mean)
    # Later rounds keep the budget: (12) adds the excess of each round.
    rounds = high.rounds[_ROUNDS // 2 :]
    assert (rounds[-1].backlog_max - rounds[0].backlog_max) / len(rounds) < 0.02


def test_delay_that_the_hysteresis_costs_vanishes_with_a_large_penalty_weight() -> None:
    def delay(weight: float, hysteresis: float) -> float:
        config = _scenario(weight, budgets=None, hysteresis=hysteresis)
        return _mean(run_strategy(config, "dssra", 0), lambda r: r.delay_seconds)

    best = delay(100.0, 0.0)
    assert delay(100.0, 0.05) > 1.05 * best
    assert delay(1600.0, 0.05) == pytest.approx(best, rel=0.05 * 100 / 1600)
