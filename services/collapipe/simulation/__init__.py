"""Pipelines of many clusters, event by event, driven by the same decisions as the real ones."""

from collapipe.simulation.results import (
    Interval,
    StrategySummary,
    summarize,
    write_devices,
    write_rounds,
)
from collapipe.simulation.rounds import RoundRecord, StrategyRun, run_strategy
from collapipe.simulation.runner import num_rounds, run_scenario
from collapipe.simulation.scenario import Scenario, read_scenario

__all__ = [
    "Interval",
    "RoundRecord",
    "Scenario",
    "StrategyRun",
    "StrategySummary",
    "num_rounds",
    "read_scenario",
    "run_scenario",
    "run_strategy",
    "summarize",
    "write_devices",
    "write_rounds",
]
