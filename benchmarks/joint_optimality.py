"""How far is `dssra` from the joint optimum of placement and bandwidth, where clusters share one channel?

    python -m benchmarks joint_optimality [--links wires|radios|both] [--instances N] [--first SEED]

The optimum comes from an exact programme that shares only the model of a round with `dssra`. It knows one or more
clusters of few devices, links that are alike in both directions, one codec, no energy budgets, blocks on devices
only, and windows that hold every micro-batch. Radios have no highest modulation, and uploads take no time.

For a deadline, a bisection finds the price of a second that leads to the least shares, and a golden-section search
finds the best limit for the loads. Clusters are coupled by the channel and by the processor of the edge server.
T_others of (5) follows from the numbers of micro-batches,
so each combination of these numbers is a problem of its own: the earliest deadline for which the sum of the least
shares of all clusters fits into the channel.

On radios, pipelines are first left out by a lower bound, in which each link has the full power of its sender.
For the others, the programme divides the power of each device between its two links. Its optimum is thus a real
plan, not a bound. It is nearly exact: the powers of a pipeline follow from its shares at one deadline.
"""

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from benchmarks.joint_optimality_links import Bools, Floats, Radios, Wires
from benchmarks.optimality import make_round
from collapipe.allocation import decide_round, predict, violations
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Host,
    Link,
    LinkPlan,
    RadioLink,
    RoundPlan,
    RoundProblem,
    StagePlan,
    WiredLink,
)
from collapipe.allocation.round_model.weights_transfer import weights_seconds

Indices = npt.NDArray[np.intp]

CHANNEL = "channel"
TOLERANCE = 1e-5
PRICE_RANGE, RELAXED_STEPS, PRICE_STEPS, LIMIT_STEPS = 20.0, 12, 22, 18
GOLDEN, TINY = (math.sqrt(5) - 1) / 2, 1e-300


@dataclass(frozen=True)
class Pipelines:
    """Pipelines of one cluster with one number of micro-batches; P are left.

    Args:
        stages: Its entry in `_all_stages`. (P)
        fixed_seconds: Time of a round without transfers and without the bottleneck. (P)
        slowest_stage: The longest time of a micro-batch on a stage. (P)
        head_seconds: Time of a micro-batch on the last stage.
        links: Those of each pipeline, of which only the first ones exist. (P, K + 1)
        bits: Bits of a micro-batch on a link, in each direction.
        local_steps: H of (6).
        others: T_others of (5).
        least_bottleneck: The bottleneck of (5) if each link had the whole channel. (P)
        fastest: The time of a round then. (P)
    """

    num_micro_batches: int
    stages: Indices
    fixed_seconds: Floats
    slowest_stage: Floats
    head_seconds: float
    links: Wires | Radios
    bits: float
    local_steps: int
    others: float
    least_bottleneck: Floats
    fastest: Floats

    def kept(self, chosen: Bools) -> "Pipelines":
        return replace(
            self,
            stages=self.stages[chosen],
            fixed_seconds=self.fixed_seconds[chosen],
            slowest_stage=self.slowest_stage[chosen],
            links=self.links.kept(chosen),
            least_bottleneck=self.least_bottleneck[chosen],
            fastest=self.fastest[chosen],
        )

    @property
    def edge_seconds(self) -> float:
        """The time of a mini-batch on the edge server."""
        return self.num_micro_batches * self.head_seconds

    def loads(self, shares: Floats) -> Floats:
        """Returns for how long a micro-batch loads each link. (P, K + 1)"""
        return self.bits * self.links.seconds_per_bit(shares)

    def round_seconds(self, loads: Floats, bottleneck: Floats) -> Floats:
        """Returns the round time (6) of each pipeline for the loads of links and a bottleneck. (P)"""
        repeats = self.num_micro_batches - 1
        rest = repeats * bottleneck if repeats else np.full_like(bottleneck, self.others)
        loop = self.links.transfers_per_load * loads.sum(axis=1)
        return np.asarray(self.fixed_seconds + self.local_steps * (loop + rest))

    def divided(self, shares: Floats) -> "Pipelines":
        """Returns the pipelines with powers that fit some shares; see `Radios.divided`."""
        return replace(self, links=self.links.divided(shares))

    def coupled(self, others: float) -> "Pipelines":
        """Returns the pipelines for another T_others of (5), with their least bottlenecks and round times."""
        loads = self.loads(self.links.shares_for_load(np.full((len(self.stages), 1), TINY)))
        edge = self.head_seconds + others / max(self.num_micro_batches - 1, 1)
        least = np.maximum(np.maximum(self.slowest_stage, loads.max(axis=1)), edge)
        coupled = replace(self, others=others, least_bottleneck=least)
        return replace(coupled, fastest=coupled.round_seconds(loads, least))

    def relaxed_shares(self, deadline: float) -> Floats:
        """Returns shares with no larger sums than `least_shares`, as if no link were the bottleneck. (P, K + 1)"""
        return self._cheapest(np.full(len(self.stages), math.inf), deadline, relaxed=True)

    def least_shares(self, deadline: float) -> Floats:
        """Returns the shares with the least sum that keep a deadline not before `fastest`. (P, K + 1)

        The golden-section search varies the limit of the loads. The least sum is convex in this limit.
        """
        low = np.log(self.least_bottleneck)
        best = self._cheapest(np.full(len(low), math.inf), deadline)
        if self.num_micro_batches == 1:
            return best
        high = np.maximum(low, np.log(self.loads(best).max(axis=1)))
        width = GOLDEN * (high - low)
        first, last = high - width, low + width
        tried = [self._cheapest(np.exp(at), deadline) for at in (first, last)]
        sums = [shares.sum(axis=1) for shares in tried]
        for shares, own in zip(tried, sums, strict=True):
            best = np.where((own < best.sum(axis=1))[:, None], shares, best)
        for _ in range(LIMIT_STEPS):
            left = sums[0] <= sums[1]
            low, high = np.where(left, low, first), np.where(left, last, high)
            width = GOLDEN * (high - low)
            new = np.where(left, high - width, low + width)
            shares = self._cheapest(np.exp(new), deadline)
            own = shares.sum(axis=1)
            best = np.where((own < best.sum(axis=1))[:, None], shares, best)
            first, last = np.where(left, new, last), np.where(left, first, new)
            sums = [np.where(left, own, sums[1]), np.where(left, sums[0], own)]
        return best

    def _cheapest(self, most: Floats, deadline: float, *, relaxed: bool = False) -> Floats:
        """Returns the least shares if no link may be loaded for longer than a limit. (P, K + 1)

        All links have the same price of a second. Bisection finds the price that keeps the deadline. If `relaxed`,
        the bottleneck does not follow from the shares, and the result is slightly below the least shares.

        Args:
            most: The limit, in seconds. (P)
        """
        floor = self.links.shares_for_load((most / self.bits)[:, None])
        high = np.full(len(most), 2 * math.log(self.links.total) + PRICE_RANGE)
        low, best = high - 2 * PRICE_RANGE, np.full_like(floor, 0.0 if relaxed else math.inf)
        for step in range(RELAXED_STEPS if relaxed else PRICE_STEPS):
            price = np.exp((low + high) / 2 if step or relaxed else high)
            shares = np.maximum(floor, self.links.shares_at_price(price[:, None]))
            loads = self.loads(shares)
            bottleneck = self.least_bottleneck
            if not relaxed:
                bottleneck = np.maximum(bottleneck, loads.max(axis=1))
            enough = self.round_seconds(loads, bottleneck) <= deadline
            best = np.where((enough ^ relaxed)[:, None], shares, best)
            if step or relaxed:
                middle = (low + high) / 2
                high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        return best


def optimal_plans(problem: RoundProblem, upper_bound: float = math.inf) -> RoundPlan:
    """Returns the best plans, with full windows. Their round time is within 0.01 % of the optimum.

    Args:
        upper_bound: Seconds of a round that the best plans need less than. It only saves time.
    """
    total = problem.channels[CHANNEL]
    options = [
        [_pipelines(problem, cluster, count) for count in cluster.micro_batch_options]
        for cluster in problem.clusters
    ]
    best, plans = upper_bound - problem.fixed_seconds, None
    for chosen in itertools.product(*options):
        found = _earliest(chosen, total, best)
        if found is not None:
            best, pipelines, shares = found
            plans = tuple(
                _plan(problem, cluster, one, given)
                for cluster, one, given in zip(problem.clusters, pipelines, shares, strict=True)
            )
    assert plans is not None and not violations(problem, plans)
    assert predict(problem, plans).round_seconds <= (best + problem.fixed_seconds) * (1 + TOLERANCE)
    return plans


def _earliest(
    chosen: Sequence[Pipelines], total: float, upper_bound: float
) -> tuple[float, list[Pipelines], list[Floats]] | None:
    """Returns the earliest deadline below a bound, and for each cluster its pipeline and the shares of this."""
    edge = sum(one.edge_seconds for one in chosen)
    left = [one.coupled(edge - one.edge_seconds) for one in chosen]
    low = max(float(one.fastest.min()) for one in left)
    high = deadline = min(upper_bound * (1 - TOLERANCE), 1e3 * low)
    found, step = None, TOLERANCE
    while high > low * (1 + TOLERANCE):
        fits = _fitting(left, deadline, total)
        if fits is not None:
            # Least shares only grow for earlier deadlines, so what does not fit now will not fit later.
            left, solved = fits
            best = [int(shares.sum(axis=1).argmin()) for shares in solved]
            pipelines = [
                one.kept(np.arange(len(one.stages)) == i) for one, i in zip(left, best, strict=True)
            ]
            found = deadline, pipelines, [own[i] for own, i in zip(solved, best, strict=True)]
            # The bound is often near the optimum, so the first steps are small.
            high, step = deadline, 4 * step
        elif found is None:
            return None
        else:
            low, step = deadline, 1.0
        deadline = max((low + high) / 2, high * (1 - step))
    return found


def _fitting(
    pipelines: Sequence[Pipelines], deadline: float, total: float
) -> tuple[list[Pipelines], list[Floats]] | None:
    """Returns the pipelines that keep a deadline within the channel, and their least shares."""
    left = [one.kept(one.fastest <= deadline) for one in pipelines]
    share_power = left[0].links.share_power
    for step in range(3 if share_power else 2):
        if not all(len(one.stages) for one in left):
            return None
        solve = Pipelines.least_shares if step else Pipelines.relaxed_shares
        solved = [solve(one, deadline) for one in left]
        sums = [shares.sum(axis=1) for shares in solved]
        least = sum(float(own.min()) for own in sums)
        fits = [own + least - own.min() <= total for own in sums]
        left = [one.kept(chosen) for one, chosen in zip(left, fits, strict=True)]
        solved = [shares[chosen] for shares, chosen in zip(solved, fits, strict=True)]
        if share_power and step == 1:
            # The powers may still be those of a later deadline, or at first too large.
            left = [one.divided(shares) for one, shares in zip(left, solved, strict=True)]
    return (left, solved) if all(len(one.stages) for one in left) else None


def _pipelines(problem: RoundProblem, cluster: ClusterProblem, count: int) -> Pipelines:
    """Returns all pipelines with a number of micro-batches that keep the limits of memory."""
    num_blocks, model = problem.model.num_blocks, problem.model
    size, num_devices = problem.mini_batch / count, len(cluster.devices)
    hosts = [*cluster.devices, cluster.control_unit, cluster.edge_server]
    ends = {num_devices: (0, 1), num_devices + 1: (num_blocks + 1, num_blocks + 2)}

    def costs(k: int, units: tuple[int, int]) -> tuple[float, float]:
        """Returns the seconds of a micro-batch, and those of weights in a round."""
        weights = weights_seconds(problem, cluster, hosts[k], "fp32", *units)
        seconds = hosts[k].compute_seconds(size, model.work(*units))
        return seconds, weights.per_round(problem)

    # The last entry of each table stands for no device or no link.
    table = np.zeros((2, num_devices + 1, num_blocks + 1, num_blocks + 1))
    for k, (start, stop) in itertools.product(
        range(num_devices), itertools.combinations(range(num_blocks + 1), 2)
    ):
        units, limit = (start + 1, stop + 1), hosts[k].memory_bytes
        need = hosts[k].base_bytes + model.memory_bytes(*units, count, size)
        fits = limit is None or need <= limit
        table[:, k, start, stop] = costs(k, units) if fits else math.inf
    devices, starts, stops = _all_stages(num_devices, num_blocks)
    compute, weights = table[:, devices, starts, stops]
    given = [costs(k, units) for k, units in ends.items()]
    compute = np.column_stack([compute, np.full((len(devices), 2), [one for one, _ in given])])
    names = [host.host_id for host in hosts]
    pairs = list(itertools.permutations(names, 2))
    place = np.full((num_devices + 2, num_devices + 2), len(pairs))
    trips = np.zeros(len(pairs) + 1)
    for i, (sender, receiver) in enumerate(pairs):
        place[names.index(sender), names.index(receiver)] = i
        trips[i] = cluster.links[sender, receiver].round_trip_seconds
    # The sequence of hosts: the control unit, the devices, and then only the edge server.
    entry, head = np.full((2, len(devices), 1), [[[num_devices]], [[num_devices + 1]]])
    between = np.where(devices == num_devices, num_devices + 1, devices)
    order = np.column_stack([entry, between, head])
    index = place[order[:, :-1], order[:, 1:]]
    loop = compute.sum(axis=1) + trips[index].sum(axis=1) + cluster.step_seconds
    fixed = problem.local_steps * loop + weights.sum(axis=1) + sum(one for _, one in given)
    every = Pipelines(
        count,
        np.arange(len(devices)),
        fixed,
        compute.max(axis=1),
        given[1][0],
        _links(cluster, pairs, index, problem.channels[CHANNEL]),
        8 * size * model.activation_bytes,
        problem.local_steps,
        0.0,
        fixed,
        fixed,
    )
    return every.kept(np.isfinite(fixed))


def _links(
    cluster: ClusterProblem, pairs: Sequence[tuple[str, str]], index: Indices, total: float
) -> Wires | Radios:
    """Returns the links of pipelines.

    Args:
        index: The pair of each link; the number of pairs means no link. (P, K + 1)
    """
    hosts, rows = cluster.hosts, []
    for sender, receiver in pairs:
        link, back = cluster.links[sender, receiver], cluster.links[receiver, sender]
        assert link == back
        if isinstance(link, WiredLink):
            rows.append([link.capacity_bps])
        else:
            limits = [hosts[one].max_transmit_watts for one in (sender, receiver)]
            assert math.isinf(link.most_bits_per_hertz)
            rows.append(
                [math.log(2) / link.efficiency, link.gain / link.noise_watts_per_hertz, *limits]
            )
    table = np.array(rows)
    if table.shape[1] == 1:
        return Wires(np.append(table, 0.0)[index], total)
    nats_per_bit, signal, ahead, back = np.vstack([table, [0.0, total, 1.0, 1.0]]).T[:, index]
    watts = np.stack([ahead, back])
    return Radios(signal, watts, np.ones_like(watts), nats_per_bit, total)


@lru_cache(maxsize=64)
def _all_stages(num_devices: int, num_blocks: int) -> tuple[Indices, Indices, Indices]:
    """Returns every order of some devices, and the first block and the end of each. (P, K) each

    A pipeline with fewer devices ends with device K, which has no blocks.
    """
    rows = []
    for used in range(1, min(num_devices, num_blocks) + 1):
        none = (0,) * (num_devices - used)
        for order in itertools.permutations(range(num_devices), used):
            filled = order + (num_devices,) * (num_devices - used)
            for cuts in itertools.combinations(range(1, num_blocks), used - 1):
                rows.append((filled, (0, *cuts, *none), (*cuts, num_blocks, *none)))
    devices, starts, stops = np.array(rows).transpose(1, 0, 2)
    return devices, starts, stops


def _plan(
    problem: RoundProblem, cluster: ClusterProblem, pipeline: Pipelines, shares: Floats
) -> ClusterPlan:
    """Returns the plan of the only pipeline that is left."""
    count, num_blocks = pipeline.num_micro_batches, problem.model.num_blocks
    tables = _all_stages(len(cluster.devices), num_blocks)
    devices, _, stops = (table[pipeline.stages[0]].tolist() for table in tables)
    used = [k for k in devices if k < len(cluster.devices)]
    hosts = [cluster.control_unit, *(cluster.devices[k] for k in used), cluster.edge_server]
    edges = [0, 1, *(stop + 1 for stop in stops[: len(used)]), num_blocks + 2]
    planned = tuple(
        StagePlan(host.host_id, *units, count)
        for host, units in zip(hosts, itertools.pairwise(edges), strict=True)
    )
    ahead, back = pipeline.links.watts()[:, 0]
    chosen = np.column_stack([shares, ahead, back])[: len(hosts) - 1]
    links = tuple(LinkPlan("fp32", *numbers) for numbers in chosen.tolist())
    return ClusterPlan(planned, count, links)


def make_shared_round(seed: int, *, radio: bool = False) -> RoundProblem:
    """Returns a random round of one cluster (a third of the seeds) or of two clusters on one channel.

    Weights take no time, except if blocks move, so that they do not hide a part of the gap.
    """
    numbers = random.Random(f"shared {seed} True")
    num_blocks = numbers.randint(4, 8)
    rounds = [
        make_round(2 * seed + n, numbers.randint(2, 4), num_blocks, f"{n}-")
        for n in range(1 if seed % 3 == 0 else 2)
    ]

    def host(one: Host, watts: tuple[float, float] = (1.0, 1.0)) -> Host:
        watts = numbers.uniform(*watts) if radio else 0.0
        return replace(
            one, backlog=0.0, push_bps=math.inf, fetch_bps=math.inf, max_transmit_watts=watts
        )

    def link(one: Link) -> Link:
        if not radio:
            return one
        gain, efficiency = 10 ** numbers.uniform(-10, -7), numbers.uniform(0.7, 1.0)
        return RadioLink(gain, 4e-20, one.round_trip_seconds, efficiency)

    edge_server = host(rounds[0].clusters[0].edge_server)
    clusters = []
    for given in rounds:
        (cluster,) = given.clusters
        links: dict[tuple[str, str], Link] = {}
        for (sender, receiver), one in cluster.links.items():
            if sender < receiver:
                links[sender, receiver] = links[receiver, sender] = link(one)
        clusters.append(
            replace(
                cluster,
                control_unit=host(cluster.control_unit),
                devices=tuple(host(device, (0.1, 0.5)) for device in cluster.devices),
                edge_server=edge_server,
                links=links,
                micro_batch_options=(1, 2, 4, 8),
                channel=CHANNEL,
            )
        )
    total = 10 ** (numbers.uniform(6.5, 8.3) if radio else numbers.uniform(7.3, 9.0))
    return replace(rounds[0], clusters=tuple(clusters), channels={CHANNEL: total})


@dataclass(frozen=True)
class Outcome:
    """One decision. Its gap is relative to the optimum, in percent."""

    seed: int
    num_clusters: int
    gap: float
    search_seconds: float
    exact_seconds: float


def compare(seed: int, *, radio: bool = False) -> Outcome:
    problem = make_shared_round(seed, radio=radio)
    started = time.process_time()
    found = decide_round(problem, "dssra", hysteresis=0.0).prediction
    middle = time.process_time()
    optimum = predict(problem, optimal_plans(problem, 1.0002 * found.round_seconds)).objective
    seconds = middle - started, time.process_time() - middle
    return Outcome(seed, len(problem.clusters), 100 * (found.objective / optimum - 1), *seconds)


def main() -> None:
    """Compares the decisions of `dssra` with the exact programme on random rounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of benchmarks for `python -m benchmarks`")
    parser.add_argument("--links", choices=("wires", "radios", "both"), default="both")
    parser.add_argument("--instances", type=int, default=12, help="for each kind of links")
    parser.add_argument("--first", type=int, default=0, help="seed of the first instance")
    chosen = parser.parse_args()
    for kind in ("wires", "radios") if chosen.links == "both" else (chosen.links,):
        seeds = range(chosen.first, chosen.first + chosen.instances)
        outcomes = [compare(seed, radio=kind == "radios") for seed in seeds]
        print(f"{kind}\nclusters  instances  gap, %: mean      99 %     worst  s: search     exact")
        for count in sorted({one.num_clusters for one in outcomes}):
            _print_row(str(count), [one for one in outcomes if one.num_clusters == count])
        _print_row("all", outcomes)
        for one in sorted(outcomes, key=lambda one: -one.gap)[:5]:
            print(f"seed {one.seed}, {one.num_clusters} clusters: gap {one.gap:.4f} %")


def _print_row(clusters: str, outcomes: Sequence[Outcome]) -> None:
    gaps = [one.gap for one in outcomes]
    search = statistics.mean(one.search_seconds for one in outcomes)
    exact = statistics.mean(one.exact_seconds for one in outcomes)
    cells = (statistics.mean(gaps), float(np.percentile(gaps, 99)), max(gaps))
    print(f"{clusters:>8}{len(outcomes):11}    ", end="")
    print("".join(f"{gap:10.4f}" for gap in cells), f"{search:10.3f}{exact:10.3f}", flush=True)


if __name__ == "__main__":
    main()
