"""Predicts a round from its plans: delay, energy, memory, convergence and the objective.

Numbers in brackets are equations of docs/scheduling.md. The search may compute with shortcuts, but the plan
that it returns is worth what `predict` says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Host,
    LinkPlan,
    RadioLink,
    RoundPlan,
    RoundProblem,
    StagePlan,
)
from collapipe.allocation.round_model.weights_transfer import (
    WeightsSeconds,
    coding_seconds,
    sending_seconds,
    transfer_seconds,
    weights_seconds,
)
from collapipe.codec_table import CODECS, UPLOAD_CODECS


@dataclass(frozen=True)
class StagePrediction:
    """One stage.

    Args:
        compute_seconds: Time of one micro-batch, or of one slice of it, forward and backward: c_k of (2).
        deferred_seconds: The part of it that other stages do not wait for: d_k of (4).
        window_seconds: The time of a micro-batch or a slice if the window of (4) limits the stage. 0 if it cannot.
        memory_bytes: Memory of the host for this stage, its `base_bytes` included: (10).
        energy_joules: Energy of a round for computing and sending: (8), (9).
    """

    host_id: str
    compute_seconds: float
    deferred_seconds: float
    window_seconds: float
    memory_bytes: float
    energy_joules: float


@dataclass(frozen=True)
class LinkPrediction:
    """One link, in seconds for one micro-batch or slice: (3). `load_seconds` is the time for which the link is busy."""

    forward_seconds: float
    backward_seconds: float
    round_trip_seconds: float
    load_seconds: float

    @property
    def loop_seconds(self) -> float:
        """The part of the link in the latency loops of (4)."""
        return self.forward_seconds + self.backward_seconds + self.round_trip_seconds

    @property
    def busiest(self) -> str:
        """The direction that decides for how long the link is busy; "link" if both do."""
        there, back = self.forward_seconds, self.backward_seconds
        if self.load_seconds > max(there, back) or there == back:
            return "link"
        return "forward link" if there > back else "backward link"


@dataclass(frozen=True)
class ClusterPrediction:
    """One cluster.

    Args:
        stages, links: In pipeline order. Link i leads from stage i to stage i + 1.
        bottleneck_seconds: Time between two micro-batches, or two slices, in the steady state: the maximum of (5).
        bottleneck: Name of the part that limits: "stage 2", "forward link 1", "backward link 1",
            "link 1" for both directions, "window 0" or "edge server".
        mini_batch_seconds: T_n of (5).
        push_seconds, fetch_seconds: T_push and T_fetch of (6).
        migrate_seconds: T_migrate of (6), before it is divided by the horizon.
        round_seconds: The part of this cluster in (6).
        bubble_ratio: beta of (7).
    """

    stages: tuple[StagePrediction, ...]
    links: tuple[LinkPrediction, ...]
    bottleneck_seconds: float
    bottleneck: str
    mini_batch_seconds: float
    push_seconds: float
    fetch_seconds: float
    migrate_seconds: float
    round_seconds: float
    bubble_ratio: float


@dataclass(frozen=True)
class RoundPrediction:
    """The whole round.

    Args:
        round_seconds: tau of (6).
        full_round_seconds: tau with the full time of migration: how long this round takes.
        convergence_term: Phi of (11).
        penalty, drift: The two parts of the objective (13).
        idle_joules: Idle energy of each host during tau: (8). Hosts without idle power are left out.
    """

    clusters: tuple[ClusterPrediction, ...]
    round_seconds: float
    full_round_seconds: float
    convergence_term: float
    penalty: float
    drift: float
    idle_joules: Mapping[str, float] = field(default_factory=dict)

    @property
    def objective(self) -> float:
        """The value that a decision minimises: (13)."""
        return self.penalty + self.drift

    @property
    def energy_joules(self) -> dict[str, float]:
        """Energy of each host in the round, summed over the clusters that it serves."""
        energy = dict(self.idle_joules)
        for cluster in self.clusters:
            for stage in cluster.stages:
                energy[stage.host_id] = energy.get(stage.host_id, 0.0) + stage.energy_joules
        return energy


def predict(problem: RoundProblem, plans: RoundPlan) -> RoundPrediction:
    """Predicts a round, without checking limits. A link that is missing or has no rate takes infinite time."""
    clusters = tuple(
        _predict_cluster(problem, cluster, plan, others)
        for cluster, plan, others in zip(
            problem.clusters, plans, other_edge_seconds(problem, plans), strict=True
        )
    )
    round_seconds = max(cluster.round_seconds for cluster in clusters) + problem.fixed_seconds
    later = 1 - 1 / problem.migration_horizon_rounds
    full_round_seconds = problem.fixed_seconds + max(
        cluster.round_seconds + later * cluster.migrate_seconds for cluster in clusters
    )
    # Without the check, idle hosts without a price would give NaN in a round of infinite time.
    drift = problem.idle_price * round_seconds if problem.idle_price else 0.0
    for cluster, predicted in zip(problem.clusters, clusters, strict=True):
        hosts = cluster.hosts
        drift += sum(
            hosts[stage.host_id].joule_weight * stage.energy_joules
            for stage in predicted.stages
            if hosts[stage.host_id].joule_weight
        )
    term = convergence_term(problem, plans)
    return RoundPrediction(
        clusters,
        round_seconds,
        full_round_seconds,
        term,
        penalty(problem, round_seconds, term),
        drift,
        idle_joules(problem, round_seconds),
    )


def idle_joules(problem: RoundProblem, seconds: float) -> dict[str, float]:
    """Returns the idle energy of every host that has idle power: (8)."""
    return {
        name: host.idle_watts * seconds for name, host in problem.hosts.items() if host.idle_watts
    }


def penalty(problem: RoundProblem, round_seconds: float, term: float) -> float:
    """Returns the penalty of (13): V (tau / tau_ref + lambda Phi), where `term` is Phi."""
    weighted = problem.convergence.weight * term if problem.convergence.weight else 0.0
    return problem.penalty_weight * (round_seconds / problem.reference_seconds + weighted)


def convergence_term(problem: RoundProblem, plans: RoundPlan) -> float:
    """Returns Phi of (11), where clusters count by their share of the samples.

    The codec error is summed over all links of a cluster and its uploads, because each may use another codec.
    """
    c0, c1, c2, c3, c4 = problem.convergence.constants
    steps, rounds = problem.local_steps, problem.convergence.num_rounds
    total = 0.0
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        updates = plan.num_micro_batches if problem.update_per_micro_batch else 1
        samples = problem.mini_batch / updates
        error = sum(CODECS[link.codec].relative_error for link in plan.links)
        error += UPLOAD_CODECS[plan.upload_codec].relative_error
        total += cluster.weight * (
            c0 / (steps * rounds * updates)
            + c1 * updates / (len(plans) * samples)
            + c2 * (steps * updates) ** 2
            + c3 * error
            + c4 * cluster.loss_probability
        )
    return total


def stage_seconds(
    problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan, *, recompute: bool = True
) -> list[float]:
    """Returns the time of one micro-batch, or of one slice of it, on each stage, forward and backward: c_k of (2).

    Without `recompute`, it leaves out that forward passes are repeated.
    """
    hosts, size = cluster.hosts, problem.mini_batch / plan.num_parts
    return [
        (host := hosts[stage.host_id]).compute_seconds(
            size,
            problem.model.trained_work(stage.start_unit, stage.stop_unit, host.end_unit_work),
            recompute=recompute and stage.recompute,
        )
        for stage in plan.stages
    ]


def deferred_seconds(
    problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan
) -> list[float]:
    """Returns the part of c_k that each stage leaves for later, when it has sent the gradient of its input: d_k of (4).

    The stage with the embedding sends no gradient, so it leaves nothing.
    """
    hosts, computes = cluster.hosts, stage_seconds(problem, cluster, plan, recompute=False)
    return [
        hosts[stage.host_id].deferred_share * seconds if stage.start_unit > 0 else 0.0
        for stage, seconds in zip(plan.stages, computes, strict=True)
    ]


def link_seconds(
    problem: RoundProblem,
    cluster: ClusterProblem,
    sender: str,
    receiver: str,
    plan: LinkPlan,
    micro_batch_size: float,
    *,
    carries_activations: bool = True,
    carries_gradients: bool = True,
    takes_turns: bool = False,
) -> LinkPrediction:
    """Returns the times of the link between two neighbouring stages: (3).

    Args:
        sender: Host that sends activations. The receiver sends activation gradients back.
        carries_activations: False if the sender runs no unit. It then sends token ids, whose few bytes are
            not counted.
        carries_gradients: False if no unit of the sender or before it is trained. The receiver then sends back frames
            without a tensor.
        takes_turns: See `ClusterPlan.takes_turns`.
    """
    there = cluster.links.get((sender, receiver))
    back = cluster.links.get((receiver, sender))
    if there is None or back is None:
        return LinkPrediction(math.inf, math.inf, 0.0, math.inf)
    codec = CODECS[plan.codec]
    raw_bytes = micro_batch_size * problem.model.activation_bytes if carries_activations else 0.0
    coding = raw_bytes * codec.seconds_per_byte
    bits = 8 * raw_bytes * codec.bytes_ratio
    forward = transfer_seconds(bits, there.rate_bps(plan.share, plan.forward_watts)) + coding
    backward = 0.0
    if carries_gradients:
        backward = transfer_seconds(bits, back.rate_bps(plan.share, plan.backward_watts)) + coding
    adds_up = takes_turns or isinstance(there, RadioLink)
    load = forward + backward if adds_up else max(forward, backward)
    return LinkPrediction(forward, backward, there.round_trip_seconds, load)


def latency_loops(
    computes: Sequence[float], deferred: Sequence[float], links: Sequence[LinkPrediction]
) -> list[float]:
    """Returns R_k of (4) for each stage: the time for which it holds a micro-batch.

    Args:
        computes: Time of one micro-batch on each stage: c_k.
        deferred: See `deferred_seconds`.
        links: Link i leads from stage i to stage i + 1.
    """
    loops, loop = [0.0] * len(computes), 0.0
    for k in reversed(range(len(computes))):
        if k < len(links):
            loop += links[k].loop_seconds
        loops[k] = loop + computes[k]
        loop += computes[k] - deferred[k]
    return loops


def parts_in_window(in_flight: int, num_slices: int) -> int:
    """Returns w_k of (4) in parts: a stage begins a part only if its window has room for one.

    It holds the first slice of a micro-batch until all others have followed it forward and back.
    """
    return (in_flight - 1) * num_slices + 1


def stage_memory_bytes(
    problem: RoundProblem,
    host: Host,
    stage: StagePlan,
    num_micro_batches: int,
    num_slices: int = 1,
) -> float:
    """Returns the memory of a host for a stage with a full window, its `base_bytes` included: (10)."""
    size = problem.mini_batch / num_micro_batches
    return host.base_bytes + problem.model.memory_bytes(
        stage.start_unit,
        stage.stop_unit,
        stage.in_flight,
        size,
        num_slices=num_slices,
        recompute=stage.recompute,
    )


def other_edge_seconds(problem: RoundProblem, plans: Sequence[ClusterPlan]) -> list[float]:
    """Returns, for each cluster, how long the edge server computes for all other clusters in one of its steps.

    All clusters run equally many steps in a round and end it together. So during one step, the edge server runs one
    mini-batch of each cluster, on one processor. The time is 0 for a cluster without a stage there.
    """
    own: list[float | None] = []
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        host, last = cluster.edge_server, plan.stages[-1]
        work = problem.model.work(last.start_unit, last.stop_unit, host.end_unit_work)
        size = problem.mini_batch / plan.num_parts
        seconds = plan.num_parts * host.compute_seconds(size, work)
        own.append(seconds if last.host_id == host.host_id else None)
    users = [seconds for seconds in own if seconds is not None]
    # With few clusters, a difference would round where a sum does not.
    return [0.0 if seconds is None else math.fsum((*users, -seconds)) for seconds in own]


def bubble_ratio(num_parts: int, computes: Sequence[float], mini_batch_seconds: float) -> float:
    """Returns the share of a mini-batch in which the average stage is idle: (7).

    `computes` has the time of one of its parts on each stage.
    """
    if not mini_batch_seconds or not math.isfinite(mini_batch_seconds):
        return 1.0
    return 1.0 - num_parts * sum(computes) / (len(computes) * mini_batch_seconds)


def _predict_cluster(
    problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan, others: float
) -> ClusterPrediction:
    num_parts = plan.num_parts
    computes = stage_seconds(problem, cluster, plan)
    links = [
        link_seconds(
            problem,
            cluster,
            plan.stages[i].host_id,
            plan.stages[i + 1].host_id,
            link,
            problem.mini_batch / num_parts,
            carries_activations=plan.stages[i].stop_unit > 0,
            carries_gradients=plan.stages[i].stop_unit > problem.model.first_trained_unit,
            takes_turns=plan.takes_turns,
        )
        for i, link in enumerate(plan.links)
    ]
    deferred = deferred_seconds(problem, cluster, plan)
    loops = latency_loops(computes, deferred, links)
    most_in_flight = 1 if problem.update_per_micro_batch else plan.num_micro_batches
    windows = [
        loop / parts_in_window(stage.in_flight, plan.num_slices)
        if stage.in_flight < most_in_flight
        else 0.0
        for stage, loop in zip(plan.stages, loops, strict=True)
    ]
    candidates = [(seconds, f"stage {k}") for k, seconds in enumerate(computes)]
    candidates += [(link.load_seconds, f"{link.busiest} {k}") for k, link in enumerate(links)]
    candidates += [(seconds, f"window {k}") for k, seconds in enumerate(windows)]
    if others and num_parts > 1:
        candidates.append((computes[-1] + others / (num_parts - 1), "edge server"))
    bottleneck, name = max(candidates, key=lambda candidate: candidate[0])
    if problem.update_per_micro_batch:
        mini_batch_seconds = num_parts * (loops[0] + cluster.step_seconds)
    else:
        rest = (num_parts - 1) * bottleneck if num_parts > 1 else others
        mini_batch_seconds = loops[0] + rest + cluster.step_seconds
    hosts, weights = cluster.hosts, WeightsSeconds(0.0, 0.0, 0.0)
    for stage in plan.stages:
        host, units = hosts[stage.host_id], (stage.start_unit, stage.stop_unit)
        weights += weights_seconds(problem, cluster, host, plan.upload_codec, *units)
    pushes = sending_seconds(problem, cluster, plan)
    if plan.uploads:
        coding = sum(
            coding_seconds(problem, plan.upload_codec, stage.start_unit, stage.stop_unit)
            for stage in plan.stages
            if stage.host_id != cluster.edge_server.host_id
        )
        weights = replace(weights, push=coding + max(seconds for seconds, _ in pushes))
    round_seconds = problem.local_steps * mini_batch_seconds + weights.per_round(problem)
    return ClusterPrediction(
        _predict_stages(problem, cluster, plan, computes, deferred, windows, links, pushes),
        tuple(links),
        bottleneck,
        name,
        mini_batch_seconds,
        weights.push,
        weights.fetch,
        weights.migrate,
        round_seconds,
        bubble_ratio(num_parts, computes, mini_batch_seconds),
    )


def _predict_stages(
    problem: RoundProblem,
    cluster: ClusterProblem,
    plan: ClusterPlan,
    computes: Sequence[float],
    deferred: Sequence[float],
    windows: Sequence[float],
    links: Sequence[LinkPrediction],
    pushes: Sequence[tuple[float, float]],
) -> tuple[StagePrediction, ...]:
    hosts, passes = cluster.hosts, problem.local_steps * plan.num_parts
    stages = []
    for k, stage in enumerate(plan.stages):
        host = hosts[stage.host_id]
        joules = host.busy_watts * computes[k]
        # Without the checks, 0 W on a link that takes infinite time would give NaN.
        if k < len(links) and plan.links[k].forward_watts:
            joules += plan.links[k].forward_watts * links[k].forward_seconds
        if k > 0 and plan.links[k - 1].backward_watts:
            joules += plan.links[k - 1].backward_watts * links[k - 1].backward_seconds
        memory = stage_memory_bytes(problem, host, stage, plan.num_micro_batches, plan.num_slices)
        joules *= passes
        push_seconds, push_watts = pushes[k]
        if push_watts:
            joules += push_watts * push_seconds
        stages.append(
            StagePrediction(stage.host_id, computes[k], deferred[k], windows[k], memory, joules)
        )
    return tuple(stages)
