"""Runs a scenario, the rounds of one strategy, and the trial rounds of a baseline.

A round draws conditions, decides, simulates, and updates energy queues and batteries. A baseline cannot choose M
(docs/scheduling.md, "Strategies"). For a fair comparison it gets the M that suits it best in trials before the
first round.
"""

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from collapipe.allocation import backlogs_after, decide_round, reference_seconds, violations
from collapipe.allocation.round_model.prediction import convergence_term, penalty, predict
from collapipe.allocation.round_model.problem import RoundPlan, RoundProblem
from collapipe.errors import InfeasibleError
from collapipe.simulation.outcome import RoundOutcome, run_round
from collapipe.simulation.records import DeviceRecord, RoundRecord, StrategyRun
from collapipe.simulation.scenario import Scenario
from collapipe.simulation.simulated_system import RoundConditions, SimulatedSystem

ChangePlans = Callable[[RoundProblem, RoundPlan], RoundPlan]

_NUM_TRIALS = 4
_FIRST_TRIAL = 1_000_000_000
"""Round index of the first trial. No real round has such an index, so trials draw conditions of their own."""
_MAX_DECISIONS = 8
"""Decisions of a round until the interference settles."""
_SETTLED = 1e-3
"""Interference has settled if it changes the objective by at most this part."""


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


def run_strategy(
    scenario: Scenario,
    strategy: str,
    seed: int,
    value: float | None = None,
    on_round: Callable[[], None] = lambda: None,
    change: ChangePlans = lambda problem, plans: plans,
) -> StrategyRun:
    """Runs all rounds of a scenario with one strategy and one seed.

    A round is infeasible if the strategy finds no plan, or if its plan breaks a limit. Such a round is
    recorded, but it does not take place.

    Args:
        scenario: A scenario without a sweep; see `Scenario.points`.
        value: Value of the swept parameter in this scenario, for the record.
        change: Changes the plans of every decision before they run.
    """
    system = SimulatedSystem(scenario, seed)
    try:
        rounds = _Rounds(scenario, system, strategy, change)
    except InfeasibleError as error:
        for _ in range(scenario.rounds):
            on_round()
        return StrategyRun(
            strategy, seed, value, [RoundRecord(0, str(error))], _device_records(system)
        )
    records = []
    for round_index in range(scenario.rounds):
        try:
            records.append(rounds.run(round_index))
        except InfeasibleError as error:
            records.append(RoundRecord(round_index, str(error)))
        on_round()
    return StrategyRun(strategy, seed, value, records, rounds.devices)


class _Rounds:
    """The state between rounds: the previous plans, the backlogs and the records of the devices."""

    def __init__(
        self, scenario: Scenario, system: SimulatedSystem, strategy: str, change: ChangePlans
    ) -> None:
        self._scenario = scenario
        self._system = system
        self._strategy = strategy
        self._change = change
        self._options = _micro_batch_options(scenario, system, strategy)
        self._reference_seconds = _reference_seconds(scenario, system)
        self._previous: RoundPlan | None = None
        self._budgets = {
            host.host_id: host.energy_budget_joules
            for host in system.hosts
            if host.energy_budget_joules is not None
        }
        self._backlogs = dict.fromkeys(self._budgets, 0.0)
        self.devices = _device_records(system)

    def run(self, round_index: int) -> RoundRecord:
        """Runs a round. The state does not change if no plan is feasible.

        Raises:
            InfeasibleError: No plan is feasible.
        """
        system = self._system
        empty = [device.host_id for device in self.devices if device.empty_after is not None]
        drawn = system.without(system.draw(round_index), empty)
        started = time.perf_counter()
        known, plans = self._decide(drawn, round_index)
        decision_seconds = time.perf_counter() - started
        _check_feasible(known, plans)
        actual = self._problem(system.with_interference(drawn, plans), round_index)
        outcome = run_round(actual, plans, num_steps=self._scenario.training.simulated_steps)
        self._previous = plans
        self._backlogs = backlogs_after(self._backlogs, outcome.energy_joules, self._budgets)
        over_budget, memory_bytes = self._update_devices(round_index, plans, outcome)
        backlogs, slowest = list(self._backlogs.values()), outcome.slowest
        return RoundRecord(
            round_index=round_index,
            delay_seconds=outcome.seconds,
            predicted_seconds=predict(known, plans).full_round_seconds,
            energy_joules_mean=_mean(
                [outcome.energy_joules.get(device.host_id, 0.0) for device in self.devices]
            ),
            energy_over_budget_max=over_budget,
            backlog_mean=_mean(backlogs),
            backlog_max=max(backlogs, default=0.0),
            memory_bytes_max=memory_bytes,
            bubble_ratio=outcome.clusters[slowest].bubble_ratio,
            num_micro_batches=plans[slowest].num_micro_batches,
            num_segments=len(plans[slowest].segments),
            moved_units=sum(cluster.moved_units for cluster in outcome.clusters),
            objective=_objective(actual, plans, outcome),
            decision_seconds=decision_seconds,
        )

    def _decide(self, drawn: RoundConditions, round_index: int) -> tuple[RoundProblem, RoundPlan]:
        """Repeats the decision until the interference settles: docs/scheduling.md, "How a round is solved", 5.

        Returns the problem with the interference that the best plans cause, and these plans.
        """

        def heard(plans: RoundPlan | None) -> RoundProblem:
            conditions = self._system.with_interference(drawn, plans)
            return self._problem(self._system.as_known(conditions, round_index), round_index)

        problem, least, seen = heard(self._previous), math.inf, list[RoundPlan]()
        for _ in range(_MAX_DECISIONS):
            decision = decide_round(
                problem, self._strategy, hysteresis=self._scenario.schedule.hysteresis
            )
            plans = self._change(problem, decision.plans)
            if not self._system.clusters_interfere:
                return problem, plans
            assumed, problem = predict(problem, plans).objective, heard(plans)
            objective = predict(problem, plans).objective
            if objective <= least:
                least, best = objective, (problem, plans)
            if plans in seen or math.isclose(objective, assumed, rel_tol=_SETTLED):
                break
            seen.append(plans)
        return best

    def _problem(self, conditions: RoundConditions, round_index: int) -> RoundProblem:
        return self._system.problem(
            conditions,
            round_index=round_index,
            previous=self._previous,
            backlogs=self._backlogs,
            micro_batch_options=self._options,
            reference_seconds=self._reference_seconds,
        )

    def _update_devices(
        self, round_index: int, plans: RoundPlan, outcome: RoundOutcome
    ) -> tuple[float, float]:
        """Adds a round to the records. Returns the largest ratio of energy to budget, and the most memory."""
        blocks = {
            host_id: segment.num_blocks
            for plan in plans
            for host_id, segment in plan.segments.items()
        }
        over_budget, most_memory = 0.0, 0.0
        for device in self.devices:
            joules = outcome.energy_joules.get(device.host_id, 0.0)
            memory = outcome.memory_bytes.get(device.host_id, 0.0)
            device.num_rounds += 1
            device.energy_joules += joules
            device.memory_bytes_max = max(device.memory_bytes_max, memory)
            device.blocks += blocks.get(device.host_id, 0)
            most_memory = max(most_memory, memory)
            used_up = device.energy_joules >= (device.battery_joules or math.inf)
            if used_up and device.empty_after is None:
                device.empty_after = round_index + 1
            if device.energy_budget_joules is not None:
                device.backlog = self._backlogs[device.host_id]
                over_budget = max(over_budget, joules / device.energy_budget_joules)
        if not most_memory:  # No device runs a block: `centralized` has all on the control unit.
            most_memory = max(outcome.memory_bytes.values())
        return over_budget, most_memory


def _micro_batch_options(
    scenario: Scenario, system: SimulatedSystem, strategy: str
) -> tuple[int, ...]:
    """Returns the values of M that a strategy may use.

    `dssra` may use all values of the scenario. A baseline uses the value with the shortest trials.

    Raises:
        InfeasibleError: A baseline has no feasible plan with any M.
    """
    options = scenario.training.micro_batch_options
    if strategy == "dssra" or len(options) == 1:
        return options
    conditions = [system.draw(_FIRST_TRIAL + trial) for trial in range(_NUM_TRIALS)]
    seconds: dict[int, float] = {}
    reason = ""
    for option in options:
        try:
            total = 0.0
            for drawn in conditions:
                problem = system.problem(drawn, micro_batch_options=(option,))
                plans = decide_round(problem, strategy).plans
                _check_feasible(problem, plans)
                total += run_round(problem, plans).seconds
            seconds[option] = total
        except InfeasibleError as error:
            reason = str(error)
    if not seconds:
        raise InfeasibleError(reason)
    return (min(seconds, key=seconds.__getitem__),)


def _check_feasible(problem: RoundProblem, plans: RoundPlan) -> None:
    """Raises `InfeasibleError` if plans break a limit: baselines respect only some of them."""
    broken = violations(problem, plans)
    if broken:
        raise InfeasibleError("; ".join(broken))


def _reference_seconds(scenario: Scenario, system: SimulatedSystem) -> float:
    """Returns tau_ref of docs/scheduling.md (13) under nominal conditions.

    If no baseline has a plan, the round of `dssra` takes its place; without that, it is 1 s.
    """
    nominal = system.nominal()
    seconds = reference_seconds(
        lambda strategy: system.problem(
            nominal, micro_batch_options=_micro_batch_options(scenario, system, strategy)
        )
    )
    if seconds is not None:
        return seconds
    try:
        return decide_round(system.problem(nominal), "dssra").prediction.round_seconds
    except InfeasibleError:
        return 1.0


def _objective(problem: RoundProblem, plans: RoundPlan, outcome: RoundOutcome) -> float:
    """Returns the objective of docs/scheduling.md (13) with the simulated time and energy."""
    hosts = {host.host_id: host for c in problem.clusters for host in c.hosts.values()}
    drift = sum(
        hosts[host_id].joule_weight * joules for host_id, joules in outcome.energy_joules.items()
    )
    return penalty(problem, outcome.seconds, convergence_term(problem, plans)) + drift


def _device_records(system: SimulatedSystem) -> list[DeviceRecord]:
    return [
        DeviceRecord(
            device.host_id,
            device.energy_budget_joules,
            battery_joules=system.batteries.get(device.host_id),
        )
        for device in system.devices
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
