"""Shares of a radio channel for new weights, if all hosts of a cluster upload at once: docs/scheduling.md (6)."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    RadioLink,
    RoundPlan,
    RoundProblem,
    UploadPlan,
)
from collapipe.allocation.round_model.weights_transfer import push_bits

_NEWTON_STEPS = 20
_ROUNDS = 10
"""Each round of the search for the shortest time divides its interval by `_PARTS`."""
_PARTS = 16


def upload_stages(problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan) -> list[int]:
    """Returns the stages whose uploads share the channel, or none if the plan cannot decide about its uploads.

    It can if every host that uploads has a working radio to the edge server, and a finite `push_bps`.
    """
    edge_server, hosts, found = cluster.edge_server.host_id, cluster.hosts, []
    for k, stage in enumerate(plan.stages):
        units = (stage.start_unit, stage.stop_unit)
        if stage.host_id == edge_server or not push_bits(problem, plan.upload_codec, *units):
            continue
        host, link = hosts[stage.host_id], cluster.links.get((stage.host_id, edge_server))
        radio = isinstance(link, RadioLink) and link.gain > 0 and host.max_transmit_watts > 0
        if cluster.channel is None or not radio or not 0 < host.push_bps < math.inf:
            return []
        found.append(k)
    return found


def with_soonest_uploads(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Returns the plans with the shares that end all uploads soonest, and with all power that these can use.

    A cluster whose uploads cannot be decided gets none; see `upload_stages`.
    """
    found = []
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        stages, edge_server = upload_stages(problem, cluster, plan), cluster.edge_server.host_id
        uploads: tuple[UploadPlan, ...] = ()
        if stages:
            bits, gains, watts, most = [], [], [], []
            for k in stages:
                stage = plan.stages[k]
                link = cluster.links[stage.host_id, edge_server]
                assert isinstance(link, RadioLink)
                units = (stage.start_unit, stage.stop_unit)
                sent = push_bits(problem, plan.upload_codec, *units)
                bits.append(sent / link.efficiency)
                gains.append(link.gain / link.noise_watts_per_hertz)
                watts.append(cluster.hosts[stage.host_id].max_transmit_watts)
                most.append(link.most_bits_per_hertz * math.log(2))
            signal = np.array(watts) * np.array(gains)
            shares = _soonest_shares(
                np.array(bits), signal, np.array(most), problem.channels[cluster.channel or ""]
            )
            # More power than the highest modulation needs would be lost.
            useful = np.minimum(watts, np.expm1(most) * shares / np.array(gains))
            uploads = with_uploads(len(plan.stages), stages, shares.tolist(), useful.tolist())
        found.append(replace(plan, uploads=uploads))
    return tuple(found)


def with_uploads(
    num_stages: int, stages: Sequence[int], shares: Sequence[float], watts: Sequence[float]
) -> tuple[UploadPlan, ...]:
    """Returns an entry for each stage: a share and a power for those given, and nothing for the others."""
    uploads = [UploadPlan()] * num_stages
    for k, share, power in zip(stages, shares, watts, strict=True):
        uploads[k] = UploadPlan(share, power)
    return tuple(uploads)


def _soonest_shares(
    bits: npt.NDArray[np.float64],
    signal: npt.NDArray[np.float64],
    most: npt.NDArray[np.float64],
    channel: float,
) -> npt.NDArray[np.float64]:
    """Returns the shares that fill a channel and end all uploads at once: docs/scheduling.md (6).

    Args:
        bits: What each host sends, divided by the efficiency of its link. (k)
        signal: p h / (N0 + I0) of each host, in Hz. (k)
        most: mu log(2) of (1). (k)
    """
    nats = np.minimum(np.log1p(signal / channel), most)
    turns = float((bits * math.log(2) / (channel * nats)).sum())
    low, high = 0.0, turns
    for _ in range(_ROUNDS):
        ends = low + (high - low) * np.arange(1, _PARTS + 1) / _PARTS
        enough = _least_shares(bits / ends[:, None], signal, most).sum(axis=1) <= channel
        first = int(np.argmax(enough)) if enough.any() else _PARTS - 1
        low, high = (float(ends[first - 1]) if first else low), float(ends[first])
    shares = _least_shares(bits / high, signal, most)
    return np.asarray(shares * channel / shares.sum())


def _least_shares(
    rates: npt.NDArray[np.float64],
    signal: npt.NDArray[np.float64],
    most: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Returns the shares with which (1) gives these rates; infinite if no share does.

    With x = signal / share, (1) is log(1 + x) / x = rate log(2) / signal. Newton's method descends to its root.
    """
    slope = rates * math.log(2) / signal
    possible = slope < 1
    slope = np.where(possible, slope, 0.5)
    x = 1 / slope**2
    for _ in range(_NEWTON_STEPS):
        x = x - (np.log1p(x) - slope * x) / (1 / (1 + x) - slope)
    return np.where(possible, np.maximum(signal / x, rates * math.log(2) / most), math.inf)
