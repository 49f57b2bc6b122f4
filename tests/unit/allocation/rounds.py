"""Random small rounds. Hypothesis draws the structure, so that it can shrink it; a seed gives the numbers."""

import itertools
import math
import random
from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from collapipe.allocation import (
    BlockShare,
    ClusterPlan,
    ClusterProblem,
    Convergence,
    Host,
    LinkPlan,
    ModelCost,
    RadioLink,
    RoundProblem,
    StagePlan,
    WiredLink,
)
from collapipe.allocation.round_model.problem import Link
from collapipe.allocation.search.link_tables import AssumedLinks

Round = tuple[RoundProblem, list[AssumedLinks]]


class _Kinds(NamedTuple):
    """What counts in a round."""

    tight: bool
    energy: bool
    radio: bool
    moves: bool


@st.composite
def rounds(
    draw: st.DrawFn,
    clusters: tuple[int, int] = (1, 2),
    devices: tuple[int, int] = (1, 3),
    blocks: tuple[int, int] = (3, 5),
    codecs: int = 1,
    upload_codecs: int = 1,
    micro_batches: tuple[int, ...] = (1, 2, 4, 8),
    max_options: int = 2,
    blocks_on_control_unit: bool = False,
    blocks_on_edge_server: bool = False,
    pattern: tuple[BlockShare, ...] = (BlockShare(),),
) -> Round:
    """Draws a round with different links. Memory, windows, moves, radio, energy and convergence may count."""
    num_clusters = draw(st.integers(*clusters))
    num_blocks = draw(st.integers(*blocks))
    numbers = random.Random(draw(st.integers(0, 2**32)))
    convergence = draw(st.sampled_from(["none", "priced", "limited", "both"]))
    kinds = _Kinds(*(draw(st.booleans()) for _ in range(4)))
    model = ModelCost(
        num_blocks=num_blocks,
        block_state_bytes=100.0,
        block_stash_bytes=numbers.choice([0.0, 5.0, 17.3]),
        activation_bytes=numbers.choice([0.0, 1.0, 3.7, 3.7]),
        embedding_work=numbers.choice([0.0, 0.3]),
        head_work=numbers.choice([0.0, 0.5, 2.0]),
        embedding_state_bytes=50.0,
        head_state_bytes=80.0,
        embedding_stash_bytes=2.0,
        head_stash_bytes=4.0,
        lossy_uploads=upload_codecs > 1,
        pattern=pattern,
    )
    head = Host(
        "edge",
        seconds_per_sample=numbers.choice([0.05, 0.3]),
        seconds_per_micro_batch=numbers.choice([0.0, 0.2, 1.0]),
        memory_bytes=numbers.choice([None, None, 700]),
        base_bytes=10,
    )
    num_devices = [draw(st.integers(*devices)) for _ in range(num_clusters)]
    options = draw(
        st.lists(st.sampled_from(micro_batches), min_size=1, max_size=max_options, unique=True).map(
            sorted
        )
    )
    problems, assumed = [], []
    for n in range(num_clusters):
        cluster, links = _cluster(numbers, n, num_devices[n], head, num_blocks, kinds)
        problems.append(
            replace(
                cluster,
                micro_batch_options=tuple(options),
                upload_codecs=("fp32", "int8", "top_k")[:upload_codecs],
                weight=1 / num_clusters,
            )
        )
        assumed.append(links)
    names = ("fp32", "int8", "bf16")[:codecs]
    errors = {"fp32": 0.0, "int8": 2**-7, "bf16": 2**-9}
    constants = (0.3, 0.01, 0.002, numbers.choice([1.0, 30.0]), 0.1)
    least = min(errors[name] for name in names)
    limit = numbers.uniform(0.5, 1.5) * (0.35 + constants[3] * (least * 3 + 0.004))
    problem = RoundProblem(
        clusters=tuple(problems),
        model=model,
        mini_batch=8,
        local_steps=numbers.choice([1, 3]),
        channels={
            f"channel-{n}": (60.0 if kinds.radio else 8000.0) * (count + 1)
            for n, count in enumerate(num_devices)
        },
        codecs=names,
        in_flight_limit=draw(st.sampled_from([None, None, 1, 2, 3])),
        update_per_micro_batch=draw(st.sampled_from([False, False, False, True])),
        convergence=Convergence(
            constants if convergence != "none" else (0.0,) * 5,
            weight=numbers.choice([0.5, 5.0]) if convergence in ("priced", "both") else 0.0,
            limit=limit if convergence in ("limited", "both") else math.inf,
        ),
        penalty_weight=numbers.choice([0.1, 1.0, 10.0]),
        reference_seconds=7.0,
        migration_horizon_rounds=numbers.choice([1.0, 10.0]),
        fixed_seconds=0.5,
        blocks_on_control_unit=blocks_on_control_unit,
        blocks_on_edge_server=blocks_on_edge_server,
        recompute_options=draw(st.sampled_from([(False,), (True,), (False, True)])),
    )
    return problem, assumed


def _cluster(
    numbers: random.Random,
    index: int,
    num_devices: int,
    head: Host,
    num_blocks: int,
    kinds: _Kinds,
) -> tuple[ClusterProblem, dict[tuple[str, str], LinkPlan]]:
    tight, energy, radio, moves = kinds

    def host(name: str, memory: int | None) -> Host:
        has_budget = energy and numbers.random() < 0.7
        return Host(
            name,
            seconds_per_sample=numbers.choice([0.05, 0.1, 0.2, 0.4]),
            seconds_per_micro_batch=numbers.choice([0.0, 0.02, 0.1]),
            memory_bytes=memory,
            base_bytes=numbers.choice([0, 20]),
            busy_watts=numbers.choice([1.0, 5.0]),
            energy_budget_joules=numbers.choice([5.0, 40.0]) if has_budget else None,
            backlog=numbers.choice([0.0, 0.5, 3.0]) if has_budget else 0.0,
            max_transmit_watts=2.0,
            push_bps=numbers.choice([math.inf, 500.0]) if moves else math.inf,
            fetch_bps=numbers.choice([math.inf, 300.0]) if moves else math.inf,
            push_watts=2.0 if moves else 0.0,
        )

    memory = (250, 600) if tight else (500, 3000)
    devices = tuple(
        host(
            f"device-{index}-{k}",
            numbers.choice([None, numbers.randint(*memory), numbers.randint(*memory)]),
        )
        for k in range(num_devices)
    )
    control = host(f"control-{index}", numbers.choice([None, 200, 300]))
    names = [control.host_id, *(device.host_id for device in devices), head.host_id]
    reach = numbers.choice([(1.3, 2.3), (2, 4), (3, 4.5)])  # powers of ten
    links: dict[tuple[str, str], Link] = {}
    assumed: dict[tuple[str, str], LinkPlan] = {}
    for a, b in itertools.combinations(names, 2):
        if numbers.random() < 0.03:
            continue
        trip = numbers.choice([0.0, 0.01, 0.2])
        for pair in ((a, b), (b, a)):
            quality = 10 ** numbers.uniform(*reach)
            links[pair] = RadioLink(quality, 1.0, trip) if radio else WiredLink(quality, trip)
            watts = [numbers.choice([0.1, 1.0]) if radio else 0.0 for _ in range(2)]
            assumed[pair] = LinkPlan("fp32", 60.0 if radio else 8000.0, *watts)
    cluster = ClusterProblem(
        control_unit=control,
        devices=devices,
        edge_server=replace(head, max_transmit_watts=1.0),
        links=links,
        micro_batch_options=(1,),
        channel=f"channel-{index}",
        previous=_previous(numbers, names, num_blocks) if moves else None,
        step_seconds=numbers.choice([0.0, 0.2]),
        loss_probability=numbers.choice([0.0, 0.3]),
    )
    return cluster, assumed


def _previous(numbers: random.Random, names: list[str], num_blocks: int) -> ClusterPlan:
    """Draws a plan of the previous round: a split over some of the devices."""
    count = min(numbers.randint(1, len(names) - 2), num_blocks)
    cuts = sorted(numbers.sample(range(2, num_blocks + 1), count - 1))
    edges = [0, 1, *cuts, num_blocks + 1, num_blocks + 2]
    used = [names[0], *numbers.sample(names[1:-1], count), names[-1]]
    stages = tuple(StagePlan(name, edges[i], edges[i + 1], 1) for i, name in enumerate(used))
    return ClusterPlan(stages, 1, tuple(LinkPlan() for _ in used[1:]))
