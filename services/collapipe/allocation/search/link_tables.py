"""What each possible link of a cluster costs with each codec: docs/scheduling.md (3), (9) and (11)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from collapipe.allocation.round_model.problem import (
    ClusterProblem,
    LinkPlan,
    RadioLink,
    RoundProblem,
)
from collapipe.allocation.search.arrays import Bools, Floats
from collapipe.codec_table import CODECS

AssumedLinks = Mapping[tuple[str, str], LinkPlan]
"""The share and the powers that the search assumes for each possible link of a cluster.

The key is (sender, receiver) in the direction of activations.
"""


@dataclass(frozen=True)
class LinkTables:
    """The links of one cluster by (m, sender, receiver, codec). `ClusterCosts` explains these arrays."""

    load: Floats
    loop: Floats
    summed_cost: Floats
    error: Floats


def link_tables(
    problem: RoundProblem,
    cluster: ClusterProblem,
    assumed: AssumedLinks,
    part_size: Floats,
    passes: Floats,
    takes_turns: Bools,
) -> LinkTables:
    """Tabulates the links of a cluster.

    `part_size` (m) is in samples, `passes` (m) is the number of parts in a round, and `takes_turns` (m) is that of
    `ClusterPlan`.
    """
    ids = [device.host_id for device in cluster.devices]
    senders, receivers = [*ids, cluster.control_unit.host_id], [*ids, cluster.edge_server.host_id]
    hosts, shape = cluster.hosts, (len(senders), len(receivers))
    rates = np.zeros((2, *shape))
    round_trip, duplex = np.zeros(shape), np.zeros(shape, bool)
    joule_rates = np.zeros((2, *shape))
    exists = np.zeros(shape, bool)
    for i, sender in enumerate(senders):
        for j, receiver in enumerate(receivers):
            pair = (sender, receiver)
            there, back = cluster.links.get(pair), cluster.links.get((receiver, sender))
            link = assumed.get(pair)
            if there is None or back is None or link is None or sender == receiver:
                continue
            exists[i, j] = True
            rates[0, i, j] = there.rate_bps(link.share, link.forward_watts)
            rates[1, i, j] = back.rate_bps(link.share, link.backward_watts)
            round_trip[i, j] = there.round_trip_seconds
            duplex[i, j] = not isinstance(there, RadioLink)
            joule_rates[0, i, j] = hosts[sender].joule_weight * link.forward_watts
            joule_rates[1, i, j] = hosts[receiver].joule_weight * link.backward_watts
    codecs = [CODECS[name] for name in problem.codecs]
    raw_bytes = part_size[:, None] * problem.model.activation_bytes
    coding = raw_bytes * np.array([codec.seconds_per_byte for codec in codecs])
    bits = 8 * raw_bytes * np.array([codec.bytes_ratio for codec in codecs])
    with np.errstate(divide="ignore", invalid="ignore"):
        sending = bits[None, :, None, None, :] / rates[:, None, :, :, None]
    sending = np.where(bits[None, :, None, None, :] == 0, 0.0, sending)
    each_way = sending + coding[None, :, None, None, :]
    works = exists[None, :, :, None] & np.all(np.isfinite(each_way), axis=0)
    forward, backward = np.where(works, each_way, 0.0)
    if problem.model.first_trained_unit and not problem.blocks_on_control_unit:
        backward[:, -1] = 0.0  # The last sender is the control unit, whose embedding is frozen.
    both = duplex[None, :, :, None] & ~takes_turns[:, None, None, None]
    load = np.where(both, np.maximum(forward, backward), forward + backward)
    joules = joule_rates[0][:, :, None] * forward + joule_rates[1][:, :, None] * backward
    energy_cost = passes[:, None, None, None] * joules
    error = np.zeros(len(codecs))
    if problem.convergence.constants[3]:
        error = np.array([codec.relative_error for codec in codecs])
        error = error * (cluster.weight * problem.convergence.constants[3])
    summed_cost = energy_cost + problem.penalty_weight * problem.convergence.weight * error
    if np.isinf(problem.convergence.limit):
        error = np.zeros(len(codecs))
    return LinkTables(
        load=np.where(works, load, np.inf),
        loop=forward + backward + round_trip[:, :, None],
        summed_cost=summed_cost,
        error=np.broadcast_to(error, load.shape),
    )
