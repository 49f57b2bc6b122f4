"""How does the time of the search grow with devices, blocks and clusters? Medians on one core.

    python -m benchmarks allocation

The first table has one cluster and one number of micro-batches. The second one has every number of
micro-batches; "warm" means that the search starts from the plan of a slightly different round.
"""

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.round_model.problem import (
    ClusterProblem,
    Convergence,
    Host,
    LinkPlan,
    ModelCost,
    RoundProblem,
    WiredLink,
)
from collapipe.allocation.search.dssra import decide
from collapipe.allocation.search.link_tables import AssumedLinks
from collapipe.allocation.search.segments import place_segments
from collapipe.codec_table import CodecName

REPETITIONS = 5
PLOT = Path("build/allocation-growth.svg")
OPTIONS = (1, 2, 4, 8, 16, 32)
SINGLE_CLUSTERS = ((4, 12), (6, 18), (8, 24), (16, 48))
PLANS = (
    (1, 4, 12),
    (2, 4, 12),
    (4, 4, 12),
    (10, 4, 12),
    (2, 5, 12),
    (2, 6, 12),
    (2, 6, 24),
    (2, 8, 24),
    (2, 12, 24),
    (4, 8, 24),
    (10, 8, 24),
)
MANY_CLUSTERS = ((4, 8, 24), (10, 8, 24), (32, 8, 32), (100, 8, 24), (200, 8, 24))


def main() -> None:
    """Measures `place_segments` for one cluster, then for several, then the whole decision."""
    several, many = "several clusters, warm", "without energy budgets, warm"
    growth: dict[str, list[tuple[str, float]]] = {"one cluster": [], several: [], many: []}
    print("one cluster, ms                    free   memory  window<=8")
    for devices, blocks in SINGLE_CLUSTERS:
        cells = []
        for tight, limit in ((False, None), (True, None), (False, 8)):
            problem, assumed = _round(1, devices, blocks, tight=tight, options=(32,))
            problem = replace(problem, in_flight_limit=limit)
            cells.append(_milliseconds(lambda p=problem, a=assumed: place_segments(p, a)))
        print(
            f"  {devices:2} devices {blocks:3} blocks     "
            + "".join(f"{cell:9.1f}" for cell in cells),
            flush=True,
        )
        growth["one cluster"].append((f"{devices} x {blocks}", max(cells)))
    print("several clusters, ms               cold     warm  gain over the plan of the other round")
    for clusters, devices, blocks in PLANS:
        warm = _plan_row(clusters, devices, blocks, ("fp32",))
        growth[several].append((f"{clusters} x {devices} x {blocks}", warm))
    _plan_row(2, 4, 12, ("fp32", "bf16", "int8"))
    print("without energy budgets, ms         cold     warm  gain over the plan of the other round")
    for clusters, devices, blocks in MANY_CLUSTERS:
        warm = _plan_row(clusters, devices, blocks, ("fp32",), budgets=False)
        growth[many].append((f"{clusters} x {devices} x {blocks}", warm))
    _decision_row(2, 4, 12)
    _plot(growth)


def _decision_row(clusters: int, devices: int, blocks: int) -> None:
    """Measures `decide`, which also allocates bandwidth; the first call also imports the solver."""
    problem, _ = _round(clusters, devices, blocks)
    later, _ = _round(clusters, devices, blocks, drift=0.1)
    problem, later = (
        replace(
            one,
            clusters=tuple(replace(cluster, channel="shared") for cluster in one.clusters),
            channels={"shared": 2e8},
        )
        for one in (problem, later)
    )
    started = time.process_time()
    known = decide(problem, None).plans
    first = 1e3 * (time.process_time() - started)
    cold = _milliseconds(lambda: decide(problem, None))
    warm = _milliseconds(lambda: decide(later, known))
    print(
        f"a decision with shares, {clusters} x {devices} devices {blocks} blocks: first {first:.0f} ms, cold {cold:.0f} ms, "
        f"warm {warm:.0f} ms"
    )


def _plot(growth: dict[str, list[tuple[str, float]]]) -> None:
    """Draws the growth if matplotlib is installed."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed (extra simulation)")
        return
    figure, axes = pyplot.subplots(1, len(growth), figsize=(12, 4), layout="constrained")
    for axis, (title, rows) in zip(axes, growth.items(), strict=True):
        labels, values = zip(*rows, strict=True)
        axis.plot(labels, values, marker="o")
        axis.set(title=title, ylabel="ms", yscale="log")
        axis.tick_params(axis="x", rotation=45)
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_xlabel("devices x blocks")
    for axis in axes[1:]:
        axis.set_xlabel("clusters x devices x blocks")
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT)
    print(f"plot in {PLOT}")


def _plan_row(
    clusters: int,
    devices: int,
    blocks: int,
    codecs: tuple[CodecName, ...],
    *,
    budgets: bool = True,
) -> float:
    problem, assumed = _round(clusters, devices, blocks, codecs=codecs, budgets=budgets)
    cold = _milliseconds(lambda: place_segments(problem, assumed))
    known = place_segments(problem, assumed)
    later, changed = _round(clusters, devices, blocks, codecs=codecs, drift=0.1, budgets=budgets)
    warm = _milliseconds(lambda: place_segments(later, changed, starts=[known]))
    found = place_segments(later, changed, starts=[known])
    gained = 1 - predict(later, found).objective / predict(later, known).objective
    print(
        f"  {clusters:2} x {devices:2} devices {blocks:3} blocks {len(codecs)} codecs"
        f"{cold:9.1f}{warm:9.1f}{100 * gained:9.2f} %",
        flush=True,
    )
    return warm


def _milliseconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPETITIONS):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
        if seconds[-1] > 3:
            break
    return 1e3 * statistics.median(seconds)


def _round(
    num_clusters: int,
    num_devices: int,
    num_blocks: int,
    *,
    tight: bool = True,
    codecs: tuple[CodecName, ...] = ("fp32",),
    options: tuple[int, ...] = OPTIONS,
    drift: float = 0.0,
    budgets: bool = True,
) -> tuple[RoundProblem, list[AssumedLinks]]:
    """Builds a round with wired links, and devices up to five times as fast as others.

    Args:
        tight: Whether the memory of the devices is limited.
        drift: The largest relative change of a rate, for a round that is nearly the same.
        budgets: Whether hosts have energy budgets.
    """
    numbers, noise = random.Random(7), random.Random(8)
    state = 28e6

    def changed(value: float) -> float:
        return value * (1 + drift * noise.uniform(-1, 1))

    def host(name: str, memory: int | None = None) -> Host:
        return Host(
            name,
            seconds_per_sample=changed(numbers.uniform(0.002, 0.01)),
            seconds_per_micro_batch=numbers.uniform(0.0005, 0.003),
            memory_bytes=memory,
            busy_watts=5.0,
            energy_budget_joules=numbers.uniform(50, 200) if budgets else None,
            backlog=numbers.choice([0.0, 0.5, 2.0]) if budgets else 0.0,
            push_bps=1e8,
            fetch_bps=1e8,
        )

    clusters, assumed = [], []
    for n in range(num_clusters):
        share = numbers.uniform(1.5, 3.0) * state * num_blocks / num_devices
        devices = tuple(
            host(f"device-{n}-{k}", int(share * numbers.uniform(0.6, 1.6)) if tight else None)
            for k in range(num_devices)
        )
        control = host(f"control-{n}")
        names = [control.host_id, *(device.host_id for device in devices), "edge"]
        links = {
            (a, b): WiredLink(changed(numbers.uniform(2e7, 3e8)), 0.004)
            for a in names
            for b in names
            if a != b
        }
        clusters.append(
            ClusterProblem(
                control,
                devices,
                Host("edge", 0.002, 0.001),
                links,
                options,
                step_seconds=0.01,
                weight=1 / num_clusters,
            )
        )
        assumed.append({pair: LinkPlan() for pair in links})
    model = ModelCost(
        num_blocks,
        block_state_bytes=state,
        block_stash_bytes=4e5,
        activation_bytes=128 * 256 * 4,
        embedding_work=0.2,
        head_work=0.5,
    )
    lossy = Convergence((1.0, 0.1, 0.0, 3.0, 0.0), 0.5, math.inf, 10)
    problem = RoundProblem(
        tuple(clusters),
        model,
        mini_batch=32,
        local_steps=10,
        codecs=codecs,
        convergence=lossy if len(codecs) > 1 else Convergence(),
        reference_seconds=10.0,
    )
    return problem, assumed


if __name__ == "__main__":
    main()
