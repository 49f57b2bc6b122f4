"""Random problems with shared channels, and two simple solvers: a zooming grid, and root finding.

The solvers follow the equations of docs/scheduling.md and share no code with the search. So a mistake in the search
shows as a difference.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from collapipe.allocation import (
    ClusterPlan,
    ClusterProblem,
    Host,
    LinkPlan,
    ModelCost,
    RadioLink,
    RoundPlan,
    RoundProblem,
    StagePlan,
    WiredLink,
    predict,
)
from collapipe.allocation.round_model.problem import Link
from collapipe.allocation.search.bandwidth import Allocation, solve_shares
from collapipe.allocation.search.shared_links import shared_links

from .changes import with_cluster, with_hosts

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
        gain, efficiency = float(10 ** rng.uniform(-10, -7)), float(rng.uniform(0.7, 1))
        return RadioLink(gain, 4e-20, 0.002, efficiency, most_bits_per_hertz)

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
            windows = [int(rng.integers(1, stage.in_flight + 1)) for stage in plan.stages]
            stages = zip(plan.stages, windows, strict=True)
            plan = replace(plan, stages=tuple(replace(s, in_flight=n) for s, n in stages))
        plans.append(plan)
    return tuple(plans)


def every_plan(problem: RoundProblem) -> Iterator[RoundPlan]:
    """Yields every placement, order and number of micro-batches, with full windows and full power."""
    yield from itertools.product(
        *(list(_cluster_plans(cluster, problem.model.num_blocks)) for cluster in problem.clusters)
    )


def _cluster_plans(cluster: ClusterProblem, num_blocks: int) -> Iterator[ClusterPlan]:
    for count in range(1, min(len(cluster.devices), num_blocks) + 1):
        for devices, cuts, size in itertools.product(
            itertools.permutations(cluster.devices, count),
            itertools.combinations(range(2, num_blocks + 1), count - 1),
            cluster.micro_batch_options,
        ):
            hosts = [cluster.control_unit, *devices, cluster.edge_server]
            bounds = itertools.pairwise([0, 1, *cuts, num_blocks + 1, num_blocks + 2])
            stages = tuple(
                StagePlan(host.host_id, start, stop, size)
                for host, (start, stop) in zip(hosts, bounds, strict=True)
            )
            links = tuple(
                LinkPlan(
                    share=1.0,
                    forward_watts=_full(cluster, one, other),
                    backward_watts=_full(cluster, other, one),
                )
                for one, other in itertools.pairwise(hosts)
            )
            yield ClusterPlan(stages, size, links)


def _full(cluster: ClusterProblem, sender: Host, receiver: Host) -> float:
    """Returns the power of a sender, or half of it if the sender also sends to its other neighbour."""
    if not isinstance(cluster.links[sender.host_id, receiver.host_id], RadioLink):
        return 0.0
    return sender.max_transmit_watts / (2 if sender.host_id.startswith("device") else 1)


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


def zoomed(
    objective: Callable[[Vector], Vector],
    sizes: int,
    points: int = 7,
    zooms: int = 50,
    shrink: float = 0.85,
) -> float:
    """Returns the least value of a function of (points, sizes) on a grid that zooms in on its best point."""
    axes = [np.linspace(-1, 1, points)] * sizes
    unit = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, sizes)
    centre, best, width = np.zeros(sizes), math.inf, 3.0
    for _ in range(zooms):
        at = centre + unit * width
        values = objective(at)
        winner = int(np.argmin(values))
        best, centre, width = min(best, float(values[winner])), at[winner], width * shrink
    return best


def softmax(at: Vector) -> Vector:
    """Returns shares of 1, one more than the columns."""
    weights = np.exp(np.column_stack([at, np.zeros(len(at))]))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def best_on_grid(problem: RoundProblem, plans: RoundPlan) -> float:
    """Returns the least objective over a grid of shares and powers that zooms in on its best point."""
    (total,) = problem.channels.values()
    ends = [
        (cluster, one.host_id, other.host_id)
        for cluster, plan in zip(problem.clusters, plans, strict=True)
        for one, other in itertools.pairwise(plan.stages)
    ]
    limits, costly, senders = [], [], []
    for cluster, *pair in ends:
        radio = isinstance(cluster.links[pair[0], pair[1]], RadioLink)
        for host_id in pair:
            host = cluster.hosts[host_id]
            limits.append(host.max_transmit_watts)
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

    def values(at: Vector) -> Vector:
        watts = [np.full(len(at), limit) for limit in limits]
        for column, j in enumerate(powers, num_shares):
            watts[j] = limits[j] * np.exp(np.minimum(at[:, column] - 3.0, 0.0))
        for k, j in rest.items():
            watts[k] = limits[k] * np.maximum(1 - watts[j] / limits[j], 1e-9)
        pairs = list(zip(watts[::2], watts[1::2], strict=True))
        found = objectives(problem, plans, total * softmax(at[:, :num_shares]), pairs)
        for j, k in both:
            found = np.where(watts[j] + watts[k] <= limits[j] * (1 + 1e-8), found, math.inf)
        return found

    return zoomed(values, num_shares + len(powers), points=5, zooms=16, shrink=0.65)


def direct_problem(seed: int, num_clusters: int, wired: bool) -> tuple[RoundProblem, RoundPlan]:
    """Draws clusters with one link: the control unit runs all blocks and sends to the edge server."""
    problem = random_problem(seed, num_clusters, num_devices=1, wired=wired)
    rng = np.random.default_rng(seed)
    watts = 0.0 if wired else 1.0
    plans = []
    for cluster in problem.clusters:
        size = int(rng.choice([1, 2, 4]))
        stages = (
            StagePlan(cluster.control_unit.host_id, 0, 5, size),
            StagePlan(cluster.edge_server.host_id, 5, 6, size),
        )
        plans.append(ClusterPlan(stages, size, (LinkPlan("fp32", 1.0, watts, watts),)))
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
    for _ in range(45):
        middle = (low + high) / 2
        needed = sum(least_share(n, middle) for n in range(len(plans)))
        low, high = (low, middle) if needed <= total else (middle, high)
    return high


def noisy(problem: RoundProblem, rng: np.random.Generator, scale: float) -> RoundProblem:
    """Returns the problem with errors of measurement: each speed and gain has a factor of 1 +- scale."""

    def off() -> float:
        return float(rng.uniform(1 - scale, 1 + scale))

    def link(one: Link) -> Link:
        if isinstance(one, RadioLink):
            return replace(one, gain=one.gain * off())
        return replace(one, capacity_bps=one.capacity_bps * off())

    problem = with_hosts(
        problem, lambda host: replace(host, seconds_per_sample=host.seconds_per_sample * off())
    )
    for n, cluster in enumerate(problem.clusters):
        links = {pair: link(one) for pair, one in cluster.links.items()}
        problem = with_cluster(problem, n, links=links)
    return problem


def share_at_given_powers(problem: RoundProblem, plans: RoundPlan) -> Allocation:
    """Finds the shares that minimise docs/scheduling.md (13) with the powers of the plans."""
    links = shared_links(problem, plans)
    assert links is not None
    watts, shares = links.powers(plans), links.equal_shares()
    none = np.zeros(0)
    start = links.point(shares, watts, none, none)
    solved, prices = solve_shares(links, start, np.zeros_like(links.radio))
    found = links.applied(plans, replace(solved, watts=watts))
    return Allocation(found, predict(problem, found), prices)
