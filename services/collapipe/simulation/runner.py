"""All runs of a scenario: every value of its sweep, every strategy, every seed."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from collapipe.simulation.rounds import StrategyRun, run_strategy
from collapipe.simulation.scenario import Scenario


def num_rounds(scenario: Scenario) -> int:
    """Rounds of all runs together."""
    runs = len(scenario.points()) * len(scenario.strategies) * len(scenario.seed_list)
    return runs * scenario.rounds


def run_scenario(
    scenario: Scenario, *, jobs: int = 1, on_rounds: Callable[[int], None] = lambda count: None
) -> list[StrategyRun]:
    """Runs everything; results do not depend on how many processes share the work.

    Args:
        scenario: What to run.
        jobs: Processes.
        on_rounds: Told how many rounds more are done.

    Returns:
        By value, strategy and seed, in the scenario's order.
    """
    runs = list(_runs(scenario))
    if jobs == 1:
        return [
            run_strategy(point, strategy, seed, value, lambda: on_rounds(1))
            for point, strategy, seed, value in runs
        ]
    # spawned: a process that has threads (a progress bar) is not forked
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


def _runs(scenario: Scenario) -> Iterator[tuple[Scenario, str, int, float | None]]:
    for value, point in scenario.points():
        for strategy in scenario.strategies:
            for seed in scenario.seed_list:
                yield point, strategy, seed, value
