"""How long does a simulated round take if one part of a `dssra` decision is taken away, or one freedom is added?

    python -m benchmarks.ablation [SCENARIO.toml] [--seeds 8]     # without a scenario: heterogeneous.toml

Each row simulates `dssra` with one change. `M`, `codecs` and the rows with a plus change the problem, so the search
finds the best rest for them. The other changes are made to the plans that the search has decided, and these run:

- segments: `proportional` gives the blocks to the same devices in the same order, with the same M.
- order: the devices stand in the order of registration, each with as many blocks as before.
- bandwidth: the links of a channel have equal shares, as in every baseline.
- power: every link has full power.
- windows: those of 1F1B, which know no transfers. In all other rows, windows follow the plan that runs.

After a change of segments or order, shares and powers are solved again. The choice of devices cannot be taken away alone,
because other devices need other segments. The row `codecs` needs a scenario with several codecs.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from collapipe.allocation.round_model.in_flight_windows import classical_window
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    RoundPlan,
    RoundProblem,
)
from collapipe.allocation.search.local_changes import with_largest_windows
from collapipe.allocation.search.power import allocate, full_watts
from collapipe.allocation.search.segments import with_least_windows
from collapipe.allocation.strategies.balanced import place_proportionally
from collapipe.simulation import Scenario, StrategyRun, read_scenario, run_strategy
from collapipe.simulation.results import interval
from collapipe_client.scenario_files import read_scenario_file

SCENARIO = Path("clients/experiments/scenarios/heterogeneous.toml")
DEFAULT_MICRO_BATCHES = 8
"""The M of a job that sets none."""


def main(arguments: Sequence[str] = ()) -> None:
    """Simulates `dssra` as it is and with each change, on every seed of a scenario."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenario", nargs="?", type=Path, default=SCENARIO)
    parser.add_argument("--seeds", type=int, help="Number of seeds, instead of the scenario's.")
    options = parser.parse_args(arguments)
    document = read_scenario_file(options.scenario)
    if options.seeds is not None:
        document["seeds"] = options.seeds
    for value, scenario in read_scenario(document, str(options.scenario)).points():
        if value is not None:
            print(f"{document['sweep']['parameter']} {value:g}")
        _print_table(scenario)


def _print_table(scenario: Scenario) -> None:
    """Prints medians over the seeds on which `dssra` and the changed `dssra` have a feasible round."""
    print("taken away, or + added        round s   % of dssra (95 % interval)   infeasible rounds")
    whole: dict[int, float] = {}
    for name, run in _runs(scenario).items():
        runs = [run(seed) for seed in scenario.seed_list]
        seconds = {one.seed: mean for one in runs if (mean := _mean_seconds(one)) is not None}
        if name == "nothing":
            whole = seconds
        infeasible = 1 - sum(r.feasible for one in runs for r in one.rounds) / sum(
            len(one.rounds) for one in runs
        )
        shared = seconds.keys() & whole.keys()
        if not shared:
            print(f"{name:28} infeasible")
            continue
        percent = interval([100 * seconds[seed] / whole[seed] for seed in sorted(shared)])
        print(
            f"{name:28} {interval([*seconds.values()]).median:8.1f}   {percent.median:6.1f} "
            f"({percent.low:.1f} to {percent.high:.1f}) {infeasible:18.0%}",
            flush=True,
        )


def _runs(scenario: Scenario) -> dict[str, Callable[[int], StrategyRun]]:
    """Returns what simulates a seed, for each row of the table."""
    training = scenario.training

    def fixed_micro_batches(seed: int) -> StrategyRun:
        run = run_strategy(scenario, "proportional", seed)
        chosen = [r.num_micro_batches for r in run.rounds if r.feasible][:1]
        fixed = _with(scenario, "training", micro_batches=chosen or [default])
        return run_strategy(fixed, "dssra", seed)

    default = min(
        training.micro_batch_options, key=lambda option: abs(option - DEFAULT_MICRO_BATCHES)
    )
    runs: dict[str, Callable[[int], StrategyRun]] = {
        "nothing": partial(run_strategy, scenario, "dssra")
    }
    for name, change in (
        ("segments", with_proportional_segments),
        ("order", in_registration_order),
        ("bandwidth", with_equal_shares),
        ("power", at_full_power),
        ("windows", with_classical_windows),
    ):
        runs[name] = partial(run_strategy, scenario, "dssra", change=change)
    runs["M, that of `proportional`"] = fixed_micro_batches
    problems = {f"M, fixed at {default}": _with(scenario, "training", micro_batches=[default])}
    if len(training.codecs) > 1 or len(training.upload_codecs) > 1:
        problems["codecs"] = _with(
            scenario,
            "training",
            codecs=training.codecs[:1],
            upload_codecs=training.upload_codecs[:1],
        )
    control_units = _with(scenario, "schedule", blocks_on_control_unit=True)
    problems |= {
        "+ blocks on control units": control_units,
        "+ blocks on every host": _with(control_units, "schedule", blocks_on_edge_server=True),
        "+ half blocks": _with(scenario, "model", half_blocks=True),
        "+ split backward": _with(scenario, "model", split_backward=True),
        "+ recomputation": _with(scenario, "model", recompute="auto"),
        "+ int8 on links": _with(
            scenario, "training", codecs=[*dict.fromkeys((*training.codecs, "int8"))]
        ),
    }
    return runs | {
        name: partial(run_strategy, changed, "dssra") for name, changed in problems.items()
    }


def with_proportional_segments(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Places the blocks in proportion to speed, on the same devices in the same order.

    Raises:
        InfeasibleError: The memory of the devices cannot hold the model with the windows of `proportional`.
    """
    changed = []
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        own = replace(
            cluster,
            devices=tuple(cluster.hosts[stage.host_id] for stage in plan.stages[1:-1]),
            micro_batch_options=(plan.num_micro_batches,),
        )
        stages = place_proportionally(problem, own)
        changed.append(replace(plan, stages=stages, links=plan.links[: len(stages) - 1]))
    return _settled(problem, tuple(changed))


def in_registration_order(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Sorts the devices by registration. Each keeps its number of blocks."""
    return _settled(problem, tuple(map(_sorted, problem.clusters, plans)))


def _sorted(cluster: ClusterProblem, plan: ClusterPlan) -> ClusterPlan:
    first, *between, last = plan.stages
    position = {device.host_id: index for index, device in enumerate(cluster.devices)}
    stages, start = [first], first.stop_unit
    for stage in sorted(between, key=lambda stage: position[stage.host_id]):
        stop = start + stage.stop_unit - stage.start_unit
        stages.append(replace(stage, start_unit=start, stop_unit=stop))
        start = stop
    return replace(plan, stages=(*stages, last))


def with_equal_shares(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Splits every channel equally among its links."""
    channels = [cluster.channel for cluster in problem.clusters]
    changed = []
    for plan, channel in zip(plans, channels, strict=True):
        if channel is not None:
            users = zip(plans, channels, strict=True)
            num_links = sum(len(other.links) for other, used in users if used == channel)
            share = problem.channels[channel] / num_links
            plan = replace(plan, links=tuple(replace(link, share=share) for link in plan.links))
        changed.append(plan)
    return _with_windows(problem, tuple(changed))


def at_full_power(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Gives all directions full power. A device that sends to both neighbours divides it equally."""
    changed = []
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        watts = [full_watts(cluster, stage.host_id) for stage in plan.stages]
        links = tuple(
            replace(link, forward_watts=forward, backward_watts=backward)
            for link, (forward, backward) in zip(plan.links, pairwise(watts), strict=True)
        )
        changed.append(replace(plan, links=links))
    return _with_windows(problem, tuple(changed))


def with_classical_windows(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Gives every stage but the last the window of 1F1B, if that is smaller than its own."""
    changed = []
    for plan in plans:
        count, stages = len(plan.stages), list(plan.stages)
        for k, stage in enumerate(stages[:-1]):
            window = classical_window(problem, plan.num_micro_batches, count - 1 - k)
            stages[k] = replace(stage, in_flight=min(stage.in_flight, window))
        changed.append(replace(plan, stages=tuple(stages)))
    return tuple(changed)


def _settled(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Returns the plans with the shares, powers and windows that `dssra` gives to their placement."""
    wide = with_largest_windows(problem, plans)
    return with_least_windows(problem, allocate(problem, wide).plans)


def _with_windows(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    return with_least_windows(problem, with_largest_windows(problem, plans))


def _with(scenario: Scenario, section: str, **changes: object) -> Scenario:
    changed = getattr(scenario, section).model_copy(update=changes)
    return scenario.model_copy(update={section: changed})


def _mean_seconds(run: StrategyRun) -> float | None:
    """Returns the mean time of the feasible rounds. `None` if there are none."""
    seconds = [record.delay_seconds for record in run.rounds if record.feasible]
    return sum(seconds) / len(seconds) if seconds else None


if __name__ == "__main__":
    main(sys.argv[1:])
