"""Random heterogeneous pipelines, to compare the formula of a mini-batch with the simulation."""

import math
import random

from collapipe.allocation.round_model.problem import (
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
)

_NUM_BLOCKS = 24


def random_round(
    rng: random.Random, *, num_clusters: int = 1, radio: bool = False
) -> tuple[RoundProblem, RoundPlan]:
    """Returns pipelines of 2 to 8 devices whose speeds differ by up to 30, with classical windows."""
    model = ModelCost(
        _NUM_BLOCKS,
        activation_bytes=1e5,
        embedding_work=rng.uniform(0.05, 0.5),
        head_work=rng.uniform(0.05, 3.0),
    )
    edge_server = Host("edge-server", rng.uniform(0.0003, 0.003))
    clusters, plans = [], []
    for n in range(num_clusters):
        devices = [
            Host(f"device-{n}-{k}", 10 ** rng.uniform(-3, -1.5), rng.uniform(0, 0.01))
            for k in range(rng.randint(2, 8))
        ]
        hosts = [Host(f"control-unit-{n}", rng.uniform(0.005, 0.05)), *devices, edge_server]
        names = [host.host_id for host in hosts]
        links = {}
        for i in range(len(names) - 1):
            round_trip = rng.uniform(0, 0.05)
            for pair in ((names[i], names[i + 1]), (names[i + 1], names[i])):
                links[pair] = (
                    RadioLink(10 ** rng.uniform(-9, -7), 4e-20, round_trip)
                    if radio
                    else WiredLink(10 ** rng.uniform(6.5, 9), round_trip)
                )
        num_micro_batches = rng.choice([4, 8, 16, 32])
        cuts = [0, *sorted(rng.sample(range(1, _NUM_BLOCKS), len(devices) - 1)), _NUM_BLOCKS]
        units = [0, *(cut + 1 for cut in cuts), _NUM_BLOCKS + 2]
        stages = tuple(
            StagePlan(name, units[k], units[k + 1], min(num_micro_batches, len(names) - k))
            for k, name in enumerate(names)
        )
        watts = 0.1 if radio else 0.0
        share = 2e6 if radio else math.inf
        plan = LinkPlan("fp32", share, watts, watts)
        plans.append(ClusterPlan(stages, num_micro_batches, (plan,) * (len(names) - 1)))
        clusters.append(
            ClusterProblem(hosts[0], tuple(devices), edge_server, links, (4, 8, 16, 32))
        )
    return RoundProblem(tuple(clusters), model, mini_batch=32, local_steps=10), tuple(plans)
