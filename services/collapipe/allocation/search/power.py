"""Transmit powers: alone in closed form, together with the shares, and under mutual interference."""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import lambertw

from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.round_model.problem import (
    ClusterProblem,
    LinkPlan,
    RadioLink,
    RoundPlan,
    RoundProblem,
)
from collapipe.allocation.search.bandwidth import Allocation, Point, solve_shares
from collapipe.allocation.search.shared_links import SharedLinks, Vector, shared_links
from collapipe.codecs import CodecName

_LEAST_SIGNAL = 1e-3
"""Signal to noise ratio below which power hardly changes energy: sending still slower saves less than 0.05 %."""

_BRANCH = 1e-15 - 1 / math.e
"""Where Lambert's W begins, but for rounding."""


def best_watts(time_weight: Vector, joule_weight: Vector, gain: Vector, limit: Vector) -> Vector:
    """The powers that minimise (time_weight + joule_weight p) / log2(1 + gain p): design, 6, D.

    Args:
        time_weight: V', of a second of the transfer; any shape, as the others.
        joule_weight: Q', of a joule.
        gain: h / (B (N0 + I0)), in 1/W; above 0.
        limit: The most, in W; what a transmitter uses whose energy costs nothing.
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
    tolerance: float = 3e-4,
    max_steps: int = 8,
    time_limit_seconds: float | None = None,
) -> Allocation:
    """Finds shares and powers that minimise design (13) with everything else in the plans as it is.

    Shares and powers are solved for together: with one of them fixed, the other often cannot move alone, for a slower
    link would hold up a bottleneck that a wider one would not. Links that share no channel get no share and full power,
    which is optimal for them: without a limit on bandwidth, a bit costs the same energy at any power.

    Plans with a link that carries nothing, or with no way to take their states, are given back as they are: no share or
    power helps, and what is predicted of them says so.

    Args:
        problem: The round.
        plans: Their shares and powers are where the search starts.
        tolerance: Relative gain of a step at which it ends.
        max_steps: The most steps; two or three are usual.
        time_limit_seconds: For one convex problem.

    Raises:
        SolverFailedError: The solver did not reach an optimum.
    """
    plans = _with_unshared_links_full(problem, plans)
    links = shared_links(problem, plans)
    if links is None:
        return Allocation(plans, predict(problem, plans), None)
    point = _start(links, plans)
    if not _is_finite(links, point):
        return Allocation(plans, predict(problem, plans), None)
    free = _costly(links, point.shares)
    value = links.objective(point.times, point.watts)
    prices = None
    for _ in range(max_steps if free.any() else 1):
        found, prices = solve_shares(links, point, free, time_limit_seconds=time_limit_seconds)
        watts = _bounded(links, found.shares, found.watts)
        found = Point(found.shares, watts, links.times(found.shares, watts))
        better = links.objective(found.times, found.watts)
        if better < value:
            point = found
        if better >= value * (1 - tolerance):
            break
        value = better
    settled = links.applied(plans, point.shares, point.watts)
    return Allocation(settled, predict(problem, settled), prices)


def full_link(
    cluster: ClusterProblem,
    sender: str,
    receiver: str,
    codec: CodecName = "fp32",
    share: float = math.inf,
) -> LinkPlan:
    """A link with a share and full power; 0 W on wires."""
    if not isinstance(cluster.links[sender, receiver], RadioLink):
        return LinkPlan(codec, share)
    hosts = cluster.hosts
    return LinkPlan(
        codec, share, hosts[sender].max_transmit_watts, hosts[receiver].max_transmit_watts
    )


def _start(links: SharedLinks, plans: RoundPlan) -> Point:
    """Shares and powers of the plans where they are usable, else equal shares and powers in closed form."""
    shares = np.array([plans[n].links[i].share for n, i in links.positions])
    if np.all(np.isfinite(shares)) and np.all(shares > 0):
        used = np.bincount(links.channel, shares, minlength=len(links.totals))
        shares = shares * (links.totals / used)[links.channel]
    else:
        shares = links.equal_shares()
    watts = links.powers(plans)
    if np.any(watts[links.radio] <= 0):
        delay = links.delay
        # as if every link of a cluster held up the pipeline for its part of the time
        users = np.maximum((delay.times > 0).sum(axis=1), 1)
        weight = (delay.times + (delay.times > 0) * (delay.repeats / users)[:, None]).sum(axis=0)
        both = np.concatenate([shares, shares])
        gain = np.where(links.radio, links.gain / both, 1.0)
        watts = best_watts(links.delay_weight * weight, links.joule_weight, gain, links.limit_watts)
    watts = _bounded(links, shares, watts)
    return Point(shares, watts, links.times(shares, watts))


def _is_finite(links: SharedLinks, point: Point) -> bool:
    """Whether the round ends at all."""
    return bool(
        np.isfinite(point.times).all() and np.isfinite(links.delay.round_seconds(point.times)).all()
    )


def _costly(links: SharedLinks, shares: Vector) -> NDArray[np.bool_]:
    """Which directions may save energy by sending slower, (J)."""
    both = np.concatenate([shares, shares])
    return (links.joule_weight > 0) & (links.limit_watts * links.gain > _LEAST_SIGNAL * both)


def _bounded(links: SharedLinks, shares: Vector, watts: Vector) -> Vector:
    """Powers within their limits, full where energy costs nothing, and no lower than saves energy."""
    both = np.concatenate([shares, shares])
    least = _LEAST_SIGNAL * both / np.where(links.radio, links.gain, math.inf)
    bounded = np.clip(watts, np.minimum(least, links.limit_watts), links.limit_watts)
    return np.where(_costly(links, shares), bounded, links.limit_watts)


def _with_unshared_links_full(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """The plans with full power and no share on links that share no channel."""
    found = []
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        if cluster.channel is None:
            names = [stage.host_id for stage in plan.stages]
            ends = zip(names[:-1], names[1:], plan.links, strict=True)
            full = tuple(full_link(cluster, one, other, link.codec) for one, other, link in ends)
            plan = replace(plan, links=full)
        found.append(plan)
    return tuple(found)
