"""What a person could change to make rounds shorter, and how many seconds each change saves.

Every saving is the difference between two predictions of docs/scheduling.md (6): that of the decision, and the same with one
input changed. A change of hosts or links keeps the plans, so `dssra` may save more. Transfers that happen once do not count.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from collapipe.allocation import (
    ClusterPrediction,
    ClusterProblem,
    Host,
    RadioLink,
    RoundPlan,
    RoundPrediction,
    RoundProblem,
    WiredLink,
    decide_round,
    predict,
    violations,
)
from collapipe.errors import InfeasibleError
from collapipe.job import divisors
from collapipe.planning.decisions import RoundDecision

LEAST_SHARE = 0.03
"""A change that saves less than this share of a round is no advice."""

_MOST = 6
_RATE_FACTORS = (1.5, 2.0, 3.0, 5.0, 10.0)
_MUCH_FASTER = 100.0
_ENOUGH = 0.8
"""The advised rate saves at least this part of what a much faster link would save."""
_NEARER = 0.25
"""The round trip of a device that is moved nearer, as a part of the present one."""
_HALF_AS_FAR = 4.0
"""By this factor the gain of a radio link grows at half the distance, in free space."""
_FASTER_MACHINE = 2.0
_LIKE = 1.1
"""A device whose blocks take less than so many times those of the fastest one is as fast."""
_MOST_SOLVE_SECONDS = 0.5
"""Changes that need a new decision are left out if the decision took longer than this."""
_MOST_HOPS = 8
"""Links between neighbours in the pipeline for which predictions are made."""
_MOST_DEVICES = 4
"""Devices of a cluster for which a new decision is made."""
_UNMEASURED_BPS = 1e12
_WITH_SEGMENTS = ("pipeline", "proportional", "titanic", "titanic_best")
"""Baselines that divide the blocks among devices by themselves."""


@dataclass(frozen=True)
class Advice:
    """A change, and what it saves.

    Args:
        saved_seconds: Of each round.
        links: What it changes of links, and at which hosts. Of two changes that share one of these, only the better is told.
    """

    text: str
    saved_seconds: float
    links: frozenset[tuple[str, str]] = frozenset()


def lasting_seconds(problem: RoundProblem, prediction: RoundPrediction) -> float:
    """Returns the predicted time of a round without what happens only once: moves of units."""
    horizon = problem.migration_horizon_rounds
    lasting = [c.round_seconds - c.migrate_seconds / horizon for c in prediction.clusters]
    return max(lasting) + problem.fixed_seconds


def advise(decision: RoundDecision) -> list[Advice]:
    """Returns the changes that save at least `LEAST_SHARE` of a round, the best first. Each counts alone."""
    problem = decision.question.problem
    now = lasting_seconds(problem, decision.prediction)
    if decision.guessed or not math.isfinite(now):
        return []
    found = [one for one in _changes(decision, now) if one.saved_seconds >= LEAST_SHARE * now]
    found.sort(key=lambda one: -one.saved_seconds)
    advice: list[Advice] = []
    for one in found:
        # The links of a device and those of its neighbour are often the same.
        if not any(one.links & better.links for better in advice):
            advice.append(one)
    return advice[:_MOST]


def _changes(decision: RoundDecision, now: float) -> Iterator[Advice]:
    yield from _settings(decision, now)
    # Nothing that changes another cluster alone makes the round shorter.
    clusters = decision.prediction.clusters
    slowest = max(range(len(clusters)), key=lambda index: clusters[index].round_seconds)
    yield from _links(decision, slowest, now)
    yield from _machines(decision, slowest, now)
    yield from _devices(decision, slowest, now)


def _settings(decision: RoundDecision, now: float) -> Iterator[Advice]:
    problem, plans, strategy = (
        decision.question.problem,
        decision.plans,
        decision.question.strategy,
    )
    is_adaptive = strategy == "dssra"
    if not is_adaptive or "int8" not in problem.codecs:
        codecs = '["fp32","int8"]' if is_adaptive else '["int8"]'
        with_int8 = tuple(
            replace(plan, links=tuple(replace(link, codec="int8") for link in plan.links))
            for plan in plans
        )
        if {link.codec for plan in plans for link in plan.links} <= {"fp32", "bf16"}:
            yield Advice(
                f"allow int8 on the links: --set 'schedule.codecs={codecs}' (it rounds activations: watch the metric)",
                now - _seconds(problem, with_int8),
            )
    model = replace(problem.model, lossy_uploads=True)
    uploads = tuple(replace(plan, upload_codec="int8") for plan in plans)
    clusters = tuple(replace(c, upload_codecs=("int8",)) for c in problem.clusters)
    changed = replace(problem, model=model, clusters=clusters)
    is_lossless = {plan.upload_codec for plan in plans} == {"fp32"}
    if is_lossless and not problem.model.keeps_base and not violations(changed, uploads):
        codecs = '["fp32","int8"]' if is_adaptive else '["int8"]'
        yield Advice(
            f"upload weights as int8: --set 'training.upload_codecs={codecs}' (it rounds changes: watch the metric)",
            now - _seconds(changed, uploads),
        )
    if decision.solve_seconds > _MOST_SOLVE_SECONDS:
        return
    if strategy in _WITH_SEGMENTS and strategy != "proportional":
        yield Advice(
            "segments in proportion to speed: --set schedule.strategy=proportional",
            now - _decided_seconds(problem, "proportional"),
        )
    # Without their fixed cost, the smallest micro-batches would always be best.
    costs = [device.seconds_per_micro_batch for c in problem.clusters for device in c.devices]
    if strategy in _WITH_SEGMENTS and all(costs) and not problem.update_per_micro_batch:
        options = divisors(problem.mini_batch)
        seconds, count = min(
            (_decided_seconds(_with_micro_batches(problem, m), strategy), m) for m in options
        )
        yield Advice(
            f"{count} micro-batches in a step: --set schedule.num_micro_batches={count}",
            now - seconds,
        )


def _links(decision: RoundDecision, index: int, now: float) -> Iterator[Advice]:
    problem, plan = decision.question.problem, decision.plans[index]
    cluster = problem.clusters[index]
    ids = [stage.host_id for stage in plan.stages]
    pairs = [frozenset(hop) for hop in itertools.pairwise(ids)]
    for words, ends, others in _slowest_links(ids, decision.prediction.clusters[index]):
        used = [
            link
            for pair, link in cluster.links.items()
            if ends <= set(pair) <= ends | others
            and (frozenset(pair) in pairs or cluster.edge_server.host_id in pair)
        ]
        rates = [link.capacity_bps for link in used if isinstance(link, WiredLink)]
        rates = [rate for rate in rates if 0 < rate < _UNMEASURED_BPS]
        trip = max((link.round_trip_seconds for link in used), default=0.0)

        def saved(
            factor: float = 1.0,
            trip: float = 1.0,
            nearer: float = 1.0,
            ends: frozenset[str] = ends,
        ) -> float:
            better = _better_links(cluster, ends, factor, trip, nearer)
            return now - _seconds(_with_cluster(problem, index, better), decision.plans)

        def marked(kind: str, ends: frozenset[str] = ends) -> frozenset[tuple[str, str]]:
            return frozenset((kind, host_id) for host_id in ends)

        if rates:
            most = saved(_MUCH_FASTER)
            factor = next(
                (f for f in _RATE_FACTORS if saved(f) >= _ENOUGH * most), _RATE_FACTORS[-1]
            )
            old = min(rates)
            yield Advice(
                f"a better link {words}: {say_rate(factor * old)} instead of {say_rate(old)}",
                saved(factor),
                marked("rate"),
            )
        if trip:
            yield Advice(
                f"a shorter way {words} (move the hosts nearer): a round trip of {1e3 * _NEARER * trip:.3g} instead of "
                f"{1e3 * trip:.3g} ms",
                saved(trip=_NEARER),
                marked("trip"),
            )
        if any(isinstance(link, RadioLink) for link in used):
            yield Advice(
                f"half the distance {words} ({_HALF_AS_FAR:g} times the gain of the radio link)",
                saved(nearer=_HALF_AS_FAR),
                marked("gain"),
            )


def _slowest_links(
    ids: Sequence[str], prediction: ClusterPrediction
) -> Iterator[tuple[str, frozenset[str], frozenset[str]]]:
    """Yields the slowest links of a pipeline: what to call it, and the hosts at its two ends, of which the first ones are a part of the
    others."""
    hops = list(itertools.pairwise(ids))
    # Each prediction takes all links of a cluster, so only the slowest hops are looked at.
    slowest = sorted(range(len(hops)), key=lambda k: -prediction.links[k].loop_seconds)[:_MOST_HOPS]
    for k in slowest:
        yield f"between {' and '.join(hops[k])}", frozenset(hops[k]), frozenset(hops[k])
    # A device has one link to the network, which is a part of all links to others.
    at_ends = dict.fromkeys(host_id for k in slowest for host_id in hops[k] if host_id != ids[-1])
    for host_id in at_ends:
        yield f"of {host_id}", frozenset((host_id,)), frozenset(ids)


def _machines(decision: RoundDecision, index: int, now: float) -> Iterator[Advice]:
    problem, plan = decision.question.problem, decision.plans[index]
    cluster = problem.clusters[index]
    fastest = min(cluster.devices, key=lambda device: device.seconds_per_sample)
    for device in cluster.devices:
        if (
            device.host_id in plan.segments
            and device.seconds_per_sample > _LIKE * fastest.seconds_per_sample
        ):
            better = replace(
                device,
                seconds_per_sample=fastest.seconds_per_sample,
                seconds_per_micro_batch=fastest.seconds_per_micro_batch,
            )
            changed = _with_cluster(problem, index, _with_host(cluster, better))
            yield Advice(
                f"a device as fast as {fastest.host_id} in place of {device.host_id} "
                f"({1e3 * fastest.seconds_per_sample:.3g} instead of {1e3 * device.seconds_per_sample:.3g} ms "
                "for a block and a sample)",
                now - _seconds(changed, decision.plans),
            )
    for host in (cluster.control_unit, cluster.edge_server):
        better = replace(
            host,
            seconds_per_sample=host.seconds_per_sample / _FASTER_MACHINE,
            seconds_per_micro_batch=host.seconds_per_micro_batch / _FASTER_MACHINE,
        )
        changed = replace(
            problem, clusters=tuple(_with_host(each, better) for each in problem.clusters)
        )
        yield Advice(
            f"{host.host_id} on a machine that is {_FASTER_MACHINE:g} times as fast",
            now - _seconds(changed, decision.plans),
        )


def _devices(decision: RoundDecision, index: int, now: float) -> Iterator[Advice]:
    """Advises on memory, and on devices to leave out. Both need new decisions."""
    question, plan = decision.question, decision.plans[index]
    problem, strategy = question.problem, question.strategy
    cluster = problem.clusters[index]
    if decision.solve_seconds > _MOST_SOLVE_SECONDS or strategy not in ("dssra", *_WITH_SEGMENTS):
        return
    used = [device for device in cluster.devices if device.host_id in plan.segments]
    used.sort(key=lambda device: device.seconds_per_sample)
    by_speed = sorted(cluster.devices, key=lambda device: device.seconds_per_sample)
    limited = [device for device in by_speed if device.memory_bytes is not None]
    for device in limited[:_MOST_DEVICES]:
        free = _with_host(cluster, replace(device, memory_bytes=None))
        changed = _with_cluster(problem, index, free)
        try:
            better = decide_round(changed, strategy, hysteresis=0.0, time_limit_seconds=1.0)
        except InfeasibleError:
            continue
        stages = better.prediction.clusters[index].stages
        need = sum(each.memory_bytes for each in stages if each.host_id == device.host_id)
        if need > (device.memory_bytes or 0):
            yield Advice(
                f"{need / 1e6:.0f} instead of {(device.memory_bytes or 0) / 1e6:.0f} MB of memory for {device.host_id}",
                now - lasting_seconds(changed, better.prediction),
            )
    # `dssra` leaves out a device by itself.
    for device in used[-_MOST_DEVICES:] if strategy != "dssra" and len(cluster.devices) > 1 else ():
        others = tuple(each for each in cluster.devices if each != device)
        fewer = replace(cluster, devices=others, previous=None)
        yield Advice(
            f"go on without {device.host_id} (stop it)",
            now - _decided_seconds(_with_cluster(problem, index, fewer), strategy),
        )


def equal_plan(decision: RoundDecision) -> RoundPlan:
    """Returns the plans with equal segments, and with the micro-batches, slices and codecs of uploads that were decided.

    Raises:
        InfeasibleError: Equal segments do not fit.
    """
    problem = decision.question.problem
    clusters = tuple(
        replace(
            cluster,
            micro_batch_options=(plan.num_micro_batches,),
            slice_options=(plan.num_slices,),
            upload_codecs=(plan.upload_codec,),
        )
        for cluster, plan in zip(problem.clusters, decision.plans, strict=True)
    )
    return decide_round(replace(problem, clusters=clusters), "pipeline").plans


def say_rate(bits_per_second: float) -> str:
    """Writes a rate in its unit."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:.3g} {unit}"
    return f"{bits_per_second / 1e3:.3g} kbit/s"


def _seconds(problem: RoundProblem, plans: RoundPlan) -> float:
    return lasting_seconds(problem, predict(problem, plans))


def _decided_seconds(problem: RoundProblem, strategy: str) -> float:
    """Returns the time of a round as a strategy plans it; infinite if it finds no plan."""
    try:
        return lasting_seconds(problem, decide_round(problem, strategy).prediction)
    except InfeasibleError:
        return math.inf


def _with_cluster(problem: RoundProblem, index: int, cluster: ClusterProblem) -> RoundProblem:
    clusters = (*problem.clusters[:index], cluster, *problem.clusters[index + 1 :])
    return replace(problem, clusters=clusters)


def _with_micro_batches(problem: RoundProblem, count: int) -> RoundProblem:
    clusters = tuple(replace(c, micro_batch_options=(count,)) for c in problem.clusters)
    return replace(problem, clusters=clusters)


def _with_host(cluster: ClusterProblem, host: Host) -> ClusterProblem:
    """Replaces the host with the same id, if the cluster has it."""

    def new(old: Host) -> Host:
        return host if old.host_id == host.host_id else old

    return replace(
        cluster,
        control_unit=new(cluster.control_unit),
        devices=tuple(map(new, cluster.devices)),
        edge_server=new(cluster.edge_server),
    )


def _better_links(
    cluster: ClusterProblem, ends: frozenset[str], factor: float, trip: float, nearer: float
) -> ClusterProblem:
    """Returns a cluster in which the links that have all of `ends` are better, in both directions.

    Args:
        factor: Of rates of wires, and of weights to and from the edge server.
        trip: Of round trips.
        nearer: Of gains of radios.
    """
    links = dict(cluster.links)
    for pair, link in cluster.links.items():
        if ends <= set(pair):
            link = replace(link, round_trip_seconds=trip * link.round_trip_seconds)
            if isinstance(link, WiredLink):
                links[pair] = replace(link, capacity_bps=factor * link.capacity_bps)
            else:
                links[pair] = replace(link, gain=nearer * link.gain)
    changed = replace(cluster, links=links)
    edge_server = cluster.edge_server.host_id
    for host in (cluster.control_unit, *cluster.devices):
        if ends <= {host.host_id, edge_server}:
            faster = replace(
                host, push_bps=factor * host.push_bps, fetch_bps=factor * host.fetch_bps
            )
            changed = _with_host(changed, faster)
    return changed
