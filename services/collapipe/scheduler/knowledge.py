"""What the scheduler knows of a job's hosts, links and model: from the profile at first, then from what rounds measured.

It is kept with the job, so that a restarted scheduler goes on where it was.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from collapipe.allocation import ClusterPlan, RadioLink, VirtualQueue
from collapipe.errors import InvalidInputError
from collapipe.telemetry.estimates import Estimates, HostPrior, LinkEstimate

_MEMORY = 0.5
"""What an old value weighs against a new one that says about the same."""

_NEWS = 0.25
"""A change by more than this share is one of the world, not of the measurement: the old value is dropped."""

_PROFILE_NOISE = 0.2
"""Two profiles of a device that nothing happened to differ by less."""

_PROBE_NOISE = 1.5
"""Two probes of a link that nothing happened to differ by a smaller factor."""

_LEAST_MICRO_BATCHES = 2
_LEAST_BYTES = 4096
_UNLIMITED_BPS = 1e12
_NEARLY = 0.85
"""A link that delivered so much of its share was held by the share."""


class _Known(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class HostKnowledge(_Known):
    """One host; seconds as in design (2)."""

    seconds_per_sample: float = Field(ge=0, allow_inf_nan=False)
    seconds_per_micro_batch: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    busy_watts: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    origin: Literal["guess", "profile", "rounds"] = "guess"
    """Where the seconds come from."""
    profiled_seconds_per_sample: float = 0.0
    """What the last profile said; 0 without one. Rounds run other lengths of text than a profile, so it is compared only
    with other profiles."""


class LinkKnowledge(_Known):
    """One direction between two hosts."""

    capacity_bps: float = _UNLIMITED_BPS
    round_trip_seconds: float = 0.0
    gain: float | None = None
    noise_watts_per_hertz: float | None = None
    efficiency: float = 1.0
    probed_bps: float = 0.0
    """What the last probe said while its sender had no blocks, 0 without one: compared only with other probes."""
    weights_bps: float | None = None
    """Rate at which unit states were last gathered over it; only from a device to its control unit."""
    weights_probed_bps: float = 0.0
    """What a probe said when that was so, 0 if none did."""

    def learn_gathering(self, rate_bps: float) -> None:
        """Takes in at which rate unit states came."""
        before = self.weights_bps
        self.weights_bps = _follow(before, rate_bps)
        if before and self.weights_bps == rate_bps and self.probed_bps == self.weights_probed_bps:
            # the last probe is from before the change: what one would say by now, if the link is its cause
            self.probed_bps *= rate_bps / before
        self.weights_probed_bps = self.probed_bps

    def learn_probe(self, goodput_bps: float) -> None:
        """Takes in what a probe says while nothing is gathered over the link."""
        self.probed_bps = goodput_bps
        # narrower than when it was gathered over last: it was by then, and the probe late
        late = goodput_bps * _PROBE_NOISE < self.weights_probed_bps
        if late or not self.weights_probed_bps:
            self.weights_probed_bps = goodput_bps

    def gather_bps(self, elsewhere_bps: float) -> float:
        """Rate at which unit states would come now: a link that has widened since is tried again.

        At most `elsewhere_bps` is believed of it, which is also the answer where nothing was ever gathered: what is
        believed of other devices.
        """
        if self.weights_bps is None:
            return elsewhere_bps
        if self.probed_bps <= _PROBE_NOISE * self.weights_probed_bps:
            return self.weights_bps
        widened = self.weights_bps * self.probed_bps / self.weights_probed_bps
        return min(widened, max(self.weights_bps, elsewhere_bps))


class BlockKnowledge(_Known):
    """Memory of one block."""

    state_bytes: int = 0
    stash_bytes_per_sample: int = 0


class Knowledge(_Known):
    """Everything that is known of a job and not in its file."""

    hosts: dict[str, HostKnowledge] = Field(default_factory=dict)
    links: dict[str, LinkKnowledge] = Field(default_factory=dict)
    """By "sender>receiver"."""
    block: BlockKnowledge = Field(default_factory=BlockKnowledge)
    activation_bytes: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Of a sample, in fp32."""
    step_seconds: dict[int, float] = Field(default_factory=dict)
    """By cluster: T_step of design (5)."""
    weights_bps: float = math.inf
    """Rate at which unit states come from a device that none were gathered from: the best of late."""
    fixed_seconds: float = 0.0
    """Of a round besides training, gathering and evaluating."""
    reference_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """tau_ref of design (13)."""
    backlogs: dict[str, float] = Field(default_factory=dict)
    """Of the virtual queues, by device: design (12)."""

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document."""
        document: dict[str, Any] = self.model_dump(mode="json")
        return document

    @classmethod
    def from_json(cls, document: Any) -> "Knowledge":
        """Reads what `to_json` returned; raises `InvalidInputError`."""
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise InvalidInputError(f"what was kept of the hosts cannot be used: {error}") from None

    def priors(self) -> dict[str, HostPrior]:
        """What estimates are compared with, by host."""
        return {
            host_id: HostPrior(
                known.seconds_per_sample if known.origin != "guess" else 0.0,
                known.seconds_per_micro_batch,
            )
            for host_id, known in self.hosts.items()
        }

    def learn(
        self, estimates: Estimates, plans: Iterable[ClusterPlan], shares: Mapping[str, float]
    ) -> None:
        """Takes in what a window of telemetry measured.

        Args:
            estimates: Of the window.
            plans: In force during it.
            shares: What they gave each link, by "sender>receiver": bit/s, on a radio Hz.
        """
        for host_id, host in estimates.hosts.items():
            if host.seconds_per_sample and host.micro_batches >= _LEAST_MICRO_BATCHES:
                known = self.hosts.setdefault(host_id, HostKnowledge(seconds_per_sample=0.0))
                before = known.seconds_per_sample if known.origin == "rounds" else None
                known.seconds_per_sample = _follow(before, host.seconds_per_sample)
                if before:  # what a profile would say by now
                    known.profiled_seconds_per_sample *= known.seconds_per_sample / before
                known.origin = "rounds"
        self._correct_profiles()
        for host_id, host in estimates.hosts.items():
            if host.busy_watts and host_id in self.hosts:
                known = self.hosts[host_id]
                known.busy_watts = _follow(known.busy_watts or None, host.busy_watts)
        for name, link in estimates.links.items():
            self._learn_link(name, link, shares.get(name, math.inf))
        for cluster in estimates.clusters.values():
            if cluster.activation_bytes_per_sample:
                before = self.activation_bytes or None
                self.activation_bytes = _follow(before, cluster.activation_bytes_per_sample)
        for index, plan in enumerate(plans):
            steps = [
                measured.step_seconds
                for stage in plan.stages
                if (measured := estimates.hosts.get(stage.host_id))
                and measured.step_seconds is not None
            ]
            if steps:
                self.step_seconds[index] = _follow(self.step_seconds.get(index), max(steps))

    def learn_idle(
        self,
        seconds_per_sample: Mapping[str, float],
        links: Mapping[str, LinkKnowledge],
        working: Collection[str] = (),
    ) -> None:
        """Takes in what was found of devices and links that the round did not use.

        Args:
            seconds_per_sample: By device: what a new profile says of a block.
            links: By "sender>receiver": what a new probe says.
            working: Hosts that the round used: probes share their links with its streams, and what was gathered from
                them is fresh.
        """
        for host_id, profiled in seconds_per_sample.items():
            known = self.hosts[host_id]
            before = known.profiled_seconds_per_sample
            if before and abs(profiled - before) > _PROFILE_NOISE * before:
                known.seconds_per_sample *= profiled / before
                known.profiled_seconds_per_sample = profiled
        for name, probed in links.items():
            link = self.links.setdefault(name, LinkKnowledge())
            link.capacity_bps = probed.capacity_bps
            link.round_trip_seconds = probed.round_trip_seconds
            if probed.capacity_bps and name.partition(">")[0] not in working:
                link.learn_probe(probed.capacity_bps)

    def _correct_profiles(self) -> None:
        """Lets devices that only a profile knows be as much faster in rounds as the others turned out to be."""
        ratios = [
            known.seconds_per_sample / known.profiled_seconds_per_sample
            for known in self.hosts.values()
            if known.origin == "rounds" and known.profiled_seconds_per_sample
        ]
        if not ratios:
            return
        for known in self.hosts.values():
            if known.origin == "profile" and known.profiled_seconds_per_sample:
                ratio = statistics.median(ratios)
                known.seconds_per_sample = ratio * known.profiled_seconds_per_sample

    def learn_radios(self, estimates: Estimates) -> None:
        """Takes in what the hosts' radios know of their links, and nothing else."""
        for name, seen in estimates.links.items():
            self._learn_state(self.links.setdefault(name, LinkKnowledge()), seen)

    def learn_round(self, overhead_seconds: float) -> None:
        """Takes in what a round took besides training, gathering and evaluating."""
        self.fixed_seconds = _follow(self.fixed_seconds or None, max(overhead_seconds, 0.0))

    def learn_gathering(self, clusters: Iterable[Mapping[str, tuple[float, float]]]) -> None:
        """Takes in how the unit states of each cluster were gathered.

        Args:
            clusters: Of each, by "device>control unit": bytes, and seconds since all devices began to send.
        """
        rates: list[float] = []
        for gathered in clusters:
            seconds = _split({name: end for name, (_, end) in gathered.items()})
            for name, (num_bytes, _) in gathered.items():
                if num_bytes >= _LEAST_BYTES and seconds[name] > 0:
                    rates.append(8 * num_bytes / seconds[name])
                    self.links.setdefault(name, LinkKnowledge()).learn_gathering(rates[-1])
        if rates:
            before = self.weights_bps if math.isfinite(self.weights_bps) else max(rates)
            # falls by halves: where all blocks are on one device, its narrow link is not that of the others
            self.weights_bps = max(max(rates), _MEMORY * before + (1 - _MEMORY) * max(rates))

    def gather_bps(self, device: str, control_unit: str) -> float:
        """Rate at which unit states come from a device to its control unit."""
        known = self.links.get(f"{device}>{control_unit}") or LinkKnowledge()
        return known.gather_bps(self.weights_bps)

    def charge(self, energy_joules: Mapping[str, float], budgets: Mapping[str, float]) -> None:
        """Lets a round's energy enter the queues of the devices that have a budget: design (12)."""
        for host_id, budget in budgets.items():
            queue = VirtualQueue(budget, self.backlogs.get(host_id, 0.0))
            self.backlogs[host_id] = queue.after(energy_joules.get(host_id, 0.0)).backlog

    def _learn_link(self, name: str, seen: LinkEstimate, share: float) -> None:
        known = self.links.setdefault(name, LinkKnowledge())
        self._learn_state(known, seen)
        if seen.goodput_bps is None or seen.transfer_bytes < _LEAST_BYTES:
            return
        if known.gain is not None and known.noise_watts_per_hertz is not None:
            watts = seen.transmit_power_watts
            if watts and math.isfinite(share):
                formula = RadioLink(known.gain, known.noise_watts_per_hertz).rate_bps(share, watts)
                # above 1 only a measurement can be
                known.efficiency = min(1.0, _follow(known.efficiency, seen.goodput_bps / formula))
        elif seen.goodput_bps < _NEARLY * share:
            before = known.capacity_bps if known.capacity_bps < _UNLIMITED_BPS else None
            known.capacity_bps = _follow(before, seen.goodput_bps)
        else:  # held by its share: it may carry more, and is given more to find out
            known.capacity_bps = max(known.capacity_bps, (1 + _NEWS) * seen.goodput_bps)

    @staticmethod
    def _learn_state(known: LinkKnowledge, seen: LinkEstimate) -> None:
        if seen.round_trip_seconds is not None:
            known.round_trip_seconds = seen.round_trip_seconds
        if seen.channel_gain and seen.noise_watts_per_hertz:
            known.gain, known.noise_watts_per_hertz = seen.channel_gain, seen.noise_watts_per_hertz


def _split(ends: Mapping[str, float]) -> dict[str, float]:
    """Splits the time of senders that begin together evenly among those that are not done, at every moment.

    The parts sum to the whole time, as predictions add them up; and who is done early is not charged for who is late.
    """
    parts: dict[str, float] = {}
    part = last = 0.0
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        part += (end - last) / (len(ends) - len(parts))
        parts[name], last = part, end
    return parts


def _follow(before: float | None, now: float) -> float:
    """Averages what says about the same, and believes what changed."""
    if before is None or abs(now - before) > _NEWS * before:
        return now
    return _MEMORY * before + (1 - _MEMORY) * now
