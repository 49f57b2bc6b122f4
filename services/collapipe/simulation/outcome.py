"""Simulates a round: the time, energy and memory that the services would measure.

`round_model.prediction` gives compute times, transfer times and energy, because these add up without
interaction. `collapipe.simulation.pipeline_events` simulates the time of a mini-batch, which depends on how stages
wait for each other.
"""

from dataclasses import dataclass
from itertools import pairwise

from collapipe.allocation.round_model.prediction import (
    ClusterPrediction,
    bubble_ratio,
    moved_units,
    predict,
)
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    RadioLink,
    RoundPlan,
    RoundProblem,
)
from collapipe.simulation.pipeline_events import (
    SimulatedLink,
    SimulatedPipeline,
    SimulatedStage,
    simulate,
)


@dataclass(frozen=True)
class ClusterOutcome:
    """One cluster.

    Args:
        mini_batch_seconds: T_n of docs/scheduling.md (5), simulated.
        round_seconds: Time of the round in this cluster, including the full time of moving units.
        bubble_ratio: docs/scheduling.md (7) with the simulated time.
        moved_units: Number of units that changed their host.
    """

    mini_batch_seconds: float
    round_seconds: float
    bubble_ratio: float
    moved_units: int


@dataclass(frozen=True)
class RoundOutcome:
    """One round.

    Args:
        seconds: docs/scheduling.md (6) with simulated mini-batches, and with T_migrate not divided by the
            horizon.
        energy_joules: Energy of every host that took part: docs/scheduling.md (8), (9).
        memory_bytes: Largest memory of every host that took part: docs/scheduling.md (10) with the
            micro-batches that its stages really held, which may be fewer than their windows.
    """

    seconds: float
    clusters: tuple[ClusterOutcome, ...]
    energy_joules: dict[str, float]
    memory_bytes: dict[str, float]

    @property
    def slowest(self) -> int:
        """Index of the cluster that takes longest."""
        return max(range(len(self.clusters)), key=lambda i: self.clusters[i].round_seconds)


def run_round(
    problem: RoundProblem, plans: RoundPlan, *, forward_share: float = 1 / 3, num_steps: int = 1
) -> RoundOutcome:
    """Simulates a round with feasible plans.

    Args:
        problem: The true conditions of the round, not the conditions that telemetry reports.
        forward_share: Share of the compute time that the forward pass takes.
        num_steps: Number of mini-batches to simulate. The others are assumed to take the same time.
    """
    prediction = predict(problem, plans)
    num_steps = min(num_steps, problem.local_steps)
    parts = list(zip(problem.clusters, plans, prediction.clusters, strict=True))
    runs = simulate([_pipeline(problem, *part, forward_share, num_steps) for part in parts])
    clusters = []
    memory: dict[str, float] = {}
    for (cluster, plan, predicted), run in zip(parts, runs, strict=True):
        mini_batch_seconds = run.seconds / num_steps
        seconds = (
            problem.local_steps * mini_batch_seconds
            + predicted.gather_seconds
            + predicted.migrate_seconds
            + cluster.upload_seconds
        )
        computes = [stage.compute_seconds for stage in predicted.stages]
        bubble = bubble_ratio(plan.num_micro_batches, computes, mini_batch_seconds)
        moved = 0
        for stage, held in zip(plan.stages, run.peak_in_flight, strict=True):
            units = (stage.start_unit, stage.stop_unit)
            moved += moved_units(cluster, stage.host_id, *units)
            memory.setdefault(stage.host_id, cluster.hosts[stage.host_id].base_bytes)
            memory[stage.host_id] += problem.model.memory_bytes(
                *units, held, problem.mini_batch / plan.num_micro_batches
            )
        clusters.append(ClusterOutcome(mini_batch_seconds, seconds, bubble, moved))
    slowest = max(cluster.round_seconds for cluster in clusters)
    return RoundOutcome(
        slowest + problem.fixed_seconds, tuple(clusters), prediction.energy_joules, memory
    )


def _pipeline(
    problem: RoundProblem,
    cluster: ClusterProblem,
    plan: ClusterPlan,
    predicted: ClusterPrediction,
    forward_share: float,
    num_steps: int,
) -> SimulatedPipeline:
    stages = tuple(
        SimulatedStage(
            forward_share * times.compute_seconds,
            (1 - forward_share) * times.compute_seconds,
            stage.in_flight,
            stage.host_id,
        )
        for stage, times in zip(plan.stages, predicted.stages, strict=True)
    )
    links = tuple(
        SimulatedLink(
            times.forward_seconds,
            times.backward_seconds,
            times.round_trip_seconds / 2,
            isinstance(cluster.links.get((sender.host_id, receiver.host_id)), RadioLink),
        )
        for (sender, receiver), times in zip(pairwise(plan.stages), predicted.links, strict=True)
    )
    num_micro_batches = plan.num_micro_batches
    if problem.update_per_micro_batch:  # Each micro-batch is then a mini-batch of its own.
        num_micro_batches, num_steps = 1, num_steps * num_micro_batches
    return SimulatedPipeline(stages, links, num_micro_batches, num_steps, cluster.step_seconds)
