"""What a decision leads to: delay, energy, memory, convergence, and the objective of the round.

This module is the one statement of the model. The solver may use any shortcut, but what it finds is worth what
`predict` says of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Host,
    LinkPlan,
    RadioLink,
    RoundPlan,
    RoundProblem,
)
from collapipe.codecs import CODECS

STATE_ON_THE_WIRE = 0.75
"""Share of a unit's state that is moved and gathered: weights and moments, but no gradients."""

WINDOW_SLACK = 2
"""Micro-batches that a window is given beyond what design (4) asks for.

With none a stage that is late once starves the next: up to 17 % slower where mini-batches are simulated event by event.
"""

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class StagePrediction:
    """One stage.

    Args:
        host_id: Its host.
        compute_seconds: Of one micro-batch, forward and backward: c_k.
        window_seconds: R_k / w_k where the window starves it, else 0: design (4).
        memory_bytes: Design (10), the host's base included.
        energy_joules: Of a round, computing and sending: design (8), (9).
    """

    host_id: str
    compute_seconds: float
    window_seconds: float
    memory_bytes: float
    energy_joules: float


@dataclass(frozen=True)
class LinkPrediction:
    """One link, in seconds a micro-batch: design (3). `load_seconds` is what it adds to the bottleneck."""

    forward_seconds: float
    backward_seconds: float
    round_trip_seconds: float
    load_seconds: float


@dataclass(frozen=True)
class ClusterPrediction:
    """One cluster; times in seconds.

    Args:
        stages: In pipeline order.
        links: Link i leads from stage i to stage i + 1.
        bottleneck_seconds: Of a micro-batch, in the steady state.
        bottleneck: What it is: "stage 2", "link 1", "window 0" or "edge server".
        mini_batch_seconds: T_n of design (5).
        gather_seconds: T_gather of design (6).
        migrate_seconds: T_migrate of design (6), not yet divided by the horizon.
        round_seconds: What the cluster adds to the maximum of design (6).
        bubble_ratio: Design (7).
    """

    stages: tuple[StagePrediction, ...]
    links: tuple[LinkPrediction, ...]
    bottleneck_seconds: float
    bottleneck: str
    mini_batch_seconds: float
    gather_seconds: float
    migrate_seconds: float
    round_seconds: float
    bubble_ratio: float


@dataclass(frozen=True)
class RoundPrediction:
    """The whole round; `objective` is design (13), the sum of `penalty` and `drift`."""

    clusters: tuple[ClusterPrediction, ...]
    round_seconds: float
    convergence_term: float
    penalty: float
    drift: float

    @property
    def objective(self) -> float:
        """Drift plus penalty: design (13)."""
        return self.penalty + self.drift

    @property
    def energy_joules(self) -> dict[str, float]:
        """Energy of each host in the round; an edge server's clusters add up."""
        energy: dict[str, float] = {}
        for cluster in self.clusters:
            for stage in cluster.stages:
                energy[stage.host_id] = energy.get(stage.host_id, 0.0) + stage.energy_joules
        return energy


def predict(problem: RoundProblem, plans: RoundPlan) -> RoundPrediction:
    """Predicts a round.

    A stage or link that cannot work (no link, no rate) takes infinite time; limits are `violations`' matter.
    """
    clusters = tuple(
        _predict_cluster(problem, index, plans) for index in range(len(problem.clusters))
    )
    round_seconds = max(cluster.round_seconds for cluster in clusters) + problem.fixed_seconds
    term = convergence_term(problem, plans)
    weighted = problem.convergence.weight * term if problem.convergence.weight else 0.0
    drift = 0.0
    for cluster, predicted in zip(problem.clusters, clusters, strict=True):
        hosts = cluster.hosts
        drift += sum(
            hosts[stage.host_id].joule_weight * stage.energy_joules
            for stage in predicted.stages
            if hosts[stage.host_id].joule_weight
        )
    penalty = problem.penalty_weight * (round_seconds / problem.reference_seconds + weighted)
    return RoundPrediction(clusters, round_seconds, term, penalty, drift)


def convergence_term(problem: RoundProblem, plans: RoundPlan) -> float:
    """Phi of design (11), with a cluster's means weighted by its samples.

    The error of codecs is summed over a cluster's links: with the control unit's and the edge server's hops a
    pipeline of S segments has S + 1 of them, and each may have its own codec.
    """
    c0, c1, c2, c3, c4 = problem.convergence.constants
    steps, rounds = problem.local_steps, problem.convergence.num_rounds
    total = 0.0
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        updates = plan.num_micro_batches if problem.update_per_micro_batch else 1
        samples = problem.mini_batch / updates
        error = sum(CODECS[link.codec].relative_error for link in plan.links)
        total += cluster.weight * (
            c0 / (steps * rounds * updates)
            + c1 * updates / (len(plans) * samples)
            + c2 * (steps * updates) ** 2
            + c3 * error
            + c4 * cluster.loss_probability
        )
    return total


def violations(problem: RoundProblem, plans: RoundPlan) -> list[str]:
    """Which limits of design (13) a decision breaks, in words; empty when it is feasible."""
    found: list[str] = []
    shared: dict[str, float] = {}
    memory: dict[str, float] = {}  # a host that serves several clusters holds a replica for each
    limits: dict[str, int | None] = {}
    for index, (cluster, plan) in enumerate(zip(problem.clusters, plans, strict=True)):
        predicted = _predict_cluster(problem, index, plans)
        hosts = cluster.hosts
        for stage in predicted.stages:
            base = hosts[stage.host_id].base_bytes
            others = memory[stage.host_id] - base if stage.host_id in memory else 0.0
            memory[stage.host_id] = stage.memory_bytes + others
            limits[stage.host_id] = hosts[stage.host_id].memory_bytes
        units = [(stage.start_unit, stage.stop_unit) for stage in plan.stages]
        if [start for start, _ in units] != [0, *(stop for _, stop in units[:-1])] or (
            units[-1][1] != problem.model.num_blocks + 2
        ):
            found.append(f"cluster {index} does not run every unit once, in order: {units}")
        if plan.num_micro_batches not in cluster.micro_batch_options:
            found.append(
                f"cluster {index} has {plan.num_micro_batches} micro-batches: allowed are "
                f"{cluster.micro_batch_options}"
            )
        if not math.isfinite(predicted.round_seconds):
            found.append(f"cluster {index} has a link that carries nothing")
        for position, link in enumerate(plan.links):
            sender, receiver = plan.stages[position].host_id, plan.stages[position + 1].host_id
            for host_id, watts in ((sender, link.forward_watts), (receiver, link.backward_watts)):
                limit_watts = hosts[host_id].max_transmit_watts
                if not 0 <= watts <= limit_watts * (1 + _TOLERANCE):
                    found.append(f"{host_id} sends with {watts} W of at most {limit_watts} W")
            if link.codec not in problem.codecs:
                found.append(f"codec {link.codec} is not allowed: {tuple(problem.codecs)}")
            if cluster.channel is not None:
                shared[cluster.channel] = shared.get(cluster.channel, 0.0) + link.share
    for host_id, needed in memory.items():
        memory_limit = limits[host_id]
        if memory_limit is not None and needed > memory_limit:
            found.append(f"{host_id} needs {needed:.0f} bytes of memory and has {memory_limit}")
    for channel, total in shared.items():
        if total > problem.channels[channel] * (1 + 1e-6):
            found.append(
                f"channel {channel} shares {problem.channels[channel]:g}, planned {total:g}"
            )
    limit = problem.convergence.limit
    if math.isfinite(limit) and convergence_term(problem, plans) > limit * (1 + _TOLERANCE):
        found.append(
            f"the convergence term is {convergence_term(problem, plans):g} of at most {limit:g}"
        )
    return found


def link_seconds(
    problem: RoundProblem,
    cluster: ClusterProblem,
    sender: str,
    receiver: str,
    plan: LinkPlan,
    micro_batch_size: float,
    *,
    carries_activations: bool = True,
) -> LinkPrediction:
    """Times of one link between two neighbours: design (3).

    A sender without the embedding in it or before it carries no activations, but token ids, too few bytes to count.
    """
    there = cluster.links.get((sender, receiver))
    back = cluster.links.get((receiver, sender))
    if there is None or back is None:
        return LinkPrediction(math.inf, math.inf, 0.0, math.inf)
    codec = CODECS[plan.codec]
    raw_bytes = micro_batch_size * problem.model.activation_bytes if carries_activations else 0.0
    coding = raw_bytes * codec.seconds_per_byte
    bits = 8 * raw_bytes * codec.bytes_ratio
    forward = _over(bits, there.rate_bps(plan.share, plan.forward_watts)) + coding
    backward = _over(bits, back.rate_bps(plan.share, plan.backward_watts)) + coding
    half_duplex = isinstance(there, RadioLink)
    load = forward + backward if half_duplex else max(forward, backward)
    return LinkPrediction(forward, backward, there.round_trip_seconds, load)


def moved_blocks(cluster: ClusterProblem, host_id: str, start_unit: int, stop_unit: int) -> int:
    """Units of a range that the host does not hold under the plan in force."""
    if cluster.previous is None:
        return 0
    held: set[int] = set()
    for stage in cluster.previous.stages:
        if stage.host_id == host_id:
            held.update(range(stage.start_unit, stage.stop_unit))
    return sum(unit not in held for unit in range(start_unit, stop_unit))


def state_seconds(problem: RoundProblem, host: Host, num_blocks: float) -> float:
    """Time in which the states of so many blocks reach or leave a host."""
    return _over(
        8 * STATE_ON_THE_WIRE * problem.model.block_state_bytes * num_blocks, host.weights_bps
    )


def head_load_seconds(problem: RoundProblem, plans: Sequence[ClusterPlan], index: int) -> float:
    """What a micro-batch of one cluster waits for in the steady state at a head that serves all clusters.

    The edge server runs every cluster's micro-batches of a step on one processor; clusters step at one pace, for a
    round ends for all together.
    """
    total = 0.0
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        size = problem.mini_batch / plan.num_micro_batches
        for stage in plan.stages:
            if stage.host_id == cluster.edge_server.host_id:
                work = problem.model.work(stage.start_unit, stage.stop_unit)
                total += plan.num_micro_batches * cluster.edge_server.compute_seconds(size, work)
    return total / plans[index].num_micro_batches


def _predict_cluster(problem: RoundProblem, index: int, plans: RoundPlan) -> ClusterPrediction:
    cluster, plan = problem.clusters[index], plans[index]
    model, hosts = problem.model, cluster.hosts
    num_micro_batches = plan.num_micro_batches
    size = problem.mini_batch / num_micro_batches
    computes = [
        hosts[stage.host_id].compute_seconds(size, model.work(stage.start_unit, stage.stop_unit))
        for stage in plan.stages
    ]
    links = [
        link_seconds(
            problem,
            cluster,
            plan.stages[i].host_id,
            plan.stages[i + 1].host_id,
            link,
            size,
            carries_activations=plan.stages[i].stop_unit > 0,
        )
        for i, link in enumerate(plan.links)
    ]
    flight = 1 if problem.update_per_micro_batch else num_micro_batches
    windows, loop = [0.0] * len(computes), 0.0
    for k in reversed(range(len(computes))):
        loop += computes[k]
        if k < len(links):
            link = links[k]
            loop += link.forward_seconds + link.backward_seconds + link.round_trip_seconds
        if plan.stages[k].in_flight < flight:
            windows[k] = loop / plan.stages[k].in_flight
    candidates = [(c, f"stage {k}") for k, c in enumerate(computes)]
    candidates += [(link.load_seconds, f"link {k}") for k, link in enumerate(links)]
    candidates += [(seconds, f"window {k}") for k, seconds in enumerate(windows)]
    if plan.stages[-1].host_id == cluster.edge_server.host_id:
        candidates.append((head_load_seconds(problem, plans, index), "edge server"))
    bottleneck, name = max(candidates, key=lambda candidate: candidate[0])
    if problem.update_per_micro_batch:
        mini_batch_seconds = num_micro_batches * (loop + cluster.step_seconds)
    else:
        mini_batch_seconds = loop + (num_micro_batches - 1) * bottleneck + cluster.step_seconds
    gather = migrate = 0.0
    for stage in plan.stages:
        host = hosts[stage.host_id]
        if host.host_id in (cluster.control_unit.host_id, cluster.edge_server.host_id):
            continue
        gather += state_seconds(problem, host, stage.stop_unit - stage.start_unit)
        moved = moved_blocks(cluster, host.host_id, stage.start_unit, stage.stop_unit)
        migrate += state_seconds(problem, host, moved)
    round_seconds = (
        problem.local_steps * mini_batch_seconds
        + gather
        + cluster.upload_seconds
        + migrate / problem.migration_horizon_rounds
    )
    passes = problem.local_steps * num_micro_batches
    stages = []
    for k, stage in enumerate(plan.stages):
        host = hosts[stage.host_id]
        joules = host.busy_watts * computes[k]
        if k < len(links) and plan.links[k].forward_watts:
            joules += plan.links[k].forward_watts * links[k].forward_seconds
        if k > 0 and plan.links[k - 1].backward_watts:
            joules += plan.links[k - 1].backward_watts * links[k - 1].backward_seconds
        memory = host.base_bytes + model.memory_bytes(
            stage.start_unit, stage.stop_unit, stage.in_flight, size
        )
        stages.append(
            StagePrediction(stage.host_id, computes[k], windows[k], memory, passes * joules)
        )
    bubble = 1.0
    if mini_batch_seconds and math.isfinite(mini_batch_seconds):
        bubble -= num_micro_batches * sum(computes) / (len(computes) * mini_batch_seconds)
    return ClusterPrediction(
        tuple(stages),
        tuple(links),
        bottleneck,
        name,
        mini_batch_seconds,
        gather,
        migrate,
        round_seconds,
        bubble,
    )


def _over(bits: float, rate_bps: float) -> float:
    if not bits:
        return 0.0
    return bits / rate_bps if rate_bps > 0 else math.inf
