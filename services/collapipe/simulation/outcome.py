"""Simulates a round: the time, energy and memory that the services would measure.

`round_model.prediction` gives compute times, transfer times and energy, because these add up without
interaction. `collapipe.simulation.pipeline_events` simulates the time of a mini-batch, which depends on how stages
wait for each other. The weights of all hosts move at once, over the links of the round.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from collapipe.allocation.round_model.prediction import (
    ClusterPrediction,
    bubble_ratio,
    idle_joules,
    predict,
    stage_seconds,
)
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    RadioLink,
    RoundPlan,
    RoundProblem,
)
from collapipe.allocation.round_model.weights_transfer import (
    moved_states,
    moved_units,
    sending_seconds,
)
from collapipe.codec_table import UPLOAD_CODECS
from collapipe.simulation.pipeline_events import (
    SimulatedLink,
    SimulatedPipeline,
    SimulatedStage,
    simulate,
)
from collapipe.work_shares import FORWARD_SHARE


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
        seconds: docs/scheduling.md (6) with simulated mini-batches, with T_migrate not divided by the
            horizon, and with transfers of weights that overlap where links are separate.
        energy_joules: Energy of every host that took part or has idle power: docs/scheduling.md (8), (9).
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


def run_round(problem: RoundProblem, plans: RoundPlan, *, num_steps: int = 1) -> RoundOutcome:
    """Simulates a round with feasible plans.

    Args:
        problem: The true conditions of the round, not the conditions that telemetry reports.
        num_steps: Number of mini-batches to simulate. The others are assumed to take the same time.
    """
    prediction = predict(problem, plans)
    num_steps = min(num_steps, problem.local_steps)
    parts = list(zip(problem.clusters, plans, prediction.clusters, strict=True))
    runs = simulate([_pipeline(problem, *part, num_steps) for part in parts])
    clusters = []
    memory: dict[str, float] = {}
    for (cluster, plan, predicted), run in zip(parts, runs, strict=True):
        mini_batch_seconds = run.seconds / num_steps
        seconds = problem.local_steps * mini_batch_seconds + _weights_seconds(
            problem, cluster, plan
        )
        computes = [stage.compute_seconds for stage in predicted.stages]
        bubble = bubble_ratio(plan.num_parts, computes, mini_batch_seconds)
        moved = 0
        for stage, held in zip(plan.stages, run.peak_in_flight, strict=True):
            units = (stage.start_unit, stage.stop_unit)
            moved += moved_units(cluster, stage.host_id, *units)
            memory.setdefault(stage.host_id, cluster.hosts[stage.host_id].base_bytes)
            memory[stage.host_id] += problem.model.memory_bytes(
                *units,
                math.ceil(held / plan.num_slices),
                problem.mini_batch / plan.num_micro_batches,
                num_slices=plan.num_slices,
                recompute=stage.recompute,
            )
        clusters.append(ClusterOutcome(mini_batch_seconds, seconds, bubble, moved))
    seconds = max(cluster.round_seconds for cluster in clusters) + problem.fixed_seconds
    energy = replace(prediction, idle_joules=idle_joules(problem, seconds)).energy_joules
    return RoundOutcome(seconds, tuple(clusters), energy, memory)


def _weights_seconds(problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan) -> float:
    """Returns the time in which hosts fetch their units before the training, and push them after it."""
    edge_server = cluster.edge_server.host_id
    pushes, fetches = [], []
    ratio = UPLOAD_CODECS[plan.upload_codec].bytes_ratio
    for stage in plan.stages:
        units = (stage.start_unit, stage.stop_unit)
        moved = moved_states(problem, cluster, cluster.hosts[stage.host_id], *units)
        fetches += [(sender, stage.host_id, num_bytes) for sender, num_bytes in moved]
        if stage.host_id != edge_server:
            weights = problem.model.weights_bytes(*units)
            pushes.append((stage.host_id, edge_server, ratio * weights))
            if len(problem.clusters) > 1:
                fetches.append((edge_server, stage.host_id, weights))
    push_seconds = _transfer_seconds(problem, cluster, pushes)
    if plan.uploads:
        push_seconds = max(seconds for seconds, _ in sending_seconds(problem, cluster, plan))
    return push_seconds + _transfer_seconds(problem, cluster, fetches)


def _transfer_seconds(
    problem: RoundProblem, cluster: ClusterProblem, transfers: Iterable[tuple[str, str, float]]
) -> float:
    """Returns the time of transfers (sender, receiver, bytes) that start together.

    Transfers on separate wires overlap. What shares a channel takes turns, on radios with full power.
    """
    channel = problem.channels.get(cluster.channel or "", math.inf)
    turns, wires = 0.0, dict[tuple[str, str], float]()
    for sender, receiver, num_bytes in transfers:
        if not num_bytes:
            continue
        link, bits = cluster.links[sender, receiver], 8 * num_bytes
        if isinstance(link, RadioLink):
            turns += bits / link.rate_bps(channel, cluster.hosts[sender].max_transmit_watts)
        else:
            turns += bits / channel
            seconds = wires.get((sender, receiver), 0.0) + bits / link.capacity_bps
            wires[sender, receiver] = seconds
    return max(turns, *wires.values(), 0.0)


def _pipeline(
    problem: RoundProblem,
    cluster: ClusterProblem,
    plan: ClusterPlan,
    predicted: ClusterPrediction,
    num_steps: int,
) -> SimulatedPipeline:
    stages, once = [], stage_seconds(problem, cluster, plan, recompute=False)
    for stage, times, seconds in zip(plan.stages, predicted.stages, once, strict=True):
        forward = FORWARD_SHARE * seconds
        backward = times.compute_seconds - forward - times.deferred_seconds
        stages.append(
            SimulatedStage(
                forward,
                backward,
                stage.in_flight * plan.num_slices,
                stage.host_id,
                times.deferred_seconds,
            )
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
    num_parts = plan.num_parts
    if problem.update_per_micro_batch:  # Each micro-batch is then a mini-batch of its own.
        num_parts, num_steps = 1, num_steps * num_parts
    return SimulatedPipeline(
        tuple(stages), links, num_parts, num_steps, cluster.step_seconds, plan.num_slices
    )
