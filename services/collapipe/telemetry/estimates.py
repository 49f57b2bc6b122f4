"""What the scheduler believes of hosts and links, from raw samples: the measured values in design (1) to (10).

A pure function of the samples: the same ones give the same estimates to the last bit, in whatever order they come.
Each estimate carries what it rests on, so that who decides can fall back to the profile; what cannot be true is
rejected and said so, and what was not seen is `None`, never 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from collapipe.errors import InvalidInputError
from collapipe.telemetry.sources.samples import Series, born_at_zero, increase, is_sound, latest

ENERGY_SENSORS = ("ina3221", "battery", "rapl")
"""From what sees the most of a device to what sees the least; each of them alone, for they see the same watts."""

_STRICT = ConfigDict(extra="forbid")
_MAX_RATIO_TO_PRIOR = 1000.0
_LEAST_SHARE_OF_PRIOR = 0.05
_ABOVE_ZERO = 5e-324
_MAX_SECONDS = 1e4
_MAX_BPS = 1e12
_MAX_RATIO_TO_LIMIT = 1.5
"""A shaper may be a little off, and lets a burst pass; a receiver that saw more than this measured something else."""

_Group = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class HostPrior:
    """What a host's profile says, from before it trained."""

    seconds_per_sample: float = 0.0
    """a_k: of one block and sample, forward and backward; 0 when it has no profile."""
    seconds_per_micro_batch: float = 0.0
    """o_k: what a micro-batch costs whatever its size."""


@dataclass(frozen=True)
class HostEstimate:
    """What was measured of a host. `None`: not seen in this window."""

    seconds_per_sample: float | None = None
    """a_k of design (2): seconds of one unit and sample, forward and backward, over all its stages."""
    micro_batches: float = 0.0
    """Rests on so many micro-batches."""
    busy_watts: float | None = None
    """Energy over busy time, design (8): what the device draws besides computing is in it too."""
    busy_seconds: float = 0.0
    """Rests on so much computing."""
    step_seconds: float | None = None
    """The part of T_step in design (5) that one stage spends in the optimizer."""
    steps: float = 0.0
    """Rests on so many optimizer steps."""
    peak_resident_bytes: float | None = None
    """The most memory that its process has held: design (10)."""


@dataclass(frozen=True)
class ClusterEstimate:
    """What was measured of the pipeline of a cluster."""

    activation_bytes_per_sample: float | None = None
    """What a stage passes on for a sample, before any codec; D_k of design (3) is made of it."""
    samples: float = 0.0
    """Rests on so many samples, counted at every stage that passes something on."""


@dataclass(frozen=True)
class LinkEstimate:
    """What was measured of one direction of a link."""

    goodput_bps: float | None = None
    """r_k of design (3) as the receiver saw it: a send that returned has only been buffered."""
    transfer_bytes: float = 0.0
    """Rests on so many bytes."""
    round_trip_seconds: float | None = None
    rate_limit_bps: float | None = None
    """What the sender paces at; 0: it does not."""
    probed_bps: float | None = None
    """What the last probe saw."""
    channel_gain: float | None = None
    """h_k of design (1)."""
    noise_watts_per_hertz: float | None = None
    """N0 + I0_k of design (1)."""
    transmit_power_watts: float | None = None


@dataclass(frozen=True)
class Estimates:
    """The telemetry vector of a decision; it is stored with it."""

    __pydantic_config__ = _STRICT

    end: float
    """Unix seconds of the end of the window."""
    hosts: dict[str, HostEstimate] = field(default_factory=dict)
    """By host id; only hosts that were heard."""
    clusters: dict[str, ClusterEstimate] = field(default_factory=dict)
    """By the index of the cluster, as the label `cluster` has it."""
    links: dict[str, LinkEstimate] = field(default_factory=dict)
    """By "sender>receiver", host ids."""
    missing: tuple[str, ...] = ()
    """Hosts of which nothing fresh was heard: what they said earlier in the window is not used."""
    rejected: tuple[str, ...] = ()
    """What cannot be true, in words."""

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document; `from_json` gives back an equal object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> "Estimates":
        """Reads what `to_json` returned, also after a way through a file.

        Raises:
            InvalidInputError: It is something else.
        """
        try:
            return _ADAPTER.validate_python(document)
        except ValidationError as error:
            raise InvalidInputError(f"the stored telemetry cannot be used: {error}") from None


_ADAPTER = TypeAdapter(Estimates)


def estimate(
    series: Sequence[Series],
    hosts: Mapping[str, str],
    priors: Mapping[str, HostPrior],
    *,
    end: float,
    max_age_seconds: float,
) -> Estimates:
    """Returns what a window of samples says.

    Args:
        series: From a `TelemetrySource`; series of other instances than those of `hosts` are passed over.
        hosts: Host ids by instance, the address of their metrics.
        priors: Profiles by host id.
        end: Unix seconds of the end of the window.
        max_age_seconds: A host whose last page is older is missing, a gauge that is older is not used.
    """
    rejected: list[str] = []
    heard = _heard(series, hosts, end - max_age_seconds, end)
    # in this order: a first page that is left out is no birth
    sound = _without_lies(born_at_zero(heard), hosts, rejected)
    table = _Table(sound, hosts, end, max_age_seconds, rejected)
    found = {hosts[one.instance] for one in heard}
    return Estimates(
        end=end,
        hosts={host: _host(table, host, priors.get(host, HostPrior())) for host in sorted(found)},
        clusters=_clusters(table),
        links=_links(table),
        missing=tuple(sorted(set(hosts.values()) - found)),
        rejected=tuple(rejected),
    )


def _heard(
    series: Sequence[Series], hosts: Mapping[str, str], oldest: float, end: float
) -> list[Series]:
    """The series of the hosts that answered lately, in an order that depends on nothing else."""
    known = [one for one in series if one.instance in hosts]
    fresh = {one.instance for one in known if any(oldest <= at <= end for at, _ in one.points)}
    return sorted((one for one in known if one.instance in fresh), key=lambda one: one.key)


def _without_lies(
    series: Sequence[Series], hosts: Mapping[str, str], rejected: list[str]
) -> list[Series]:
    """Drops pages on which a value of a group cannot be, for the whole group: its sums must end at the same time."""
    lies: dict[tuple[str, _Group], set[float]] = {}
    for one in series:
        bad = [(at, value) for at, value in one.points if not is_sound(value)]
        if bad:
            lies.setdefault((one.instance, _group(one)), set()).update(at for at, _ in bad)
            at, value = bad[0]
            rejected.append(
                f"{hosts[one.instance]}: {_words(one)} was {value:g} at {at:.3f}, which it cannot be; left out "
                f"{len(bad)} of {len(one.points)} samples"
            )
    kept = []
    for one in series:
        bad_times = lies.get((one.instance, _group(one)), set())
        points = tuple(point for point in one.points if point[0] not in bad_times)
        if points:
            kept.append(replace(one, points=points))
    return kept


def _group(series: Series) -> _Group:
    """A stage, a link or a probe: what is put in relation to each other."""
    return tuple(pair for pair in series.labels if pair[0] != "codec")


def _words(series: Series) -> str:
    labels = ", ".join(f"{name} {value}" for name, value in series.labels)
    return f"{series.name} ({labels})" if labels else series.name


class _Table:
    """Looks up increases and last values by host, metric and group."""

    def __init__(
        self,
        series: Sequence[Series],
        hosts: Mapping[str, str],
        end: float,
        max_age_seconds: float,
        rejected: list[str],
    ) -> None:
        self._end = end
        self._max_age_seconds = max_age_seconds
        self._rejected = rejected
        self._series: dict[tuple[str, str, _Group], list[Series]] = {}
        groups: set[tuple[str, _Group]] = set()
        for one in series:
            host, group = hosts[one.instance], _group(one)
            self._series.setdefault((host, one.name, group), []).append(one)
            groups.add((host, group))
        self._groups = sorted(groups)

    def groups(self, label: str) -> list[tuple[str, _Group, str]]:
        """Host, group and value of the label, of every group that has it."""
        return [
            (host, group, dict(group)[label])
            for host, group in self._groups
            if label in dict(group)
        ]

    def of(self, host: str, name: str, group: _Group) -> list[Series]:
        """One series for each codec, or the only one, or none."""
        return self._series.get((host, f"collapipe_{name}", group), [])

    def increases(self, host: str, group: _Group, *names: str) -> list[float] | None:
        """Growth of counters that are put in relation to each other, over all codecs: of all of them or `None`."""
        grown = []
        for name in names:
            each = [increase(one) for one in self.of(host, name, group)]
            known = [value for value in each if value is not None]
            if not known:
                return None
            grown.append(sum(known))
        return grown

    def latest(
        self, host: str, name: str, group: _Group, most: float, least: float = _ABOVE_ZERO
    ) -> float | None:
        """Last value of a gauge; `None` without a fresh and plausible one."""
        for one in self.of(host, name, group):
            value = latest(one, self._end, self._max_age_seconds)
            if value is not None:
                return self.plausible(f"{host}: {_words(one)}", value, least, most)
        return None

    def plausible(
        self, what: str, value: float, least: float, most: float, why: str = ""
    ) -> float | None:
        """The value, or `None` and a word about it."""
        if least <= value <= most:
            return value
        self._rejected.append(f"{what}: {value:.4g} is not from {least:.4g} to {most:.4g}{why}")
        return None


def _host(table: _Table, host: str, prior: HostPrior) -> HostEstimate:
    computing = work = micro_batches = 0.0
    updating = steps = 0.0
    for owner, group, _ in table.groups("stage"):
        if owner != host:
            continue
        passes = table.increases(
            host,
            group,
            "stage_forward_seconds_sum",
            "stage_backward_seconds_sum",
            "stage_backward_seconds_count",
            "stage_block_samples_total",
        )
        if passes:
            computing += passes[0] + passes[1]
            micro_batches += passes[2]
            work += passes[3]
        if updates := table.increases(
            host, group, "stage_update_seconds_total", "stage_steps_total"
        ):
            updating += updates[0]
            steps += updates[1]
    seconds_per_sample = _seconds_per_sample(table, host, prior, computing, micro_batches, work)
    busy_seconds = computing + updating
    step_seconds = None
    if steps:
        what = f"{host}: seconds of an optimizer step"
        step_seconds = table.plausible(what, updating / steps, 0.0, _MAX_SECONDS)
    return HostEstimate(
        seconds_per_sample=seconds_per_sample,
        micro_batches=micro_batches if seconds_per_sample is not None else 0.0,
        busy_watts=_busy_watts(table, host, busy_seconds),
        busy_seconds=busy_seconds,
        step_seconds=step_seconds,
        steps=steps if step_seconds is not None else 0.0,
        peak_resident_bytes=table.latest(host, "process_peak_resident_memory_bytes", (), 1e15),
    )


def _seconds_per_sample(
    table: _Table,
    host: str,
    prior: HostPrior,
    computing: float,
    micro_batches: float,
    work: float,
) -> float | None:
    """a_k of design (2), with o_k from the profile."""
    if not work:
        return None
    expected = prior.seconds_per_sample
    least, most = _ABOVE_ZERO, _MAX_SECONDS
    if expected:
        least, most = expected / _MAX_RATIO_TO_PRIOR, expected * _MAX_RATIO_TO_PRIOR
    why = f", where the profile says {expected:.4g}" if expected else ""
    # before o_k is taken off: an o_k that is too large is no lie of the host
    gross = table.plausible(f"{host}: seconds of a sample", computing / work, least, most, why)
    if gross is None:
        return None
    net = (computing - prior.seconds_per_micro_batch * micro_batches) / work
    return max(net, _LEAST_SHARE_OF_PRIOR * (expected or gross))


def _busy_watts(table: _Table, host: str, busy_seconds: float) -> float | None:
    """Of the one probe that sees most; two of them would count the same watts twice.

    What a host counts where nothing measures follows from the watts that it was started with: no news.
    """
    probes = {probe: group for owner, group, probe in table.groups("sensor") if owner == host}
    for probe in ENERGY_SENSORS:
        joules = (
            table.increases(host, probes[probe], "energy_joules_total") if probe in probes else None
        )
        if joules and joules[0] and busy_seconds:
            what = f"{host}: busy watts by {probe}"
            return table.plausible(what, joules[0] / busy_seconds, 1e-3, 1e5)
    return None


def _clusters(table: _Table) -> dict[str, ClusterEstimate]:
    passed: dict[str, list[float]] = {}
    for host, group, cluster in table.groups("cluster"):
        grown = table.increases(host, group, "stage_activation_bytes_total", "stage_samples_total")
        if grown and grown[0] and grown[1]:  # the last stage passes nothing on
            total = passed.setdefault(cluster, [0.0, 0.0])
            total[0] += grown[0]
            total[1] += grown[1]
    found = {}
    for cluster, (passed_bytes, samples) in sorted(passed.items()):
        what = f"cluster {cluster}: bytes of a sample's activations"
        per_sample = table.plausible(what, passed_bytes / samples, 1.0, 1e12)
        if per_sample is not None:
            found[cluster] = ClusterEstimate(per_sample, samples)
    return found


def _links(table: _Table) -> dict[str, LinkEstimate]:
    found: dict[str, LinkEstimate] = {}
    for host, group, link in table.groups("link"):
        sender, _, receiver = link.partition(">")
        before = found.get(link, LinkEstimate())
        if host == sender:
            found[link] = replace(
                before,
                round_trip_seconds=table.latest(host, "link_round_trip_seconds", group, 3600.0),
                rate_limit_bps=table.latest(host, "link_rate_limit_bps", group, _MAX_BPS, 0.0),
                probed_bps=table.latest(host, "link_probed_bps", group, _MAX_BPS),
                channel_gain=table.latest(host, "radio_channel_gain", group, 1e3),
                noise_watts_per_hertz=table.latest(host, "radio_noise_watts_per_hertz", group, 1.0),
                transmit_power_watts=table.latest(
                    host, "radio_transmit_power_watts", group, 1e4, 0.0
                ),
            )
        if host == receiver:
            goodput, transfer_bytes = _goodput(table, sender, receiver, group)
            found[link] = replace(
                found.get(link, before), goodput_bps=goodput, transfer_bytes=transfer_bytes
            )
    return {link: one for link, one in sorted(found.items()) if one != LinkEstimate()}


def _goodput(
    table: _Table, sender: str, receiver: str, group: _Group
) -> tuple[float | None, float]:
    """Rate in bit/s that the receiver saw, and the bytes that it rests on."""
    grown = table.increases(
        receiver, group, "link_transfer_bytes_total", "link_transfer_seconds_total"
    )
    if not grown or not grown[0]:
        return None, 0.0
    arrived, seconds = grown
    most, why = _MAX_BPS, ""
    limits = [v for one in table.of(sender, "link_rate_limit_bps", group) for _, v in one.points]
    if limits and min(limits) > 0:
        most, why = (
            _MAX_RATIO_TO_LIMIT * max(limits),
            f", for its sender paces at {max(limits):.4g}",
        )
    rate = 8 * arrived / seconds if seconds else float("inf")
    goodput = table.plausible(f"{receiver}: bit/s from {sender}", rate, 1.0, most, why)
    return goodput, arrived if goodput is not None else 0.0
