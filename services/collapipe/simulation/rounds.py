"""Rounds of a strategy in a world: what it is told, what it decides, what comes of it, and what that leaves in the queues."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collapipe.allocation.round_model.prediction import convergence_term, predict, violations
from collapipe.allocation.round_model.problem import RoundPlan, RoundProblem
from collapipe.allocation.round_model.virtual_queue import VirtualQueue
from collapipe.allocation.strategies import strategy_for
from collapipe.errors import InfeasibleError
from collapipe.simulation.outcome import RoundOutcome, run_round
from collapipe.simulation.scenario import Scenario
from collapipe.simulation.world import ChannelConditions, World

Decide = Callable[[RoundProblem, RoundPlan | None], RoundPlan]

_TRIAL_ROUNDS = 4  # in which a baseline tries each number of micro-batches, before round 0
_TRIALS_FROM = 1_000_000_000  # their round indices: conditions that no round has


@dataclass(frozen=True)
class RoundRecord:
    """One round.

    Args:
        round_index: Which.
        reason: Why there is no feasible plan; empty when there is one. Without one, what follows is 0.
        delay_seconds: As simulated.
        predicted_seconds: As the strategy was told: design (6) on what telemetry knew.
        energy_joules_mean: Of a device, those that did nothing included.
        energy_over_budget_max: Energy over budget of the device where that is largest.
        backlog_mean, backlog_max: Of devices with a budget, after the round.
        memory_bytes_max: Of the device that needs most.
        bubble_ratio, num_micro_batches, num_segments: Of the cluster that the others wait for.
        moved_units: That changed hands, in all clusters.
        objective: Design (13), with the simulated delay.
        decision_seconds: What deciding took.
    """

    round_index: int
    reason: str = ""
    delay_seconds: float = 0.0
    predicted_seconds: float = 0.0
    energy_joules_mean: float = 0.0
    energy_over_budget_max: float = 0.0
    backlog_mean: float = 0.0
    backlog_max: float = 0.0
    memory_bytes_max: float = 0.0
    bubble_ratio: float = 0.0
    num_micro_batches: int = 0
    num_segments: int = 0
    moved_units: int = 0
    objective: float = 0.0
    decision_seconds: float = 0.0

    @property
    def feasible(self) -> bool:
        """Whether there was a plan."""
        return not self.reason


@dataclass
class DeviceRecord:
    """One device over all feasible rounds.

    Args:
        host_id: Which.
        energy_budget_joules: Of a round; `None` is mains.
        energy_joules: In all rounds together.
        backlog: At the end.
        memory_bytes_max: In the round that needed most.
        blocks: In all rounds together.
        num_rounds: Feasible ones.
    """

    host_id: str
    energy_budget_joules: float | None
    energy_joules: float = 0.0
    backlog: float = 0.0
    memory_bytes_max: float = 0.0
    blocks: int = 0
    num_rounds: int = 0

    @property
    def mean_energy_joules(self) -> float:
        """Of a round."""
        return self.energy_joules / self.num_rounds if self.num_rounds else 0.0


@dataclass(frozen=True)
class StrategyRun:
    """All rounds of a strategy in one world.

    Args:
        strategy: Its name.
        seed: Of the world.
        value: Of the swept parameter; `None` when nothing is swept.
        rounds: In order; a single one where no number of micro-batches is feasible.
        devices: In order.
    """

    strategy: str
    seed: int
    value: float | None
    rounds: list[RoundRecord]
    devices: list[DeviceRecord]


def run_strategy(
    scenario: Scenario,
    strategy: str,
    seed: int,
    value: float | None = None,
    on_round: Callable[[], None] = lambda: None,
) -> StrategyRun:
    """Runs all rounds of a scenario without a sweep.

    A plan that breaks a limit is recorded as infeasible, as is no plan at all; the round then does not take place.

    Args:
        scenario: Of `Scenario.points`.
        strategy: Its name.
        seed: Of the world.
        value: That the swept parameter has in this scenario.
        on_round: Called after every round.
    """
    world = World(scenario, seed)
    try:
        options = _micro_batch_options(scenario, world, strategy)
    except InfeasibleError as error:
        for _ in range(scenario.rounds):
            on_round()
        devices = [DeviceRecord(d.host_id, d.energy_budget_joules) for d in world.devices]
        return StrategyRun(strategy, seed, value, [RoundRecord(0, str(error))], devices)
    rounds = _Rounds(scenario, world, options, _decider(strategy, scenario))
    records = []
    for round_index in range(scenario.rounds):
        try:
            records.append(rounds.run(round_index))
        except InfeasibleError as error:
            records.append(RoundRecord(round_index, str(error)))
        on_round()
    return StrategyRun(strategy, seed, value, records, rounds.devices)


class _Rounds:
    """What goes on from round to round: the plan in force, queues, and the devices' records."""

    def __init__(
        self, scenario: Scenario, world: World, options: tuple[int, ...], decide_round: Decide
    ) -> None:
        self._scenario = scenario
        self._world = world
        self._options = options
        self._decide = decide_round
        self._reference_seconds = reference_seconds(scenario, world)
        self._in_force: RoundPlan | None = None
        self._queues = {
            host.host_id: VirtualQueue(host.energy_budget_joules)
            for host in world.hosts
            if host.energy_budget_joules is not None
        }
        self.devices = [DeviceRecord(d.host_id, d.energy_budget_joules) for d in world.devices]

    def run(self, round_index: int) -> RoundRecord:
        """Runs a round; raises `InfeasibleError`, and then nothing has changed."""
        world, drawn = self._world, self._world.draw(round_index)
        # who decides knows the interference of the plans in force, and not that of what is decided
        heard = world.as_known(world.with_interference(drawn, self._in_force), round_index)
        known = self._problem(heard, round_index)
        started = time.perf_counter()
        plans = _feasible(known, self._decide(known, self._in_force))
        decision_seconds = time.perf_counter() - started
        actual = self._problem(world.with_interference(drawn, plans), round_index)
        outcome = run_round(
            actual,
            plans,
            forward_share=world.forward_share,
            num_steps=self._scenario.training.simulated_steps,
        )
        self._in_force = plans
        self._queues = {
            host_id: queue.after(outcome.energy_joules.get(host_id, 0.0))
            for host_id, queue in self._queues.items()
        }
        over, memory = self._observe_devices(plans, outcome)
        backlogs = [queue.backlog for queue in self._queues.values()]
        slowest = outcome.slowest
        return RoundRecord(
            round_index=round_index,
            delay_seconds=outcome.seconds,
            predicted_seconds=predict(known, plans).round_seconds,
            energy_joules_mean=_mean(
                [outcome.energy_joules.get(device.host_id, 0.0) for device in self.devices]
            ),
            energy_over_budget_max=over,
            backlog_mean=_mean(backlogs),
            backlog_max=max(backlogs, default=0.0),
            memory_bytes_max=memory,
            bubble_ratio=outcome.clusters[slowest].bubble_ratio,
            num_micro_batches=plans[slowest].num_micro_batches,
            num_segments=len(plans[slowest].segments),
            moved_units=sum(cluster.moved_units for cluster in outcome.clusters),
            objective=_objective(actual, plans, outcome),
            decision_seconds=decision_seconds,
        )

    def _problem(self, conditions: ChannelConditions, round_index: int) -> RoundProblem:
        return self._world.problem(
            conditions,
            round_index=round_index,
            previous=self._in_force,
            backlogs={host_id: queue.backlog for host_id, queue in self._queues.items()},
            micro_batch_options=self._options,
            reference_seconds=self._reference_seconds,
        )

    def _observe_devices(self, plans: RoundPlan, outcome: RoundOutcome) -> tuple[float, float]:
        """Adds a round to the devices' records; the largest energy over budget, and the most memory."""
        blocks = {
            host_id: segment.num_blocks
            for plan in plans
            for host_id, segment in plan.segments.items()
        }
        over, most = 0.0, 0.0
        for device in self.devices:
            joules = outcome.energy_joules.get(device.host_id, 0.0)
            memory = outcome.memory_bytes.get(device.host_id, 0.0)
            device.num_rounds += 1
            device.energy_joules += joules
            device.memory_bytes_max = max(device.memory_bytes_max, memory)
            device.blocks += blocks.get(device.host_id, 0)
            most = max(most, memory)
            if device.energy_budget_joules is not None:
                device.backlog = self._queues[device.host_id].backlog
                over = max(over, joules / device.energy_budget_joules)
        return over, most


def reference_seconds(scenario: Scenario, world: World) -> float:
    """tau_ref: predicted delay of `pipeline`, with its best M, on nominal values.

    Where `pipeline` is infeasible, the first of `proportional` and `dssra` that is not stands in for it.

    Raises:
        InfeasibleError: None is feasible.
    """
    for strategy in ("pipeline", "proportional"):
        try:
            options = _micro_batch_options(scenario, world, strategy)
        except InfeasibleError:
            continue
        problem = world.problem(world.nominal(), micro_batch_options=options)
        return predict(problem, strategy_for(strategy)(problem)).round_seconds
    problem = world.problem(world.nominal())
    return predict(problem, strategy_for("dssra")(problem)).round_seconds


def _decider(strategy: str, scenario: Scenario) -> Decide:
    if strategy != "dssra":
        fixed = strategy_for(strategy)
        return lambda problem, in_force: fixed(problem)
    # cvxpy takes a second to import: only who needs it waits
    from collapipe.allocation.search.dssra import decide

    hysteresis = scenario.schedule.hysteresis
    return lambda problem, in_force: decide(problem, in_force, hysteresis=hysteresis).plans


def _micro_batch_options(scenario: Scenario, world: World, strategy: str) -> tuple[int, ...]:
    """What M may be: for a baseline the one with which some rounds before the first were shortest, for `dssra` all.

    Raises:
        InfeasibleError: A baseline has no feasible plan whatever M is.
    """
    options = scenario.training.micro_batch_options
    if strategy == "dssra" or len(options) == 1:
        return options
    place = strategy_for(strategy)
    draws = [world.draw(_TRIALS_FROM + i) for i in range(_TRIAL_ROUNDS)]
    seconds: dict[int, float] = {}
    reason = ""
    for option in options:
        try:
            total = 0.0
            for draw in draws:
                problem = world.problem(draw, micro_batch_options=(option,))
                plans = _feasible(problem, place(problem))
                total += run_round(problem, plans, forward_share=world.forward_share).seconds
            seconds[option] = total
        except InfeasibleError as error:
            reason = str(error)
    if not seconds:
        raise InfeasibleError(reason)
    return (min(seconds, key=lambda option: seconds[option]),)


def _feasible(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    broken = violations(problem, plans)
    if broken:
        raise InfeasibleError("; ".join(broken))
    return plans


def _objective(problem: RoundProblem, plans: RoundPlan, outcome: RoundOutcome) -> float:
    """Design (13), with what came of the plans."""
    hosts = {host.host_id: host for c in problem.clusters for host in c.hosts.values()}
    drift = sum(
        hosts[host_id].joule_weight * joules for host_id, joules in outcome.energy_joules.items()
    )
    weight = problem.convergence.weight
    term = weight * convergence_term(problem, plans) if weight else 0.0
    return problem.penalty_weight * (outcome.seconds / problem.reference_seconds + term) + drift


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
