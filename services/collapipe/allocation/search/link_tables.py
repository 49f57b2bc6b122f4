"""What each possible link of a cluster costs with each codec, as arrays: design (3), (9) and (11)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from collapipe.allocation.round_model.problem import (
    ClusterProblem,
    LinkPlan,
    RadioLink,
    RoundProblem,
)
from collapipe.codecs import CODECS

Floats = npt.NDArray[np.float64]
Offers = Mapping[tuple[str, str], LinkPlan]
"""Share and powers of a cluster's possible links, by (sender, receiver) in the direction of activations."""


@dataclass(frozen=True)
class LinkTables:
    """By (m, sender, receiver, codec). Senders are the devices and the control unit, receivers the devices and the edge server.

    Args:
        load: Seconds of a micro-batch; infinite where there is no link.
        loop: What it adds to the latency loop.
        cost: Energy of a round, and the price of the codec's error.
        error: What it adds to the convergence term; 0 where no limit is set on that.
    """

    load: Floats
    loop: Floats
    cost: Floats
    error: Floats


def link_tables(
    problem: RoundProblem, cluster: ClusterProblem, offers: Offers, size: Floats, passes: Floats
) -> LinkTables:
    """Tabulates the links of a cluster.

    Args:
        problem: The round.
        cluster: One of its clusters.
        offers: Share and powers of its links.
        size: Samples of a micro-batch. (m)
        passes: Micro-batches of a round. (m)
    """
    ids = [device.host_id for device in cluster.devices]
    senders, receivers = [*ids, cluster.control_unit.host_id], [*ids, cluster.edge_server.host_id]
    hosts, shape = cluster.hosts, (len(senders), len(receivers))
    rates = np.zeros((2, *shape))
    trip, duplex, joule_rates = np.zeros(shape), np.zeros(shape, bool), np.zeros((2, *shape))
    exists = np.zeros(shape, bool)
    for i, sender in enumerate(senders):
        for j, receiver in enumerate(receivers):
            pair = (sender, receiver)
            there, back = cluster.links.get(pair), cluster.links.get((receiver, sender))
            offer = offers.get(pair)
            if there is None or back is None or offer is None or i == j:
                continue
            exists[i, j] = True
            rates[0, i, j] = there.rate_bps(offer.share, offer.forward_watts)
            rates[1, i, j] = back.rate_bps(offer.share, offer.backward_watts)
            trip[i, j], duplex[i, j] = there.round_trip_seconds, not isinstance(there, RadioLink)
            joule_rates[0, i, j] = hosts[sender].joule_weight * offer.forward_watts
            joule_rates[1, i, j] = hosts[receiver].joule_weight * offer.backward_watts
    codecs = [CODECS[name] for name in problem.codecs]
    raw = size[:, None] * problem.model.activation_bytes
    coding = raw * np.array([codec.seconds_per_byte for codec in codecs])
    bits = 8 * raw * np.array([codec.bytes_ratio for codec in codecs])
    with np.errstate(divide="ignore", invalid="ignore"):
        sending = bits[None, :, None, None, :] / rates[:, None, :, :, None]
    sending = np.where(bits[None, :, None, None, :] == 0, 0.0, sending)
    each_way = sending + coding[None, :, None, None, :]
    works = exists[None, :, :, None] & np.all(np.isfinite(each_way), axis=0)
    forward, backward = np.where(works, each_way, 0.0)
    load = np.where(duplex[None, :, :, None], np.maximum(forward, backward), forward + backward)
    joules = joule_rates[0][:, :, None] * forward + joule_rates[1][:, :, None] * backward
    cost = passes[:, None, None, None] * joules
    error = np.zeros(len(codecs))
    if problem.convergence.constants[3]:
        error = np.array([codec.relative_error for codec in codecs])
        error = error * (cluster.weight * problem.convergence.constants[3])
    cost = cost + problem.penalty_weight * problem.convergence.weight * error
    if np.isinf(problem.convergence.limit):
        error = np.zeros(len(codecs))
    return LinkTables(
        load=np.where(works, load, np.inf),
        loop=forward + backward + trip[:, :, None],
        cost=cost,
        error=np.broadcast_to(error, load.shape),
    )
