"""Transmit powers: of one link in closed form, and of all links together with their shares."""

import math
from dataclasses import replace

import numpy as np
from scipy.special import lambertw

from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.round_model.problem import (
    ClusterProblem,
    LinkPlan,
    RadioLink,
    RoundPlan,
    RoundProblem,
)
from collapipe.allocation.round_model.uploads import with_soonest_uploads
from collapipe.allocation.search.arrays import Bools, Floats
from collapipe.allocation.search.bandwidth import Allocation, solve_shares
from collapipe.allocation.search.shared_links import Point, SharedLinks, shared_links
from collapipe.codec_table import CodecName

_LEAST_SIGNAL = 1e-3
"""The least signal-to-noise ratio: sending with less power saves less than 0.05 % of the energy."""

_MAX_STEPS = 8
"""Most convex problems for one allocation; two or three are usual."""
_LEAST_GAIN = 3e-4
"""An allocation ends after a step with a smaller relative gain."""
_ROUGH_NORM = 8.0
_ROUGH_STEPS = 10
_MORE = 1.05
"""The gain of a link is measured with this factor on its share."""
_LEAST_ROUGH_GAIN = 0.3
"""A step treats a smaller gain, relative to the largest one, like this one."""
_TINY = 1e-300
_BRANCH = 1e-15 - 1 / math.e
"""The least argument of Lambert's W, with a margin for rounding."""


def best_watts(time_weight: Floats, joule_weight: Floats, gain: Floats, limit: Floats) -> Floats:
    """Returns the powers p that minimise (time_weight + joule_weight p) / log2(1 + gain p), in W.

    This is the closed form of docs/scheduling.md, "How a round is solved", 3. All arrays have the same shape.

    Args:
        time_weight: V', the price of a second of the transfer.
        joule_weight: Q', the price of a joule.
        gain: h / (B (N0 + I0)), in 1/W; above 0.
        limit: Largest power. It is the best power if energy costs nothing.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(joule_weight > 0, time_weight * gain / joule_weight, math.inf)
        finite = np.where(np.isfinite(ratio), ratio, 1.0)
        branch = np.maximum((finite - 1.0) / math.e, _BRANCH)
        signal = np.expm1(1.0 + lambertw(branch).real)
        best = np.where(np.isfinite(ratio), signal / gain, math.inf)
    return np.asarray(np.clip(best, 0.0, limit))


def allocate(
    problem: RoundProblem,
    plans: RoundPlan,
    *,
    time_limit_seconds: float | None = None,
) -> Allocation:
    """Finds shares and powers that minimise docs/scheduling.md (13) and leave the rest of the plans as it is.

    Shares and powers are solved for together. If one of them is fixed, the other often cannot improve alone:
    less power would slow down a link that is the bottleneck, unless the link also gets a larger share.

    Links without a shared channel get full power and an infinite share. This is optimal, because with
    unlimited bandwidth a bit takes the same energy at any power.

    If a plan takes infinite time with any shares and powers, the plans are returned unchanged.

    Args:
        plans: The search starts from their shares and powers.
        time_limit_seconds: For each convex problem.

    Raises:
        SolverFailedError: The solver did not reach an optimum.
    """
    plans = with_soonest_uploads(problem, _with_unshared_links_full(problem, plans))
    links = shared_links(problem, plans)
    if links is None:
        return Allocation(plans, predict(problem, plans), None)
    point = _start(links, plans)
    if not (np.isfinite(point.times).all() and np.isfinite(links.round_seconds(point)).all()):
        return Allocation(plans, predict(problem, plans), None)
    free = _costly(links, point.shares)
    value = links.objective(point)
    prices = None
    for _ in range(_MAX_STEPS if free.any() else 1):
        found, prices = solve_shares(links, point, free, time_limit_seconds=time_limit_seconds)
        watts = _bounded(links, found.shares, found.watts)
        found = links.point(found.shares, watts, found.upload_shares, found.upload_watts)
        better = links.objective(found)
        if better < value:
            point = found
        if better >= value * (1 - _LEAST_GAIN):
            break
        value = better
    settled = links.applied(plans, replace(point, watts=_useful(links, point.shares, point.watts)))
    return Allocation(settled, predict(problem, settled), prices)


def with_rough_shares(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Returns the plans with shares that are good for their placement and powers, without the convex solver.

    In the optimum, a little more bandwidth gains equally on each link. Each step moves the shares towards this.
    The slowest cluster and the bottleneck count with smooth weights, as in a norm of the order `_ROUGH_NORM`. Energy
    does not count.

    Args:
        plans: With shares and powers above 0 on the links that share channels.
    """
    links = shared_links(problem, plans)
    if links is None:
        return plans
    delay, watts = links.delay, links.powers(plans)
    shares = np.array([plans[n].links[i].share for n, i in links.positions])
    for _ in range(_ROUGH_STEPS):
        times = links.times(shares, watts)
        bottlenecks = np.maximum(delay.bottlenecks(times), _TINY)
        seconds = delay.round_seconds(times)
        slowest = (seconds / seconds.max()) ** _ROUGH_NORM
        rows = delay.row_constant + delay.row_times @ times
        weights = (rows / bottlenecks[delay.row_cluster]) ** _ROUGH_NORM
        sums = (delay.least / bottlenecks) ** _ROUGH_NORM
        np.add.at(sums, delay.row_cluster, weights)
        weights *= (slowest * delay.repeats / np.maximum(sums, _TINY))[delay.row_cluster]
        price = slowest @ delay.times + weights @ delay.row_times
        gains = price * (times - links.times(_MORE * shares, watts))
        gain = gains.reshape(2, -1).sum(axis=0) / shares
        relative = np.maximum(gain / max(gain.max(), _TINY), _LEAST_ROUGH_GAIN)
        shares = shares * relative ** (1 / (_ROUGH_NORM + 2))
        used = np.bincount(links.channel, shares, minlength=len(links.totals))
        shares = shares * (links.totals / used)[links.channel]
    found = [list(plan.links) for plan in plans]
    for (n, i), share in zip(links.positions, shares.tolist(), strict=True):
        found[n][i] = replace(found[n][i], share=share)
    return tuple(
        replace(plan, links=tuple(given)) for plan, given in zip(plans, found, strict=True)
    )


def full_link(
    cluster: ClusterProblem,
    sender: str,
    receiver: str,
    codec: CodecName = "fp32",
    share: float = math.inf,
) -> LinkPlan:
    """Returns a link with a share and all power that it can use, which is 0 W on wires.

    A device sends to both neighbours, so each link has half of its power.
    """
    there, back = cluster.links[sender, receiver], cluster.links[receiver, sender]
    if not isinstance(there, RadioLink) or not isinstance(back, RadioLink):
        return LinkPlan(codec, share)
    return LinkPlan(
        codec,
        share,
        min(full_watts(cluster, sender), there.useful_watts(share)),
        min(full_watts(cluster, receiver), back.useful_watts(share)),
    )


def full_watts(cluster: ClusterProblem, host_id: str) -> float:
    """Returns the power of a host for each of its links, if it divides its power equally."""
    ends = (cluster.control_unit.host_id, cluster.edge_server.host_id)
    return cluster.hosts[host_id].max_transmit_watts / (1 if host_id in ends else 2)


def _start(links: SharedLinks, plans: RoundPlan) -> Point:
    """Returns the shares and powers of the plans if usable, else equal shares and powers in closed form."""
    shares = np.array([plans[n].links[i].share for n, i in links.positions])
    if np.all(np.isfinite(shares)) and np.all(shares > 0):
        used = np.bincount(links.channel, shares, minlength=len(links.totals))
        shares = shares * (links.totals / used)[links.channel]
    else:
        shares = links.equal_shares()
    watts = links.powers(plans)
    if np.any(watts[links.radio] <= 0):
        delay = links.delay
        # The bottleneck is not known yet, so each link of a cluster counts as an equal part of it.
        users = np.maximum((delay.times > 0).sum(axis=1), 1)
        weight = (delay.times + (delay.times > 0) * (delay.repeats / users)[:, None]).sum(axis=0)
        both = np.concatenate([shares, shares])
        gain = np.where(links.radio, links.gain / both, 1.0)
        limit = np.where(links.has_partner, 0.5, 1.0) * links.limit_watts
        limit = np.minimum(limit, np.expm1(links.most_nats) / gain)
        watts = best_watts(links.second_price * weight, links.joule_price, gain, limit)
    uploads = [plans[n].uploads[k] for n, k in links.uploads.positions]
    return links.point(
        shares,
        _bounded(links, shares, watts),
        np.array([upload.share for upload in uploads]),
        np.array([upload.watts for upload in uploads]),
    )


def _costly(links: SharedLinks, shares: Floats) -> Bools:
    """Returns which directions may save energy if they send more slowly, or leave power to another one. (J)"""
    both = np.concatenate([shares, shares])
    useful = links.limit_watts * links.gain > _LEAST_SIGNAL * both
    return ((links.joule_price > 0) | links.has_partner) & links.radio & useful


def _bounded(links: SharedLinks, shares: Floats, watts: Floats) -> Floats:
    """Limits the powers to their range, also those of two directions with the same sender.

    The powers of a sender add up to its limit if its energy costs nothing. Otherwise each keeps `_LEAST_SIGNAL`.
    Powers that are chosen together with the shares are at most what the highest modulation needs.
    """
    both = np.concatenate([shares, shares])
    least = _LEAST_SIGNAL * both / np.where(links.radio, links.gain, math.inf)
    limit = np.where(links.has_partner, 0.5, 1.0) * links.limit_watts
    bounded = np.clip(watts, np.minimum(least, limit), links.limit_watts)
    bounded = np.where(_costly(links, shares), bounded, limit)
    used = links.same_sender @ bounded / np.where(links.limit_watts > 0, links.limit_watts, 1.0)
    within = np.where(
        links.joule_price > 0,
        bounded / np.maximum(used, 1.0),
        bounded / np.where(used > 0, used, 1.0),
    )
    return np.where(_costly(links, shares), _useful(links, shares, within), within)


def _useful(links: SharedLinks, shares: Floats, watts: Floats) -> Floats:
    """Returns the powers without what is more than the highest modulation needs."""
    both = np.concatenate([shares, shares])
    most = np.expm1(links.most_nats) * both / np.where(links.radio, links.gain, 1.0)
    return np.asarray(np.minimum(watts, most))


def _with_unshared_links_full(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Returns the plans with full power and an infinite share on links that share no channel."""
    found = []
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        if cluster.channel is None:
            names = [stage.host_id for stage in plan.stages]
            ends = zip(names[:-1], names[1:], plan.links, strict=True)
            full = tuple(full_link(cluster, one, other, link.codec) for one, other, link in ends)
            plan = replace(plan, links=full)
        found.append(plan)
    return tuple(found)
