"""What a link between any two hosts would be given: shares and powers that the segment programme reckons with."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import TypeAlias

import numpy as np

from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Host,
    Link,
    LinkPlan,
    RadioLink,
    RoundPlan,
    RoundProblem,
)
from collapipe.allocation.search.bandwidth import Allocation, Prices
from collapipe.allocation.search.power import best_watts, full_link
from collapipe.codecs import CODECS

LinkOffers: TypeAlias = tuple[Mapping[tuple[str, str], LinkPlan], ...]
"""One mapping a cluster, (sender, receiver) in the direction of activations to what that link is given."""

_GRID = np.geomspace(1 / 256, 1.0, 25)
"""Parts of a channel that an offer may be."""

_LEAST_LINK_PRICE = 0.01
_LEAST_LOOP_PRICE = 0.05
"""Price of a second in a cluster that is not the slowest, to what it would be in the only slowest one.

Its own price is 0, with which it would be offered nothing, and any latency would be as good as none.
"""


def equal_offers(problem: RoundProblem, num_segments: int) -> LinkOffers:
    """Full power, and what a link has where all clusters have so many segments and split their channel equally."""
    channels = [cluster.channel for cluster in problem.clusters]
    offers = []
    for cluster in problem.clusters:
        share = math.inf
        if cluster.channel is not None:
            users = channels.count(cluster.channel) * (num_segments + 1)
            share = problem.channels[cluster.channel] / users
        offers.append({pair: full_link(cluster, *pair, share=share) for pair in _pairs(cluster)})
    return tuple(offers)


def priced_offers(problem: RoundProblem, allocation: Allocation) -> LinkOffers:
    """What each link would take at the prices of an allocation; its own links keep what they have.

    A second on a link is worth what it is on the average link of its cluster.
    """
    offers = []
    for n, (cluster, plan) in enumerate(zip(problem.clusters, allocation.plans, strict=True)):
        offer = {pair: full_link(cluster, *pair) for pair in _pairs(cluster)}
        if cluster.channel is not None and allocation.prices is not None:
            offer = _best_offers(problem, cluster, plan, n, allocation.prices)
        for i, link in enumerate(plan.links):
            offer[plan.stages[i].host_id, plan.stages[i + 1].host_id] = link
        offers.append(offer)
    return tuple(offers)


def with_bandwidth_charged(
    problem: RoundProblem, offers: LinkOffers, allocation: Allocation
) -> RoundProblem:
    """The problem in which a link costs what its bandwidth is worth to others, paid in latency.

    For given offers bandwidth is free, so that too many devices take part.
    """
    prices = allocation.prices
    if prices is None:
        return problem
    second = problem.penalty_weight / problem.reference_seconds
    clusters = []
    for n, (cluster, offer) in enumerate(zip(problem.clusters, offers, strict=True)):
        if cluster.channel is not None:
            price = max(prices.round_seconds[n], _LEAST_LOOP_PRICE * second) * problem.local_steps
            if problem.update_per_micro_batch:
                price *= allocation.plans[n].num_micro_batches
            unit = prices.channels[cluster.channel] / price
            links = dict(cluster.links)
            for pair, link in offer.items():
                links[pair] = replace(
                    cluster.links[pair],
                    round_trip_seconds=cluster.links[pair].round_trip_seconds + unit * link.share,
                )
            cluster = replace(cluster, links=links)
        clusters.append(cluster)
    return replace(problem, clusters=tuple(clusters))


def offered(problem: RoundProblem, offers: LinkOffers, plans: RoundPlan) -> RoundPlan:
    """The plans with links as offered, but all shares of a channel scaled so that they sum to its total."""
    used: dict[str, float] = {}
    given = []
    for cluster, plan, offer in zip(problem.clusters, plans, offers, strict=True):
        names = [stage.host_id for stage in plan.stages]
        links = [
            replace(offer[pair], codec=link.codec)
            for pair, link in zip(pairwise(names), plan.links, strict=True)
        ]
        given.append(links)
        if cluster.channel is not None:
            used[cluster.channel] = used.get(cluster.channel, 0.0) + sum(
                link.share for link in links
            )
    scaled = []
    for cluster, plan, links in zip(problem.clusters, plans, given, strict=True):
        if cluster.channel is not None:
            scale = problem.channels[cluster.channel] / used[cluster.channel]
            links = [replace(link, share=link.share * scale) for link in links]
        scaled.append(replace(plan, links=tuple(links)))
    return tuple(scaled)


def _best_offers(
    problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan, index: int, prices: Prices
) -> dict[tuple[str, str], LinkPlan]:
    """For each pair the share on a grid, with the best power of each direction, that costs least: design, 6, D."""
    pairs, hosts = _pairs(cluster), cluster.hosts
    total, price = problem.channels[cluster.channel or ""], prices.channels[cluster.channel or ""]
    worth = [
        second
        for (owner, _), both in prices.link_seconds.items()
        if owner == index
        for second in both
    ]
    second = problem.penalty_weight / problem.reference_seconds * problem.local_steps
    time_price = max(sum(worth) / len(worth), _LEAST_LINK_PRICE * second)
    passes = problem.local_steps * plan.num_micro_batches
    bits = 8 * problem.mini_batch / plan.num_micro_batches * problem.model.activation_bytes
    bits *= min(CODECS[link.codec].bytes_ratio for link in plan.links)
    shares = total * _GRID
    cost = np.tile(price * shares, (len(pairs), 1))
    watts = []
    for ends in (pairs, [(receiver, sender) for sender, receiver in pairs]):
        table = np.array([_terms(cluster.links[end], hosts[end[0]]) for end in ends])
        hertz, efficiency, capacity, joules, limit = table.T[:, :, None]
        radio = hertz > 0
        gain = np.where(radio, hertz, 1.0) / shares
        power = best_watts(np.full_like(gain, time_price), joules * passes, gain, limit)
        power = np.where(radio, power, 0.0)
        rate = np.minimum(shares, capacity)
        rate = np.where(radio, efficiency * shares * np.log2(1 + power * gain), rate)
        with np.errstate(divide="ignore"):  # a link that carries nothing costs everything
            cost += (time_price + joules * passes * power) * bits / rate
        watts.append(power)
    best = np.argmin(cost, axis=1)
    return {
        pair: LinkPlan("fp32", float(shares[j]), float(watts[0][i, j]), float(watts[1][i, j]))
        for i, (pair, j) in enumerate(zip(pairs, best, strict=True))
    }


def _terms(link: Link, sender: Host) -> tuple[float, float, float, float, float]:
    """Signal to noise ratio of a watt in a hertz (0 on wires), efficiency, capacity, price of a joule, most watts."""
    if isinstance(link, RadioLink):
        hertz = link.gain / link.noise_watts_per_hertz
        return hertz, link.efficiency, math.inf, sender.joule_weight, sender.max_transmit_watts
    return 0.0, 1.0, link.capacity_bps, 0.0, 0.0


def _pairs(cluster: ClusterProblem) -> list[tuple[str, str]]:
    """Hosts that may be neighbours, in the direction of activations."""
    senders = [host.host_id for host in (cluster.control_unit, *cluster.devices)]
    receivers = [host.host_id for host in (*cluster.devices, cluster.edge_server)]
    return [
        (sender, receiver)
        for sender, receiver in product(senders, receivers)
        if (sender, receiver) in cluster.links and (receiver, sender) in cluster.links
    ]
