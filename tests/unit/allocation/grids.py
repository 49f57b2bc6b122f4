"""Random problems with shared channels, and two simple solvers: a zooming grid, and root finding.

The solvers follow the equations of docs/scheduling.md and share no code with the search. So a mistake in the search
shows as a difference.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Host,
    Link,
    LinkPlan,
    ModelCost,
    RadioLink,
    RoundPlan,
    RoundProblem,
    StagePlan,
    WiredLink,
)

Vector = NDArray[np.float64]


def random_problem(
    seed: int,
    num_clusters: int = 1,
    num_devices: int = 2,
    num_blocks: int = 4,
    options: tuple[int, ...] = (1, 2, 4),
    wired: bool = False,
    backlog: float = 10.0,
    state_bps: float = math.inf,
    most_bits_per_hertz: float = math.inf,
) -> RoundProblem:
    """Draws devices of different speeds on batteries, and links of different quality on one channel."""
    rng = np.random.default_rng(seed)

    def link() -> Link:
        if wired:
            return WiredLink(float(10 ** rng.uniform(7, 9)), 0.002)
        return RadioLink(
            float(10 ** rng.uniform(-10, -7)),
            4e-20,
            0.002,
            float(rng.uniform(0.7, 1)),
            most_bits_per_hertz,
        )

    clusters = []
    for n in range(num_clusters):
        entry = Host(f"control-{n}", 0.003, 0.0005, max_transmit_watts=1.0)
        devices = tuple(
            Host(
                f"device-{n}-{k}",
                float(rng.uniform(0.005, 0.03)),
                float(rng.uniform(0, 0.002)),
                busy_watts=float(rng.uniform(1, 5)),
                energy_budget_joules=float(rng.uniform(5, 50)),
                backlog=float(rng.uniform(0, backlog)) if rng.uniform() < 0.7 else 0.0,
                max_transmit_watts=float(rng.uniform(0.1, 0.5)),
                push_bps=state_bps,
                fetch_bps=state_bps,
            )
            for k in range(num_devices)
        )
        head = Host("edge", 0.002, 0.0005, max_transmit_watts=1.0)
        names = [entry.host_id, *(device.host_id for device in devices), head.host_id]
        links = {pair: link() for pair in itertools.permutations(names, 2)}
        clusters.append(ClusterProblem(entry, devices, head, links, options, "air", None, 0.01))
    model = ModelCost(num_blocks, 1e8, 1e5, 5e4, embedding_work=0.2, head_work=0.3)
    return RoundProblem(
        tuple(clusters),
        model,
        mini_batch=32,
        local_steps=2,
        channels={"air": 2e8 if wired else 2e7},
        penalty_weight=100.0,
        reference_seconds=5.0,
    )


def some_plan(problem: RoundProblem, seed: int, narrow: bool = False) -> RoundPlan:
    """Draws a placement for each cluster; links have full power, and no share yet."""
    rng = np.random.default_rng(seed)
    plans = []
    for cluster in problem.clusters:
        choices = list(_cluster_plans(cluster, problem.model.num_blocks))
        plan = choices[int(rng.integers(len(choices)))]
        if narrow:
            stages = tuple(
                replace(stage, in_flight=int(rng.integers(1, stage.in_flight + 1)))
                for stage in plan.stages
            )
            plan = replace(plan, stages=stages)
        plans.append(plan)
    return tuple(plans)


def every_plan(problem: RoundProblem) -> Iterator[RoundPlan]:
    """Yields every placement, order and number of micro-batches, with full windows and full power."""
    yield from itertools.product(
        *(list(_cluster_plans(cluster, problem.model.num_blocks)) for cluster in problem.clusters)
    )


def _cluster_plans(cluster: ClusterProblem, num_blocks: int) -> Iterator[ClusterPlan]:
    hosts = cluster.hosts
    for count in range(1, min(len(cluster.devices), num_blocks) + 1):
        for devices in itertools.permutations(cluster.devices, count):
            for cuts in itertools.combinations(range(1, num_blocks), count - 1):
                bounds = [1, *(cut + 1 for cut in cuts), num_blocks + 1]
                for size in cluster.micro_batch_options:
                    stages = [StagePlan(cluster.control_unit.host_id, 0, 1, size)]
                    stages += [
                        StagePlan(device.host_id, start, stop, size)
                        for device, (start, stop) in zip(
                            devices, itertools.pairwise(bounds), strict=True
                        )
                    ]
                    stages.append(
                        StagePlan(cluster.edge_server.host_id, num_blocks + 1, num_blocks + 2, size)
                    )
                    links = tuple(
                        LinkPlan(
                            share=1.0,
                            forward_watts=_full(cluster, hosts, one, other),
                            backward_watts=_full(cluster, hosts, other, one),
                        )
                        for one, other in itertools.pairwise(stages)
                    )
                    yield ClusterPlan(tuple(stages), size, links)


def _full(
    cluster: ClusterProblem, hosts: dict[str, Host], sender: StagePlan, receiver: StagePlan
) -> float:
    """Returns the power of a sender, or half of it if the sender also sends to its other neighbour."""
    if not isinstance(cluster.links[sender.host_id, receiver.host_id], RadioLink):
        return 0.0
    parts = 2 if sender.host_id.startswith("device") else 1
    return hosts[sender.host_id].max_transmit_watts / parts


def transfer_seconds(link: Link, bits: float, share: Vector, watts: Vector | float) -> Vector:
    """Computes docs/scheduling.md (1) and (3) for many shares and powers at once."""
    if isinstance(link, WiredLink):
        return bits / np.minimum(share, link.capacity_bps)
    signal = watts * link.gain / (share * link.noise_watts_per_hertz)
    most = np.minimum(np.log2(1 + signal), link.most_bits_per_hertz)
    return np.asarray(bits / (link.efficiency * share * most))


def objectives(
    problem: RoundProblem,
    plans: RoundPlan,
    shares: Vector,
    watts: Sequence[tuple[Vector, Vector]],
    upload_seconds: Vector | float = 0.0,
) -> Vector:
    """Computes docs/scheduling.md (13) for many allocations at once.

    Args:
        shares: (points, links)
        watts: For each link, the powers of both directions, each with the shape (points).
        upload_seconds: Time of the uploads of each cluster. (points, clusters)
    """
    at, rounds, drift = 0, [], np.zeros(len(shares))
    per_step = sum(
        plan.num_micro_batches
        * cluster.edge_server.compute_seconds(
            problem.mini_batch / plan.num_micro_batches, problem.model.head_work
        )
        for cluster, plan in zip(problem.clusters, plans, strict=True)
    )
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        hosts, count = cluster.hosts, plan.num_micro_batches
        size = problem.mini_batch / count
        computes = [
            hosts[stage.host_id].compute_seconds(
                size, problem.model.work(stage.start_unit, stage.stop_unit)
            )
            for stage in plan.stages
        ]
        passes = problem.local_steps * count
        for stage, seconds in zip(plan.stages, computes, strict=True):
            host = hosts[stage.host_id]
            drift = drift + host.joule_weight * passes * host.busy_watts * seconds
        others = per_step - count * computes[-1]
        worst = np.full(len(shares), max(*computes, computes[-1] + others / max(count - 1, 1)))
        loops = []
        for one, other in itertools.pairwise(plan.stages):
            there = cluster.links[one.host_id, other.host_id]
            back = cluster.links[other.host_id, one.host_id]
            bits = 8 * size * problem.model.activation_bytes
            forward = transfer_seconds(there, bits, shares[:, at], watts[at][0])
            backward = transfer_seconds(back, bits, shares[:, at], watts[at][1])
            radio = isinstance(there, RadioLink)
            worst = np.maximum(
                worst, forward + backward if radio else np.maximum(forward, backward)
            )
            loops.append(forward + backward + there.round_trip_seconds)
            drift = drift + passes * (
                hosts[one.host_id].joule_weight * watts[at][0] * forward
                + hosts[other.host_id].joule_weight * watts[at][1] * backward
            )
            at += 1
        for k, stage in enumerate(plan.stages):
            if stage.in_flight < count:
                loop = sum(computes[k:]) + sum(loops[k:], np.zeros(len(shares)))
                worst = np.maximum(worst, loop / stage.in_flight)
        rest = (count - 1) * worst if count > 1 else others
        step = sum(computes) + sum(loops, np.zeros(len(shares))) + rest
        rounds.append(problem.local_steps * (step + cluster.step_seconds))
    slowest = np.max(np.transpose(rounds) + upload_seconds, axis=1)
    return np.asarray(problem.penalty_weight * slowest / problem.reference_seconds + drift)


def best_on_grid(
    problem: RoundProblem, plans: RoundPlan, points: int = 5, zooms: int = 16
) -> float:
    """Returns the least objective over a grid of shares and powers that zooms in on its best point."""
    total = next(iter(problem.channels.values()))
    ends = [
        (cluster, one.host_id, other.host_id)
        for cluster, plan in zip(problem.clusters, plans, strict=True)
        for one, other in itertools.pairwise(plan.stages)
    ]
    limits, costly, senders = [], [], []
    for cluster, *pair in ends:
        for host_id in pair:
            host = cluster.hosts[host_id]
            limits.append(host.max_transmit_watts)
            radio = isinstance(cluster.links[pair[0], pair[1]], RadioLink)
            costly.append(host.joule_weight > 0 and radio)
            senders.append(host_id if radio and host_id.startswith("device") else None)
    both = [
        (j, k)
        for j, k in itertools.combinations(range(len(senders)), 2)
        if senders[j] is not None and senders[j] == senders[k]
    ]
    # Where energy is free, one power of a sender with two directions follows from the other.
    rest = {k: j for j, k in both if not costly[k]}
    num_shares = len(ends) - 1
    powers = [j for j, one in enumerate(costly) if one or j in rest.values()]
    centre = np.concatenate([np.zeros(num_shares), np.full(len(powers), -3.0)])
    width = np.concatenate([np.full(num_shares, 3.0), np.full(len(powers), 3.0)])
    unit = np.stack(
        np.meshgrid(*[np.linspace(-1, 1, points)] * len(centre), indexing="ij"), axis=-1
    ).reshape(-1, len(centre))
    best = math.inf
    for _ in range(zooms):
        at = centre + unit * width
        at[:, num_shares:] = np.minimum(at[:, num_shares:], 0.0)
        weights = np.exp(np.column_stack([at[:, :num_shares], np.zeros(len(at))]))
        shares = total * weights / weights.sum(axis=1, keepdims=True)
        watts = [np.full(len(at), limit) for limit in limits]
        for column, j in enumerate(powers):
            watts[j] = limits[j] * np.exp(at[:, num_shares + column])
        for k, j in rest.items():
            watts[k] = limits[k] * np.maximum(1 - watts[j] / limits[j], 1e-9)
        pairs = list(zip(watts[::2], watts[1::2], strict=True))
        values = objectives(problem, plans, shares, pairs)
        for j, k in both:
            values = np.where(watts[j] + watts[k] <= limits[j] * (1 + 1e-8), values, math.inf)
        winner = int(np.argmin(values))
        best = min(best, float(values[winner]))
        centre, width = at[winner], width * 0.65
    return best


def best_joint(problem: RoundProblem) -> float:
    """Returns the least objective over every plan, with shares and powers from the grid.

    A plan is left out only if it would not win even with the whole channel for every link and no energy for
    sending.
    """
    bounds: list[tuple[float, int, RoundPlan]] = []
    total = next(iter(problem.channels.values()))
    for plans in every_plan(problem):
        alone = tuple(
            replace(plan, links=tuple(replace(link, share=total) for link in plan.links))
            for plan in plans
        )
        silent = tuple(
            replace(
                plan,
                links=tuple(
                    replace(link, forward_watts=0.0, backward_watts=0.0) for link in plan.links
                ),
            )
            for plan in alone
        )
        computing = sum(
            cluster.hosts[stage.host_id].joule_weight * stage.energy_joules
            for cluster, predicted in zip(
                problem.clusters, predict(problem, silent).clusters, strict=True
            )
            for stage in predicted.stages
        )
        bounds.append((predict(problem, alone).penalty + computing, len(bounds), plans))
    best = math.inf
    for bound, _, plans in sorted(bounds):
        if bound >= best:
            break
        best = min(best, best_on_grid(problem, plans))
    return best


def direct_problem(seed: int, num_clusters: int, wired: bool) -> tuple[RoundProblem, RoundPlan]:
    """Draws clusters with one link: the control unit runs all blocks and sends to the edge server."""
    problem = random_problem(seed, num_clusters, num_devices=1, wired=wired)
    rng = np.random.default_rng(seed)
    plans = []
    for cluster in problem.clusters:
        size = int(rng.choice([1, 2, 4]))
        entry, head = cluster.control_unit, cluster.edge_server
        plans.append(
            ClusterPlan(
                (StagePlan(entry.host_id, 0, 5, size), StagePlan(head.host_id, 5, 6, size)),
                size,
                (LinkPlan("fp32", 1.0, *((0.0, 0.0) if wired else (1.0, 1.0))),),
            )
        )
    return problem, tuple(plans)


def least_deadline(problem: RoundProblem, plans: RoundPlan) -> float:
    """Returns the shortest round of a `direct_problem`.

    It finds the deadline by bisection, and the least share of each link for a deadline by Brent's method.
    """
    total = next(iter(problem.channels.values()))

    def seconds(n: int, share: float) -> float:
        (link,) = plans[n].links
        plan = replace(plans[n], links=(replace(link, share=share),))
        return predict(problem, (*plans[:n], plan, *plans[n + 1 :])).clusters[n].round_seconds

    def least_share(n: int, deadline: float) -> float:
        if seconds(n, total) > deadline:
            return math.inf
        return brentq(lambda share: seconds(n, share) - deadline, 1e-9 * total, total)

    low, high = 0.0, 1e4
    for _ in range(50):
        middle = (low + high) / 2
        needed = sum(least_share(n, middle) for n in range(len(plans)))
        low, high = (low, middle) if needed <= total else (middle, high)
    return high


def noisy(problem: RoundProblem, rng: np.random.Generator, scale: float) -> RoundProblem:
    """Returns the problem with errors of measurement: each speed and gain has a factor of 1 +- scale."""

    def off() -> float:
        return float(rng.uniform(1 - scale, 1 + scale))

    def host(one: Host) -> Host:
        return replace(one, seconds_per_sample=one.seconds_per_sample * off())

    def link(one: Link) -> Link:
        if isinstance(one, RadioLink):
            return replace(one, gain=one.gain * off())
        return replace(one, capacity_bps=one.capacity_bps * off())

    clusters = tuple(
        replace(
            cluster,
            control_unit=host(cluster.control_unit),
            devices=tuple(map(host, cluster.devices)),
            edge_server=host(cluster.edge_server),
            links={pair: link(one) for pair, one in cluster.links.items()},
        )
        for cluster in problem.clusters
    )
    return replace(problem, clusters=clusters)
