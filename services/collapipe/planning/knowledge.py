"""What the scheduler knows about the hosts, links and model of a job.

The first values come from profiles and probes. Telemetry of each round then updates them. They are stored
with the job, so that a restarted scheduler continues with them.

At the end of a round, the hosts push their weights to the edge server, and with several clusters they fetch the
average before the next one. Both rates are measured for each host, because they decide which devices should hold
blocks.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from collapipe.allocation import ClusterPlan, RadioLink, backlogs_after
from collapipe.allocation.round_model.problem import RECOMPUTED_WORK
from collapipe.telemetry import metrics
from collapipe.telemetry.estimates import Estimates, HostEstimate, HostPrior, LinkEstimate

_OLD_WEIGHT = 0.5
"""Weight of the old value in a running average."""

_CHANGE = 0.25
"""A value that differs from the average by more than this share replaces it. The cause must be a change of
the host or link, not noise."""

_PROFILE_NOISE = 0.2
"""Two profiles of an unchanged device differ by less than this share."""

_PROBE_NOISE = 1.5
"""Two probes of an unchanged link differ by less than this factor."""

_MIN_MICRO_BATCHES = 2
"""Times measured on fewer micro-batches only replace a guess, and are a guess themselves."""

_MIN_BYTES = 4096
"""Rates measured on fewer bytes are ignored."""

_LEAST_SHARE_OF_BYTES = 0.05
"""A transfer with less than this share of the bytes of the last measured one does not update the rate."""

_UNLIMITED_BPS = 1e12
"""Capacity of a link that has not been measured."""

_LIMITED_BY_SHARE = 0.85
"""A link that delivers at least this part of its share is limited by the share, not by its capacity."""


class _Known(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class HostKnowledge(_Known):
    """What is known about one host; the times are those of docs/scheduling.md (2)."""

    seconds_per_sample: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Time of a block; 0 if unknown."""
    end_seconds_per_sample: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Time of the embedding, the head or both, whichever this host runs; 0 before it is measured."""
    seconds_per_micro_batch: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    deferred_share: float | None = Field(default=None, ge=0, le=1)
    """d_k / c_k of docs/scheduling.md (4); `None` before a round has measured it."""
    busy_watts: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    source: Literal["guess", "profile", "rounds"] = "guess"
    """How `seconds_per_sample` was obtained."""
    profiled_seconds_per_sample: float = 0.0
    """Result of the last profile; 0 without one. Profiles and rounds use texts of different length, so a
    profile is compared with other profiles only."""


class LinkKnowledge(_Known):
    """What is known about one direction between two hosts."""

    capacity_bps: float = _UNLIMITED_BPS
    round_trip_seconds: float = 0.0
    gain: float | None = None
    noise_watts_per_hertz: float | None = None
    efficiency: float = 1.0
    """Measured rate of a radio link divided by the rate of docs/scheduling.md (1)."""
    probed_bps: float = 0.0
    """Result of the last probe that ran while a host of the link was idle; 0 without one. A probe is compared
    with other probes only."""
    weights_bps: float | None = None
    """Rate of weights to or from the edge server, for the sum of docs/scheduling.md (6); `None` before it is measured."""
    weights_bytes: float = 0.0
    """Bytes on which that rate was measured."""
    probed_bps_at_transfer: float = 0.0
    """The rate that a probe found, or would have found, when `weights_bps` was measured; 0 before any probe."""

    def update_channel(self, measured: LinkEstimate) -> None:
        if measured.round_trip_seconds is not None:
            self.round_trip_seconds = measured.round_trip_seconds
        if measured.channel_gain and measured.noise_watts_per_hertz:
            self.gain = measured.channel_gain
            self.noise_watts_per_hertz = measured.noise_watts_per_hertz

    def update_weights_rate(self, num_bytes: float, seconds: float) -> None:
        """Updates the rate after a transfer, unless it is much smaller than the last measured one.

        The fixed costs of a small transfer would make its rate look too small. With LoRA, the first round moves frozen
        weights, and later ones move little.
        """
        if self.weights_bps is not None and num_bytes < _LEAST_SHARE_OF_BYTES * self.weights_bytes:
            return
        rate_bps, self.weights_bytes = 8 * num_bytes / seconds, num_bytes
        before = self.weights_bps
        self.weights_bps = _average(before, rate_bps)
        has_changed = self.weights_bps == rate_bps
        if before and has_changed and self.probed_bps == self.probed_bps_at_transfer:
            # No probe has run since the change. Assume that the link itself has changed: then the result of
            # a new probe would change by the same factor.
            self.probed_bps *= rate_bps / before
        self.probed_bps_at_transfer = self.probed_bps

    def update_probed_rate(self, goodput_bps: float) -> None:
        """Updates the rates after a probe during which a host of the link was idle.

        If the link has become faster since weights used it last, their rate is forgotten. The host can then get
        blocks again, so that the rate is measured.
        """
        self.probed_bps = goodput_bps
        if goodput_bps > _PROBE_NOISE * self.probed_bps_at_transfer > 0:
            self.weights_bps = None
        # If the rate is much lower now, the link probably became slow before weights used it last.
        is_slower = goodput_bps * _PROBE_NOISE < self.probed_bps_at_transfer
        if is_slower or not self.probed_bps_at_transfer:
            self.probed_bps_at_transfer = goodput_bps


class Knowledge(_Known):
    """What is known about the hosts, links and model of a job."""

    hosts: dict[str, HostKnowledge] = Field(default_factory=dict)
    links: dict[str, LinkKnowledge] = Field(default_factory=dict)
    """By "sender>receiver"."""
    block_state_bytes: int = 0
    """Weights, gradients and optimizer state of the mean block; 0 if not measured."""
    block_stash_bytes: int = 0
    """Activation stash of the mean block for one sample."""
    work_shares: list[float] = Field(default_factory=list)
    """Time of each block of a layer, divided by that of the mean block; empty if not measured."""
    stash_shares: list[float] = Field(default_factory=list)
    """The same for the activation stash."""
    activation_bytes: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Size of one sample's activation in fp32."""
    step_seconds: dict[int, float] = Field(default_factory=dict)
    """T_step of docs/scheduling.md (5), by cluster."""
    fixed_seconds: float = 0.0
    """Time of a round beside training, evaluation and transfers of weights."""
    reference_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """tau_ref of docs/scheduling.md (13)."""
    backlogs: dict[str, float] = Field(default_factory=dict)
    """Backlog of the virtual queue of each device: docs/scheduling.md (12)."""

    def has_measured(self, plans: Iterable[ClusterPlan]) -> bool:
        """Returns whether rounds have measured what every host in these plans computes."""
        return all(
            known.source == "rounds"
            if stage.host_id in plan.segments
            else known.end_seconds_per_sample > 0 or stage.start_unit == stage.stop_unit
            for plan in plans
            for stage in plan.stages
            for known in [self.hosts.get(stage.host_id, HostKnowledge())]
        )

    def host_priors(self) -> dict[str, HostPrior]:
        """Returns the expected times of each host. Telemetry that is far from them is rejected."""
        return {
            host_id: HostPrior(
                known.seconds_per_sample if known.source != "guess" else 0.0,
                known.seconds_per_micro_batch,
            )
            for host_id, known in self.hosts.items()
        }

    def update(
        self, estimates: Estimates, plans: Iterable[ClusterPlan], shares: Mapping[str, float]
    ) -> None:
        """Updates everything from the estimates of a telemetry window and the plans that ran during it.

        Args:
            shares: What these plans gave each link, by "sender>receiver": bit/s, or Hz on a radio link.
        """
        plans = tuple(plans)
        mean_work = self._mean_work(plans)
        repeating = {stage.host_id for plan in plans for stage in plan.stages if stage.recompute}
        for host_id, host in estimates.hosts.items():
            work = mean_work.get(host_id, 1.0)
            # What is stored holds without recomputation.
            factor = RECOMPUTED_WORK if host_id in repeating else 1.0
            seconds, end_seconds = host.seconds_per_sample, host.end_seconds_per_sample
            host = replace(
                host,
                seconds_per_sample=None if seconds is None else seconds / (work * factor),
                end_seconds_per_sample=None if end_seconds is None else end_seconds / factor,
                deferred_share=host.deferred_share and min(1.0, host.deferred_share * factor),
            )
            self._update_host(host_id, host)
        self._scale_profiles()
        for name, link in estimates.links.items():
            self._update_link(name, link, shares.get(name, math.inf))
        for cluster in estimates.clusters.values():
            if cluster.activation_bytes_per_sample:
                before = self.activation_bytes or None
                self.activation_bytes = _average(before, cluster.activation_bytes_per_sample)
        for index, plan in enumerate(plans):
            steps = [
                measured.step_seconds
                for stage in plan.stages
                if (measured := estimates.hosts.get(stage.host_id))
                and measured.step_seconds is not None
            ]
            if steps:
                self.step_seconds[index] = _average(self.step_seconds.get(index), max(steps))

    def forget_links(self, host_id: str) -> None:
        """Forgets the links of a host, so that they are probed again."""
        for name in [name for name in self.links if host_id in name.split(">")]:
            del self.links[name]

    def forget_dead_links(self) -> None:
        """Forgets the links whose last probe failed, so that they are probed again."""
        self.links = {name: link for name, link in self.links.items() if link.capacity_bps}

    def update_idle(
        self,
        seconds_per_sample: Mapping[str, float],
        links: Mapping[str, LinkKnowledge],
        used_hosts: Collection[str] = (),
    ) -> None:
        """Updates devices and links that were idle in the last round, from new profiles and probes.

        Args:
            used_hosts: Hosts with a stage in the last round. Probes of links between them do not change the
                rates of weights: these are newer, and the streams of the round slowed the probes down.
        """
        for host_id, profiled in seconds_per_sample.items():
            host = self.hosts[host_id]
            before = host.profiled_seconds_per_sample
            if before and abs(profiled - before) > _PROFILE_NOISE * before:
                host.seconds_per_sample *= profiled / before
                host.profiled_seconds_per_sample = profiled
        for name, probed in links.items():
            link = self.links.setdefault(name, LinkKnowledge())
            link.capacity_bps = probed.capacity_bps
            link.round_trip_seconds = probed.round_trip_seconds
            if probed.capacity_bps and not set(name.split(">")) <= set(used_hosts):
                link.update_probed_rate(probed.capacity_bps)

    def update_radio_links(self, estimates: Estimates) -> None:
        """Updates the round trips, channel gains and noise of links, but no rates."""
        for name, measured in estimates.links.items():
            self.links.setdefault(name, LinkKnowledge()).update_channel(measured)

    def update_fixed_seconds(self, seconds: float) -> None:
        self.fixed_seconds = _average(self.fixed_seconds or None, max(seconds, 0.0))

    def update_weights_rates(self, transfers: Mapping[str, tuple[float, float]]) -> None:
        """Updates the rates of weights after all hosts of a cluster pushed, or after all of them fetched.

        Args:
            transfers: By "sender>receiver": bytes, and the seconds from the common start of all hosts to the
                end of this host.
        """
        seconds = _split_shared_time({name: end for name, (_, end) in transfers.items()})
        for name, (num_bytes, _) in transfers.items():
            if num_bytes >= _MIN_BYTES and seconds[name] > 0:
                link = self.links.setdefault(name, LinkKnowledge())
                link.update_weights_rate(num_bytes, seconds[name])

    def update_backlogs(
        self, energy_joules: Mapping[str, float], budgets: Mapping[str, float]
    ) -> None:
        """Updates the energy queue of each device with a budget: docs/scheduling.md (12)."""
        self.backlogs.update(backlogs_after(self.backlogs, energy_joules, budgets))
        for host_id in budgets:
            metrics.BACKLOG.labels(host_id).set(self.backlogs[host_id])

    def _mean_work(self, plans: Iterable[ClusterPlan]) -> dict[str, float]:
        """Returns the mean work of the blocks that each host ran, in mean blocks. A host that ran none is missing."""
        if not self.work_shares:
            return {}
        work: defaultdict[str, list[float]] = defaultdict(list)
        for plan in plans:
            for host_id, segment in plan.segments.items():
                for block in range(segment.start_block, segment.stop_block):
                    work[host_id].append(self.work_shares[block % len(self.work_shares)])
        return {host_id: statistics.mean(shares) for host_id, shares in work.items()}

    def _update_host(self, host_id: str, measured: HostEstimate) -> None:
        if not (
            measured.seconds_per_sample or measured.end_seconds_per_sample or host_id in self.hosts
        ):
            return
        host = self.hosts.setdefault(host_id, HostKnowledge())
        is_reliable = measured.micro_batches >= _MIN_MICRO_BATCHES
        if measured.seconds_per_sample and is_reliable:
            before = host.seconds_per_sample if host.source == "rounds" else None
            host.seconds_per_sample = _average(before, measured.seconds_per_sample)
            if before:
                # The result of a new profile would change by the same factor.
                host.profiled_seconds_per_sample *= host.seconds_per_sample / before
            host.source = "rounds"
        elif measured.seconds_per_sample and host.source == "guess":
            host.seconds_per_sample = measured.seconds_per_sample
        known_end = host.end_seconds_per_sample or None
        if measured.end_seconds_per_sample and (is_reliable or known_end is None):
            host.end_seconds_per_sample = _average(known_end, measured.end_seconds_per_sample)
            if known_end and measured.seconds_per_sample is None:
                # It runs no block. If its speed has changed, a block would take longer or shorter by the same factor.
                host.seconds_per_sample *= host.end_seconds_per_sample / known_end
        if measured.deferred_share is not None:
            host.deferred_share = _average(host.deferred_share, measured.deferred_share)
        if measured.busy_watts:
            host.busy_watts = _average(host.busy_watts or None, measured.busy_watts)

    def _scale_profiles(self) -> None:
        """Scales the profiled times of devices that were not in a round yet.

        The factor is the median, over the other devices, of the time in rounds divided by the profiled time.
        """
        ratios = [
            host.seconds_per_sample / host.profiled_seconds_per_sample
            for host in self.hosts.values()
            if host.source == "rounds" and host.profiled_seconds_per_sample
        ]
        ratio = statistics.median(ratios) if ratios else 0.0
        for host in self.hosts.values():
            if ratio and host.source == "profile" and host.profiled_seconds_per_sample:
                host.seconds_per_sample = ratio * host.profiled_seconds_per_sample

    def _update_link(self, name: str, measured: LinkEstimate, share: float) -> None:
        link = self.links.setdefault(name, LinkKnowledge())
        link.update_channel(measured)
        goodput = measured.goodput_bps
        if goodput is None or measured.transfer_bytes < _MIN_BYTES:
            return
        if link.gain is not None and link.noise_watts_per_hertz is not None:
            watts = measured.transmit_power_watts
            if watts and math.isfinite(share):
                formula = RadioLink(link.gain, link.noise_watts_per_hertz).rate_bps(share, watts)
                # An efficiency above 1 can only be a measurement error.
                link.efficiency = min(1.0, _average(link.efficiency, goodput / formula))
        elif goodput < _LIMITED_BY_SHARE * share:
            before = link.capacity_bps if link.capacity_bps < _UNLIMITED_BPS else None
            link.capacity_bps = _average(before, goodput)
        else:
            # The share limited the rate. Assume a higher capacity, so that the next plan can test it.
            link.capacity_bps = max(link.capacity_bps, (1 + _CHANGE) * goodput)


def _split_shared_time(ends: Mapping[str, float]) -> dict[str, float]:
    """Divides the total time of senders that start together among them.

    Each moment is divided evenly among the senders that are still sending. The parts add up to the total
    time, as the prediction of a round assumes, and a slow sender does not lengthen the part of a fast one.
    """
    parts: dict[str, float] = {}
    part = last = 0.0
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        part += (end - last) / (len(ends) - len(parts))
        parts[name], last = part, end
    return parts


def _average(before: float | None, now: float) -> float:
    """Updates a running average; a value that differs by more than `_CHANGE` replaces it."""
    if before is None or abs(now - before) > _CHANGE * before:
        return now
    return _OLD_WEIGHT * before + (1 - _OLD_WEIGHT) * now
