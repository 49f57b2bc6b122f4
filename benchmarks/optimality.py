"""How far is the search for plans from the true optimum, for one cluster of 7 to 12 devices?

    python -m benchmarks optimality [--instances N] [--first SEED]

The optimum comes from an exact programme that shares only the model of a round with the search. It knows one
cluster, one codec, links without transmit power, and windows that hold every micro-batch.

For each number of micro-batches, it limits the bottleneck: no stage and no link may be busy for longer than a limit.
A dynamic programme over (set of devices, last device, blocks placed) then finds the least sum of all other costs.
This sum falls when the limit rises. So the sum at a high limit, plus the price of a low limit as bottleneck,
is a lower bound for all limits between. Intervals of limits are halved until no bound beats the best plan.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from collapipe.allocation.round_model.limits import violations
from collapipe.allocation.round_model.prediction import link_seconds, predict
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Host,
    LinkPlan,
    ModelCost,
    RoundPlan,
    RoundProblem,
    StagePlan,
    WiredLink,
)
from collapipe.allocation.round_model.weights_transfer import weights_seconds
from collapipe.allocation.search.segments import place_segments

Floats = npt.NDArray[np.float64]
Pipeline = list[tuple[int, int]]
"""Each host of a pipeline, as an index into `Tables`, and the number of blocks up to its end."""

STATE_BYTES, ACTIVATION_BYTES = 28e6, 128 * 256 * 4
MINI_BATCH = 32
NOTABLE_GAP, ROUNDING = 1e-3, 1e-9


@dataclass(frozen=True)
class Tables:
    """The parts of pipelines with one number of micro-batches. What is not allowed is infinite.

    Indices are the K devices, then the control unit, then the edge server. Costs have the unit of the objective.

    Args:
        stage_busy: Seconds of a micro-batch on a host with blocks s to e of L. (K + 2, L + 1, L + 1)
        stage_cost: Its cost in time, weights and energy, without the bottleneck. (K + 2, L + 1, L + 1)
        link_busy: Seconds for which a micro-batch occupies a link, by sender and receiver. (K + 2, K + 2)
        link_cost: The cost of its latency, without the bottleneck. (K + 2, K + 2)
        bottleneck_price: Cost of one second of the bottleneck.
    """

    stage_busy: Floats
    stage_cost: Floats
    link_busy: Floats
    link_cost: Floats
    bottleneck_price: float


def optimal_plan(problem: RoundProblem) -> RoundPlan:
    """Returns the best plan of the only cluster, with full windows."""
    (cluster,) = problem.clusters
    seconds = problem.local_steps * cluster.step_seconds + problem.fixed_seconds
    fixed_cost = problem.penalty_weight * seconds / problem.reference_seconds
    value, plans = math.inf, None
    for num_micro_batches in reversed(cluster.micro_batch_options):
        found, pipeline = _best_pipeline(_tables(problem, num_micro_batches), value)
        if pipeline:
            value, plans = found, (_plan(problem, num_micro_batches, pipeline),)
            predicted = predict(problem, plans).objective
            assert math.isclose(value + fixed_cost, predicted, rel_tol=ROUNDING)
    assert plans is not None and not violations(problem, plans)
    return plans


def _tables(problem: RoundProblem, num_micro_batches: int) -> Tables:
    (cluster,), size = problem.clusters, problem.mini_batch / num_micro_batches
    hosts, width = _hosts(cluster), problem.model.num_blocks + 1
    second_price = problem.penalty_weight / problem.reference_seconds
    loop_price = second_price * problem.local_steps
    stages = np.full((2, len(hosts), width, width), math.inf)
    for k, start, stop, units in _ranges(problem):
        host = hosts[k]
        need = host.base_bytes + problem.model.memory_bytes(*units, num_micro_batches, size)
        if host.memory_bytes is None or need <= host.memory_bytes:
            seconds = host.compute_seconds(size, problem.model.work(*units))
            joules = problem.local_steps * num_micro_batches * host.busy_watts * seconds
            weights = weights_seconds(problem, cluster, host, "fp32", *units).per_round(problem)
            cost = loop_price * seconds + second_price * weights + host.joule_weight * joules
            stages[:, k, start, stop] = seconds, cost
    links = np.full((2, len(hosts), len(hosts)), math.inf)
    for a, b in itertools.permutations(range(len(hosts)), 2):
        pair = hosts[a].host_id, hosts[b].host_id
        link = link_seconds(problem, cluster, *pair, LinkPlan(), size)
        links[:, a, b] = link.load_seconds, loop_price * link.loop_seconds
    return Tables(stages[0], stages[1], links[0], links[1], loop_price * (num_micro_batches - 1))


def _hosts(cluster: ClusterProblem) -> list[Host]:
    return [*cluster.devices, cluster.control_unit, cluster.edge_server]


def _ranges(problem: RoundProblem) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yields every index of a host with the blocks s and e, and the units, that it may run."""
    num_devices, num_blocks = len(problem.clusters[0].devices), problem.model.num_blocks
    for start, stop in itertools.combinations(range(num_blocks + 1), 2):
        yield from ((k, start, stop, (start + 1, stop + 1)) for k in range(num_devices))
    for count in range(num_blocks + 1 if problem.blocks_on_control_unit else 1):
        yield num_devices, 0, count, (0, count + 1)
    for count in range(num_blocks + 1 if problem.blocks_on_edge_server else 1):
        start = num_blocks - count
        yield num_devices + 1, start, num_blocks, (start + 1, num_blocks + 2)


def _best_pipeline(tables: Tables, upper_bound: float) -> tuple[float, Pipeline]:
    """Returns the least cost below an upper bound, and its pipeline, which is empty if there is none."""
    busy = np.concatenate([tables.stage_busy.ravel(), tables.link_busy.ravel()])
    limits, price = np.unique(busy[np.isfinite(busy)]), tables.bottleneck_price
    value, best = upper_bound, []
    # Lower bound of an interval, its first and last limit, and the least sum at a higher limit.
    intervals = [(-math.inf, 0, len(limits) - 1, -math.inf)]
    while intervals:
        _, first, last, least_sum = heapq.heappop(intervals)
        last = min(last, int(np.searchsorted(price * limits + least_sum, value)) - 1)
        if first > last:
            continue
        # The highest limit comes first, because its sum bounds all others.
        middle = last if least_sum == -math.inf else (first + last) // 2
        total, bottleneck, pipeline = _cheapest_pipeline(tables, limits[middle])
        if middle < last:
            bound = price * limits[middle + 1] + least_sum
            heapq.heappush(intervals, (bound, middle + 1, last, least_sum))
        if pipeline:
            if total + price * bottleneck < value:
                value, best = total + price * bottleneck, pipeline
            below = int(np.searchsorted(limits, bottleneck)) - 1
            heapq.heappush(intervals, (price * limits[first] + total, first, below, total))
    return value, best


def _cheapest_pipeline(tables: Tables, limit: float) -> tuple[float, float, Pipeline]:
    """Returns the least sum for a limit, the bottleneck of its pipeline, and this pipeline, empty if none fits."""
    stages = np.where(tables.stage_busy <= limit, tables.stage_cost, math.inf)
    links = np.where(tables.link_busy <= limit, tables.link_cost, math.inf)
    edge, sums = len(stages) - 1, _least_sums(stages, links)
    ends = sums + links[:edge, edge, None, None] + stages[edge, :, -1]
    host, used, stop = np.unravel_index(np.argmin(ends), ends.shape)
    total = float(ends[host, used, stop])
    if not math.isfinite(total):
        return math.inf, math.inf, []
    pipeline = [(edge, stages.shape[1] - 1), (int(host), int(stop))]
    while host != edge - 1:
        used ^= 1 << host
        before = sums[:, used, :stop] + links[:edge, host, None] + stages[host, :stop, stop]
        host, stop = np.unravel_index(np.argmin(before), before.shape)
        pipeline.append((int(host), int(stop)))
    pipeline.reverse()
    bottleneck, start = 0.0, 0
    for k, stop in pipeline:
        bottleneck, start = max(bottleneck, tables.stage_busy[k, start, stop]), stop
    for (a, _), (b, _) in itertools.pairwise(pipeline):
        bottleneck = max(bottleneck, tables.link_busy[a, b])
    return total, bottleneck, pipeline


def _least_sums(stages: Floats, links: Floats) -> Floats:
    """Returns the least sum of costs of each beginning of a pipeline. (K + 1, 2^K, L + 1)

    Entry [k, used, d] has the first d blocks on the control unit and on the devices of the bit mask `used`, of
    which k is the last. Entry [K, 0, d] has them on the control unit.
    """
    count, width = len(stages) - 2, stages.shape[1]
    sums = np.full((count + 1, 1 << count, width), math.inf)
    sums[count, 0] = stages[count, 0]
    masks = np.arange(1 << count)
    sizes = sum(masks >> k & 1 for k in range(count))
    for size, k in itertools.product(range(count), range(count)):
        used = masks[(sizes == size) & (masks >> k & 1 == 0)]
        before = (sums[:, used] + links[: count + 1, k, None, None]).min(axis=0)
        after = np.full_like(before, math.inf)
        for blocks in range(1, width):
            costs = stages[k].diagonal(blocks)
            if np.isfinite(costs).any():
                best = after[:, blocks:]
                np.minimum(best, before[:, :-blocks] + costs, out=best)
        sums[k, used | 1 << k] = after
    return sums


def _plan(problem: RoundProblem, num_micro_batches: int, pipeline: Pipeline) -> ClusterPlan:
    hosts = _hosts(problem.clusters[0])
    edges = [0, *(stop + 1 for _, stop in pipeline[:-1]), problem.model.num_blocks + 2]
    stages = tuple(
        StagePlan(hosts[k].host_id, *units, num_micro_batches)
        for (k, _), units in zip(pipeline, itertools.pairwise(edges), strict=True)
    )
    return ClusterPlan(stages, num_micro_batches, (LinkPlan(),) * (len(stages) - 1))


def make_round(seed: int, num_devices: int, num_blocks: int, prefix: str = "") -> RoundProblem:
    """Returns a random round of one cluster.

    Half of the rounds limit the memory of devices, half have energy budgets, and a third has slow links. Half
    follow another round, so that it costs time to move blocks. A stash takes no memory. Each memory limit has room
    for a number of blocks and for all queues of activations. So memory limits blocks, but no windows.

    Args:
        prefix: Beginning of the ids of all hosts but the edge server.
    """
    numbers = random.Random(seed)
    tight, energy, follows = (numbers.random() < 0.5 for _ in range(3))
    rates = (2e6, 3e7) if numbers.random() < 1 / 3 else (2e7, 3e8)
    longest_trip, most_overhead = numbers.choice([0.004, 0.04]), numbers.choice([0.003, 0.03])
    share = numbers.uniform(1.5, 3.0) * num_blocks / num_devices

    def host(name: str, slowest: float, most_blocks: int) -> Host:
        queues = 2 * MINI_BATCH * ACTIVATION_BYTES
        return Host(
            name,
            seconds_per_sample=numbers.uniform(slowest / 5, slowest),
            seconds_per_micro_batch=numbers.uniform(0.0005, most_overhead),
            memory_bytes=int(most_blocks * STATE_BYTES + queues),
            busy_watts=5.0,
            energy_budget_joules=numbers.uniform(50, 200) if energy else None,
            backlog=numbers.choice([0.0, 0.5, 2.0]) if energy else 0.0,
            push_bps=1e8,
            fetch_bps=1e8,
        )

    devices = tuple(
        host(f"{prefix}device-{k}", 0.01, math.ceil(share * numbers.uniform(0.7, 1.6)))
        for k in range(num_devices)
    )
    if not tight:
        devices = tuple(replace(device, memory_bytes=None) for device in devices)
    control, edge = (
        host(name, 0.02, numbers.randint(1, 4)) for name in (f"{prefix}control", "edge")
    )
    names = [control.host_id, *(device.host_id for device in devices), edge.host_id]
    links = {
        pair: WiredLink(numbers.uniform(*rates), numbers.uniform(0, longest_trip))
        for pair in itertools.permutations(names, 2)
    }
    options = numbers.choice([(8, 32), (4, 16), (2, 8, 32)])
    cluster = ClusterProblem(control, devices, edge, links, options, step_seconds=0.01)
    cost = ModelCost(
        num_blocks, STATE_BYTES, 0.0, ACTIVATION_BYTES, embedding_work=0.2, head_work=0.5
    )
    problem = RoundProblem((cluster,), cost, MINI_BATCH, local_steps=10, reference_seconds=10.0)
    if follows:
        order = numbers.sample(range(num_devices), num_devices)
        stops = [(i + 1) * num_blocks // num_devices for i in range(num_devices)]
        before = [(num_devices, 0), *zip(order, stops, strict=True), (num_devices + 1, num_blocks)]
        previous = _plan(problem, options[-1], before)
        problem = replace(problem, clusters=(replace(cluster, previous=previous),))
    return problem


@dataclass(frozen=True)
class Outcome:
    """One search. Its gap is relative to the optimum, in percent, and negative if the search was better."""

    seed: int
    num_devices: int
    hosts: str
    gap: float
    search_seconds: float
    exact_seconds: float


def _compare(seed: int) -> Iterator[Outcome]:
    """Yields both placements of a round. Of 25 rounds, one each has 10, 11 and 12 devices, and the others fewer."""
    num_devices = seed % 25 - 12 if seed % 25 >= 22 else 7 + seed % 3
    given = make_round(seed, num_devices, random.Random(f"blocks {seed}").randint(12, 24))
    assumed = [{pair: LinkPlan() for pair in given.clusters[0].links}]
    for hosts in ("devices", "all hosts"):
        every = hosts == "all hosts"
        problem = replace(given, blocks_on_control_unit=every, blocks_on_edge_server=every)
        started = time.process_time()
        found = predict(problem, place_segments(problem, assumed)).objective
        middle = time.process_time()
        optimum = predict(problem, optimal_plan(problem)).objective
        seconds = middle - started, time.process_time() - middle
        yield Outcome(seed, num_devices, hosts, 100 * (found / optimum - 1), *seconds)


def main() -> None:
    """Compares the search with the exact programme on random rounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of benchmarks for `python -m benchmarks`")
    parser.add_argument("--instances", type=int, default=25)
    parser.add_argument("--first", type=int, default=0, help="seed of the first instance")
    chosen = parser.parse_args()
    seeds = range(chosen.first, chosen.first + chosen.instances)
    outcomes = [outcome for seed in seeds for outcome in _compare(seed)]
    print("blocks on  devices  instances  gap, %: mean      99 %     worst  s: search     exact")
    for hosts in ("devices", "all hosts"):
        group = [one for one in outcomes if one.hosts == hosts]
        for count in sorted({one.num_devices for one in group}):
            _print_row(hosts, str(count), [one for one in group if one.num_devices == count])
        _print_row(hosts, "all", group)
    _print_row("both", "all", outcomes)
    for one in outcomes:
        if not -100 * ROUNDING <= one.gap <= 100 * NOTABLE_GAP:
            print(f"seed {one.seed}, blocks on {one.hosts}: gap {one.gap:.5f} %")


def _print_row(hosts: str, devices: str, outcomes: Sequence[Outcome]) -> None:
    gaps = [one.gap for one in outcomes]
    search = statistics.mean(one.search_seconds for one in outcomes)
    exact = statistics.mean(one.exact_seconds for one in outcomes)
    cells = (statistics.mean(gaps), float(np.percentile(gaps, 99)), max(gaps))
    print(f"{hosts:9}{devices:>9}{len(outcomes):11}   ", end="")
    print("".join(f"{gap:10.5f}" for gap in cells), f"{search:10.3f}{exact:10.3f}", flush=True)


if __name__ == "__main__":
    main()
