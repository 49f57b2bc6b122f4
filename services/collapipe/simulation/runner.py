"""Runs a whole scenario: every value of its sweep with every strategy and every seed."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed

from collapipe.simulation.records import StrategyRun
from collapipe.simulation.rounds import run_strategy
from collapipe.simulation.scenario import Scenario


def num_rounds(scenario: Scenario) -> int:
    """Returns the number of rounds of all runs together."""
    runs = len(scenario.points()) * len(scenario.strategies) * len(scenario.seed_list)
    return runs * scenario.rounds


def run_scenario(
    scenario: Scenario, *, jobs: int = 1, on_rounds: Callable[[int], None] = lambda count: None
) -> list[StrategyRun]:
    """Runs everything. The results do not depend on the number of processes.

    Args:
        jobs: Number of processes.
        on_rounds: Called with the number of rounds that have ended since the last call.

    Returns:
        Runs by value, strategy and seed, in the scenario's order.
    """
    runs = [
        (point, strategy, seed, value)
        for value, point in scenario.points()
        for strategy in scenario.strategies
        for seed in scenario.seed_list
    ]
    if jobs == 1:
        return [run_strategy(*run, on_round=lambda: on_rounds(1)) for run in runs]
    # A process with threads, such as those of a progress bar, must not be forked.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = [pool.submit(run_strategy, *run) for run in runs]
        try:
            for future in as_completed(futures):
                future.result()
                on_rounds(scenario.rounds)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]
