"""Simulates strategies on many clusters, event by event.

The scheduler and the simulator decide with the same functions, those of `collapipe.allocation`.

Reading order:

1. `scenario`: the TOML file. `simulated_system`: the hosts and links that it describes, with
   `radio_propagation` and `transformer_costs`.
2. `rounds`: all runs of a scenario, and the rounds of one strategy with one seed.
3. `outcome`: one simulated round. `pipeline_events`: the event simulation of its mini-batches.
4. `records` and `results`: the data of the runs, and files and summaries.
"""

from collapipe.simulation.records import StrategyRun as StrategyRun
from collapipe.simulation.results import Interval as Interval
from collapipe.simulation.results import StrategySummary as StrategySummary
from collapipe.simulation.results import summarize as summarize
from collapipe.simulation.results import write_devices as write_devices
from collapipe.simulation.results import write_rounds as write_rounds
from collapipe.simulation.rounds import num_rounds as num_rounds
from collapipe.simulation.rounds import run_scenario as run_scenario
from collapipe.simulation.rounds import run_strategy as run_strategy
from collapipe.simulation.scenario import Scenario as Scenario
from collapipe.simulation.scenario import read_scenario as read_scenario
