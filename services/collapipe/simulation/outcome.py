"""What a round's plans lead to in a simulated world: what the services would measure.

Seconds of passes, transfers, hand-overs, and energy are sums that nothing interacts in, so design (2), (3), (6), (8) and (9)
are taken from `collapipe.allocation.round_model.prediction`. What a mini-batch takes is not: it is simulated.
"""

from dataclasses import dataclass

from collapipe.allocation.round_model.prediction import ClusterPrediction, moved_blocks, predict
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    RadioLink,
    RoundPlan,
    RoundProblem,
)
from collapipe.simulation.pipeline import (
    SimulatedLink,
    SimulatedPipeline,
    SimulatedStage,
    simulate,
)


@dataclass(frozen=True)
class ClusterOutcome:
    """One cluster.

    Args:
        mini_batch_seconds: T_n, simulated.
        round_seconds: Its part of the round, hand-overs included.
        bubble_ratio: Design (7), with the simulated time.
        moved_units: Units that changed hands.
    """

    mini_batch_seconds: float
    round_seconds: float
    bubble_ratio: float
    moved_units: int


@dataclass(frozen=True)
class RoundOutcome:
    """A round.

    Args:
        seconds: The round's delay: design (6), with simulated mini-batches and what was moved paid at once.
        clusters: In cluster order.
        energy_joules: Of every host that took part: design (8), (9).
        memory_bytes: The same, at its highest: design (10) with what windows held, which may be less than they may.
    """

    seconds: float
    clusters: tuple[ClusterOutcome, ...]
    energy_joules: dict[str, float]
    memory_bytes: dict[str, float]

    @property
    def slowest(self) -> int:
        """Index of the cluster that the others wait for."""
        return max(range(len(self.clusters)), key=lambda i: self.clusters[i].round_seconds)


def run_round(
    problem: RoundProblem, plans: RoundPlan, *, forward_share: float = 1 / 3, num_steps: int = 1
) -> RoundOutcome:
    """Runs a round in the world that a problem describes.

    Args:
        problem: The world as it is, not as the scheduler sees it.
        plans: A feasible decision.
        forward_share: Of a pass forward and backward, what forward takes.
        num_steps: Mini-batches that are simulated; the round's are taken to be like them.
    """
    parts = predict(problem, plans).clusters
    num_steps = min(num_steps, problem.local_steps)
    pipelines = [
        simulated_pipeline(problem, index, plans[index], parts[index], forward_share, num_steps)
        for index in range(len(plans))
    ]
    clusters = []
    energy: dict[str, float] = {}
    memory: dict[str, float] = {}
    for index, run in enumerate(simulate(pipelines)):
        cluster, plan, part = problem.clusters[index], plans[index], parts[index]
        clusters.append(_cluster_outcome(problem, cluster, plan, part, run.seconds / num_steps))
        for stage, predicted, held in zip(
            plan.stages, part.stages, run.peak_in_flight, strict=True
        ):
            name = stage.host_id
            needed = problem.model.memory_bytes(
                stage.start_unit,
                stage.stop_unit,
                held,
                problem.mini_batch / plan.num_micro_batches,
            )
            memory.setdefault(name, cluster.hosts[name].base_bytes)
            memory[name] += needed
            energy[name] = energy.get(name, 0.0) + predicted.energy_joules
    slowest = max(cluster.round_seconds for cluster in clusters)
    return RoundOutcome(slowest + problem.fixed_seconds, tuple(clusters), energy, memory)


def simulated_pipeline(
    problem: RoundProblem,
    index: int,
    plan: ClusterPlan,
    part: ClusterPrediction,
    forward_share: float,
    num_steps: int,
) -> SimulatedPipeline:
    """Makes a cluster's pipeline of its plan; of the prediction it takes seconds of passes and transfers only."""
    cluster = problem.clusters[index]
    stages = tuple(
        SimulatedStage(
            forward_share * predicted.compute_seconds,
            (1 - forward_share) * predicted.compute_seconds,
            stage.in_flight,
            stage.host_id,
        )
        for stage, predicted in zip(plan.stages, part.stages, strict=True)
    )
    links = tuple(
        SimulatedLink(
            link.forward_seconds,
            link.backward_seconds,
            link.round_trip_seconds / 2,
            isinstance(
                cluster.links.get((plan.stages[i].host_id, plan.stages[i + 1].host_id)), RadioLink
            ),
        )
        for i, link in enumerate(part.links)
    )
    if problem.update_per_micro_batch:  # each micro-batch is flushed and steps
        return SimulatedPipeline(
            stages, links, 1, num_steps * plan.num_micro_batches, cluster.step_seconds
        )
    return SimulatedPipeline(stages, links, plan.num_micro_batches, num_steps, cluster.step_seconds)


def _cluster_outcome(
    problem: RoundProblem,
    cluster: ClusterProblem,
    plan: ClusterPlan,
    part: ClusterPrediction,
    mini_batch_seconds: float,
) -> ClusterOutcome:
    seconds = (
        problem.local_steps * mini_batch_seconds
        + part.gather_seconds
        + part.migrate_seconds
        + cluster.upload_seconds
    )
    computing = plan.num_micro_batches * sum(stage.compute_seconds for stage in part.stages)
    bubble = 1.0
    if mini_batch_seconds:
        bubble -= computing / (len(plan.stages) * mini_batch_seconds)
    moved = sum(
        moved_blocks(cluster, stage.host_id, stage.start_unit, stage.stop_unit)
        for stage in plan.stages
    )
    return ClusterOutcome(mini_batch_seconds, seconds, bubble, moved)
