"""The shares and powers that the search assumes for links before they are allocated.

`place_segments` needs a rate for every link that a plan may use, but `allocate` gives shares and powers to
the links of one plan only. At the beginning, links get equal shares. Later, the dual prices of the last
allocation decide which share and which power would pay off on any other link.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np

from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Host,
    LinkPlan,
    RadioLink,
    RoundPlan,
    RoundProblem,
    UploadPlan,
)
from collapipe.allocation.search.bandwidth import Allocation, Prices
from collapipe.allocation.search.link_tables import AssumedLinks
from collapipe.allocation.search.power import best_watts, full_link, full_watts
from collapipe.codec_table import CODECS

_SHARES = np.geomspace(1 / 256, 1.0, 25)
"""Parts of a channel that `links_at_prices` may assume for a link."""

_LEAST_LINK_PRICE = 0.01
_LEAST_LOOP_PRICE = 0.05
"""Lower limits for the price of a second: on a link, and in a latency loop. Their unit is the price that the
second would have in the slowest cluster.

The dual price of a second is 0 in a cluster that is not the slowest. With price 0, the search would assume
the smallest share for its links, and would ignore their latency.
"""


def links_at_equal_shares(problem: RoundProblem) -> list[AssumedLinks]:
    """Returns links at full power. Each channel is split equally, as if each cluster used two links.

    A plan with one segment has two links, so no plan has fewer.
    """
    channels = [cluster.channel for cluster in problem.clusters]
    assumed_links: list[AssumedLinks] = []
    for cluster in problem.clusters:
        share = math.inf
        if cluster.channel is not None:
            share = problem.channels[cluster.channel] / (channels.count(cluster.channel) * 2)
        assumed_links.append(
            {pair: full_link(cluster, *pair, share=share) for pair in _pairs(cluster)}
        )
    return assumed_links


def links_at_prices(problem: RoundProblem, allocation: Allocation) -> list[AssumedLinks]:
    """Returns the share and the powers that cost least on each link, at the prices of an allocation.

    A second on a link has the mean price of the links of its cluster. Links of the allocation do not change.
    """
    assumed_links: list[AssumedLinks] = []
    for n, (cluster, plan) in enumerate(zip(problem.clusters, allocation.plans, strict=True)):
        assumed = {pair: full_link(cluster, *pair) for pair in _pairs(cluster)}
        if cluster.channel is not None and allocation.prices is not None:
            assumed = _cheapest_links(problem, cluster, plan, n, allocation.prices)
        for i, link in enumerate(plan.links):
            assumed[plan.stages[i].host_id, plan.stages[i + 1].host_id] = link
        assumed_links.append(assumed)
    return assumed_links


def with_assumed_uploads(problem: RoundProblem, allocation: Allocation) -> RoundProblem:
    """Returns the problem with the rates and powers of uploads that fit an allocation, for hosts that take turns.

    Say that a host sends for *t* seconds, with a part *a* of the channel and with power *p*. It counts as if it sent
    for *a t* seconds, with the whole channel and with power *p / a*. Its energy and T_push stay the same. A host without
    an upload gets an equal part, and the best power for it.
    """
    clusters = []
    for n, (cluster, plan) in enumerate(zip(problem.clusters, allocation.plans, strict=True)):
        if plan.uploads:
            seconds = problem.penalty_weight / problem.reference_seconds
            price = max(
                allocation.prices.round_seconds[n] if allocation.prices else seconds,
                _LEAST_LOOP_PRICE * seconds,
            )
            given = {
                stage.host_id: upload
                for stage, upload in zip(plan.stages, plan.uploads, strict=True)
                if upload.share
            }
            share = problem.channels[cluster.channel or ""] / len(given)
            assume = partial(_assumed_upload, problem, cluster, given, share, price)
            cluster = replace(
                cluster,
                control_unit=assume(cluster.control_unit),
                devices=tuple(assume(device) for device in cluster.devices),
            )
        clusters.append(cluster)
    return replace(problem, clusters=tuple(clusters))


def _assumed_upload(
    problem: RoundProblem,
    cluster: ClusterProblem,
    given: Mapping[str, UploadPlan],
    share: float,
    second_price: float,
    host: Host,
) -> Host:
    link = cluster.links.get((host.host_id, cluster.edge_server.host_id))
    if not isinstance(link, RadioLink) or not 0 < host.push_bps < math.inf:
        return host
    channel, upload = problem.channels[cluster.channel or ""], given.get(host.host_id)
    if upload is not None:
        watts = upload.watts * channel / upload.share
    else:
        gain = link.gain / (channel * link.noise_watts_per_hertz)
        numbers = (
            second_price,
            host.joule_weight,
            gain,
            min(
                host.max_transmit_watts * channel / share,
                math.expm1(link.most_bits_per_hertz * math.log(2)) / gain,
            ),
        )
        watts = float(best_watts(*(np.array(number) for number in numbers)))
    return replace(host, push_bps=link.rate_bps(channel, watts), push_watts=watts)


def with_bandwidth_charged(
    problem: RoundProblem, assumed_links: Sequence[AssumedLinks], allocation: Allocation
) -> RoundProblem:
    """Returns the problem with more latency on each link: the price of its share, converted to seconds.

    `place_segments` does not pay for the shares that it uses. Without this charge it would use
    too many devices.
    """
    prices = allocation.prices
    if prices is None:
        return problem
    second_price = problem.penalty_weight / problem.reference_seconds
    clusters = []
    for n, (cluster, assumed) in enumerate(zip(problem.clusters, assumed_links, strict=True)):
        if cluster.channel is not None:
            loop_price = max(prices.round_seconds[n], _LEAST_LOOP_PRICE * second_price)
            loop_price *= problem.local_steps
            if problem.update_per_micro_batch:
                loop_price *= allocation.plans[n].num_parts
            seconds_per_share = prices.channels[cluster.channel] / loop_price
            links = dict(cluster.links)
            for pair, link in assumed.items():
                round_trip = cluster.links[pair].round_trip_seconds
                links[pair] = replace(
                    cluster.links[pair],
                    round_trip_seconds=round_trip + seconds_per_share * link.share,
                )
            cluster = replace(cluster, links=links)
        clusters.append(cluster)
    return replace(problem, clusters=tuple(clusters))


def with_assumed_links(
    problem: RoundProblem, assumed_links: Sequence[AssumedLinks], plans: RoundPlan
) -> RoundPlan:
    """Returns the plans with the assumed links and no uploads.

    The shares of a channel are scaled to its total. The powers of a sender are scaled down to its limit, because
    links that were assumed for other plans may exceed it together.
    """
    used: dict[str, float] = {}
    unscaled = []
    for cluster, plan, assumed in zip(problem.clusters, plans, assumed_links, strict=True):
        names = [stage.host_id for stage in plan.stages]
        links = [
            replace(assumed[pair], codec=link.codec)
            for pair, link in zip(pairwise(names), plan.links, strict=True)
        ]
        limits = [cluster.hosts[name].max_transmit_watts for name in names]
        links = _within_limits(links, limits)
        unscaled.append(links)
        if cluster.channel is not None:
            used[cluster.channel] = used.get(cluster.channel, 0.0) + sum(
                link.share for link in links
            )
    scaled = []
    for cluster, plan, links in zip(problem.clusters, plans, unscaled, strict=True):
        if cluster.channel is not None:
            scale = problem.channels[cluster.channel] / used[cluster.channel]
            links = [replace(link, share=link.share * scale) for link in links]
        scaled.append(replace(plan, links=tuple(links), uploads=()))
    return tuple(scaled)


def _within_limits(links: Sequence[LinkPlan], limits: Sequence[float]) -> list[LinkPlan]:
    """Returns the links of a pipeline with powers scaled down to the limits of its hosts, in W."""
    forward = [*(link.forward_watts for link in links), 0.0]
    backward = [0.0, *(link.backward_watts for link in links)]
    scales = [
        min(1.0, limit / (ahead + back)) if ahead + back else 1.0
        for ahead, back, limit in zip(forward, backward, limits, strict=True)
    ]
    return [
        replace(
            link,
            forward_watts=link.forward_watts * scale,
            backward_watts=link.backward_watts * next_scale,
        )
        for link, (scale, next_scale) in zip(links, pairwise(scales), strict=True)
    ]


def _cheapest_links(
    problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan, index: int, prices: Prices
) -> dict[tuple[str, str], LinkPlan]:
    """Returns for each link the share of `_SHARES` that costs least, with the best power of each direction.

    The cost is the sum of three costs: of the share, of the seconds and of the joules.
    """
    pairs, channel = _pairs(cluster), cluster.channel or ""
    total, hertz_price = problem.channels[channel], prices.channels[channel]
    link_prices = [
        second_price
        for (owner, _), both in prices.link_seconds.items()
        if owner == index
        for second_price in both
    ]
    full_price = problem.penalty_weight / problem.reference_seconds * problem.local_steps
    second_price = max(sum(link_prices) / len(link_prices), _LEAST_LINK_PRICE * full_price)
    passes = problem.local_steps * plan.num_parts
    bits = 8 * problem.mini_batch / plan.num_parts * problem.model.activation_bytes
    bits *= min(CODECS[link.codec].bytes_ratio for link in plan.links)
    shares = total * _SHARES
    cost = np.tile(hertz_price * shares, (len(pairs), 1))
    watts = []
    for ends in (pairs, [(receiver, sender) for sender, receiver in pairs]):
        table = np.array([_direction(cluster, *end) for end in ends])
        signal_to_noise, efficiency, most_nats, capacity, joule_price, limit = table.T[:, :, None]
        radio = signal_to_noise > 0
        gain = np.where(radio, signal_to_noise, 1.0) / shares
        limit = np.minimum(limit, np.expm1(most_nats) / gain)
        power = best_watts(np.full_like(gain, second_price), joule_price * passes, gain, limit)
        power = np.where(radio, power, 0.0)
        rate = np.minimum(shares, capacity)
        rate = np.where(radio, efficiency * shares * np.log2(1 + power * gain), rate)
        with np.errstate(divide="ignore"):  # A link with rate 0 has infinite cost.
            cost += (second_price + joule_price * passes * power) * bits / rate
        watts.append(power)
    best = np.argmin(cost, axis=1)
    return {
        pair: LinkPlan("fp32", float(shares[j]), float(watts[0][i, j]), float(watts[1][i, j]))
        for i, (pair, j) in enumerate(zip(pairs, best, strict=True))
    }


def _direction(
    cluster: ClusterProblem, sender: str, receiver: str
) -> tuple[float, float, float, float, float, float]:
    """Returns the constants of one direction of a link.

    They are the signal-to-noise ratio of 1 W in 1 Hz (0 on wires), the efficiency, mu log(2) of (1), the capacity, the
    price of a joule, and the largest power.
    """
    link, joule_price = cluster.links[sender, receiver], cluster.hosts[sender].joule_weight
    if isinstance(link, RadioLink):
        signal_to_noise = link.gain / link.noise_watts_per_hertz
        most_nats = link.most_bits_per_hertz * math.log(2)
        watts = full_watts(cluster, sender)
        return signal_to_noise, link.efficiency, most_nats, math.inf, joule_price, watts
    return 0.0, 1.0, math.inf, link.capacity_bps, 0.0, 0.0


def _pairs(cluster: ClusterProblem) -> list[tuple[str, str]]:
    """Returns the pairs of hosts that may be neighbours, in the direction of activations."""
    senders = [host.host_id for host in (cluster.control_unit, *cluster.devices)]
    receivers = [host.host_id for host in (*cluster.devices, cluster.edge_server)]
    return [
        (sender, receiver)
        for sender, receiver in product(senders, receivers)
        if (sender, receiver) in cluster.links and (receiver, sender) in cluster.links
    ]
