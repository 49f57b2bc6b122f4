"""The world of a scenario and a seed: its hosts and links, and how they are in each round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Convergence,
    Host,
    Link,
    ModelCost,
    RadioLink,
    RoundPlan,
    RoundProblem,
    WiredLink,
)
from collapipe.emulation.device_profiles import device_profile
from collapipe.simulation.channel import (
    Floats,
    interference_density,
    noise_density,
    path_gain,
    positions_in_disc,
    rayleigh_fading,
)
from collapipe.simulation.models import STATE_BYTES_PER_PARAMETER, TRANSFORMERS
from collapipe.simulation.scenario import HardwareConfig, RadioConfig, Scenario

EDGE_SERVER = "edge-server"

_LAYOUT, _ROUND, _TELEMETRY = range(3)  # streams of random numbers


@dataclass(frozen=True)
class ChannelConditions:
    """How things are in one round; hosts are numbered cluster by cluster, control unit first, the edge server last.

    Args:
        slowness: (n,) times the seconds that a host takes.
        links: (n, n) power gains of radios, or bit/s of wires, from sender to receiver.
        interference: (clusters, n) in W/Hz at each host while it receives for each cluster.
    """

    slowness: Floats
    links: Floats
    interference: Floats


class World:
    """Hosts and links of one scenario and seed; two of the same are equal.

    Args:
        scenario: Without its sweep: see `Scenario.points`.
        seed: Of everything random.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed
        rng = self._rng(_LAYOUT)
        shape, model = TRANSFORMERS[scenario.model.name], scenario.model
        self.model: ModelCost = shape.cost(model.sequence_length, recompute=model.recompute)
        self._block_flops = shape.block_flops(model.sequence_length, recompute=model.recompute)
        self.forward_share = 1 / 4 if model.recompute else 1 / 3
        kinds = [cluster for cluster in scenario.clusters for _ in range(cluster.count)]
        self._clusters: list[tuple[Host, ...]] = []
        for index, kind in enumerate(kinds):
            devices = [device for device in kind.devices for _ in range(device.count)]
            if scenario.world.shuffle_devices:
                devices = [devices[i] for i in rng.permutation(len(devices))]
            speeds = _spread(rng, len(devices), scenario.world.speed_spread)
            self._clusters.append(
                (
                    self._host(f"control-unit-{index}", scenario.control_unit),
                    *(
                        self._host(f"device-{index}-{i}", device, speed)
                        for i, (device, speed) in enumerate(zip(devices, speeds, strict=True))
                    ),
                )
            )
        self._edge_server = self._host(EDGE_SERVER, scenario.edge_server)
        self._number = {host.host_id: i for i, host in enumerate(self.hosts)}
        self._links = self._lay_out(rng)

    @property
    def hosts(self) -> list[Host]:
        """Every host, as it is said to be."""
        return [*(host for cluster in self._clusters for host in cluster), self._edge_server]

    @property
    def devices(self) -> list[Host]:
        """Every device."""
        return [device for cluster in self._clusters for device in cluster[1:]]

    def nominal(self) -> ChannelConditions:
        """ChannelConditions without anything that changes from round to round."""
        size = len(self._number)
        silent = np.zeros((len(self._clusters), size))
        return ChannelConditions(np.ones(size), self._links, silent)

    def draw(self, round_index: int) -> ChannelConditions:
        """ChannelConditions of a round, without the interference of other clusters."""
        rng = self._rng(_ROUND, round_index)
        channel, nominal, size = self._scenario.channel, self.nominal(), len(self._number)
        slowness = np.exp(self._scenario.world.speed_fluctuation * rng.standard_normal(size))
        if isinstance(channel, RadioConfig):
            faded = channel.fading == "rayleigh"
            change = rayleigh_fading(rng, size, channel.fading_branches) if faded else 1.0
        else:
            change = np.exp(channel.fluctuation * rng.standard_normal((size, size)))
        return ChannelConditions(slowness, nominal.links * change, nominal.interference)

    def with_interference(
        self, conditions: ChannelConditions, plans: RoundPlan | None
    ) -> ChannelConditions:
        """The same conditions with what plans make other clusters hear, where they share a band."""
        channel = self._scenario.channel
        if plans is None or channel.kind != "radio" or channel.interference != "clusters":
            return conditions
        radiated = np.zeros((len(plans), len(self._number)))
        for cluster, plan in enumerate(plans):
            for i, link in enumerate(plan.links):
                sender = self._number[plan.stages[i].host_id]
                receiver = self._number[plan.stages[i + 1].host_id]
                radiated[cluster, sender] += channel.duty * link.forward_watts
                radiated[cluster, receiver] += channel.duty * link.backward_watts
        heard = interference_density(conditions.links, radiated, channel.bandwidth_hz)
        return ChannelConditions(conditions.slowness, conditions.links, heard)

    def as_known(self, conditions: ChannelConditions, round_index: int) -> ChannelConditions:
        """What telemetry says of conditions."""
        noise = self._scenario.schedule.telemetry_noise
        if not noise:
            return conditions
        rng = self._rng(_TELEMETRY, round_index)

        def measured(values: Floats) -> Floats:
            return np.asarray(values * np.exp(noise * rng.standard_normal(values.shape)))

        return ChannelConditions(
            measured(conditions.slowness), measured(conditions.links), conditions.interference
        )

    def problem(
        self,
        conditions: ChannelConditions,
        *,
        round_index: int = 0,
        previous: Sequence[ClusterPlan] | None = None,
        backlogs: Mapping[str, float] | None = None,
        micro_batch_options: tuple[int, ...] | None = None,
        reference_seconds: float = 1.0,
    ) -> RoundProblem:
        """The problem of a round under conditions; see `RoundProblem` for what is not named here."""
        scenario = self._scenario
        training, schedule = scenario.training, scenario.schedule
        backlogs = backlogs or {}
        edge_server = self._now(self._edge_server, conditions, backlogs)
        shared = self._shared()
        clusters = []
        for index, hosts in enumerate(self._clusters):
            control_unit, *devices = (self._now(host, conditions, backlogs) for host in hosts)
            clusters.append(
                ClusterProblem(
                    control_unit=control_unit,
                    devices=tuple(devices),
                    edge_server=edge_server,
                    links=self._cluster_links(index, conditions),
                    micro_batch_options=micro_batch_options or training.micro_batch_options,
                    channel=None if shared is None else f"channel-{index}",
                    previous=previous[index] if previous else None,
                    step_seconds=training.step_seconds,
                    upload_seconds=self._upload_seconds(),
                    weight=1 / len(self._clusters),
                )
            )
        limit = schedule.max_convergence_term
        return RoundProblem(
            clusters=tuple(clusters),
            model=self.model,
            mini_batch=training.mini_batch,
            local_steps=training.local_steps,
            channels={} if shared is None else {str(c.channel): shared for c in clusters},
            codecs=tuple(training.codecs),
            in_flight_limit=training.in_flight_limit,
            update_per_micro_batch=training.update_per == "micro_batch",
            convergence=Convergence(
                schedule.convergence_constants,
                schedule.convergence_weight,
                math.inf if limit is None else limit,
                scenario.rounds,
            ),
            penalty_weight=schedule.penalty_weight,
            reference_seconds=reference_seconds,
            migration_horizon_rounds=schedule.migration_horizon_rounds,
            round_index=round_index,
        )

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *stream])

    def _host(self, host_id: str, hardware: HardwareConfig, speed: float = 1.0) -> Host:
        scenario = self._scenario
        profile = device_profile(hardware.profile) if hardware.profile else None
        flops = hardware.gigaflops * 1e9 if hardware.gigaflops else 0.0
        overhead, watts = hardware.micro_batch_overhead_seconds, hardware.busy_watts
        memory = None if hardware.memory_gb is None else int(hardware.memory_gb * 1e9)
        if profile is not None:
            flops = flops or profile.flops_per_second
            overhead = profile.seconds_per_micro_batch if overhead is None else overhead
            watts = profile.busy_watts if watts is None else watts
            memory = profile.memory_bytes if memory is None else memory
        return Host(
            host_id,
            seconds_per_sample=self._block_flops / (flops * speed),
            seconds_per_micro_batch=overhead or 0.0,
            memory_bytes=memory,
            base_bytes=int(scenario.training.base_memory_gb * 1e9),
            busy_watts=watts or 0.0,
            energy_budget_joules=hardware.energy_budget_joules,
            max_transmit_watts=hardware.transmit_watts if scenario.channel.kind == "radio" else 0.0,
            weights_bps=scenario.world.weights_bps or math.inf,
        )

    def _now(
        self, host: Host, conditions: ChannelConditions, backlogs: Mapping[str, float]
    ) -> Host:
        slowness = float(conditions.slowness[self._number[host.host_id]])
        return Host(
            host_id=host.host_id,
            seconds_per_sample=host.seconds_per_sample * slowness,
            seconds_per_micro_batch=host.seconds_per_micro_batch * slowness,
            memory_bytes=host.memory_bytes,
            base_bytes=host.base_bytes,
            busy_watts=host.busy_watts,
            energy_budget_joules=host.energy_budget_joules,
            backlog=backlogs.get(host.host_id, 0.0),
            max_transmit_watts=host.max_transmit_watts,
            weights_bps=host.weights_bps,
        )

    def _lay_out(self, rng: np.random.Generator) -> Floats:
        """Links between any two hosts, (n, n): mean gains of radios, or bit/s of wires."""
        channel, size = self._scenario.channel, len(self._number)
        if not isinstance(channel, RadioConfig):
            wanted = channel.rate_bps * channel.spread ** rng.uniform(-1, 1, (size, size))
            return np.asarray(np.triu(wanted, 1) + np.triu(wanted, 1).T)
        origin = np.zeros(2)
        centres = positions_in_disc(rng, len(self._clusters), channel.area_radius_m, origin)
        positions = []
        for centre, hosts in zip(centres, self._clusters, strict=True):
            radius = channel.cluster_radius_m
            positions += [centre, *positions_in_disc(rng, len(hosts) - 1, radius, centre)]
        everyone = np.array([*positions, origin])
        return path_gain(everyone, channel.reference_loss_db, channel.path_loss_exponent)

    def _cluster_links(
        self, cluster: int, conditions: ChannelConditions
    ) -> dict[tuple[str, str], Link]:
        channel = self._scenario.channel
        names = [*(host.host_id for host in self._clusters[cluster]), EDGE_SERVER]
        numbers = [self._number[name] for name in names]
        table = conditions.links[np.ix_(numbers, numbers)].tolist()
        if not isinstance(channel, RadioConfig):
            return {
                (sender, receiver): WiredLink(table[i][j], channel.round_trip_seconds)
                for i, sender in enumerate(names)
                for j, receiver in enumerate(names)
                if i != j
            }
        noise = noise_density(channel.noise_figure_db, channel.temperature_kelvin)
        if channel.interference == "density":
            noise += channel.interference_watts_per_hertz
        floor = (noise + conditions.interference[cluster, numbers]).tolist()
        return {
            (sender, receiver): RadioLink(table[i][j], floor[j], channel.round_trip_seconds)
            for i, sender in enumerate(names)
            for j, receiver in enumerate(names)
            if i != j
        }

    def _shared(self) -> float | None:
        channel = self._scenario.channel
        return channel.bandwidth_hz if isinstance(channel, RadioConfig) else channel.shared_rate_bps

    def _upload_seconds(self) -> float:
        rate = self._scenario.world.upload_bps
        if rate is None:
            return 0.0
        parameters = (
            self.model.state_bytes(0, self.model.num_blocks + 1) / STATE_BYTES_PER_PARAMETER
        )
        return 8 * 4 * parameters / rate


def _spread(rng: np.random.Generator, count: int, most: float) -> list[float]:
    """Factors between 1 / most and most, evenly on a logarithmic scale, then scaled to a mean of 1."""
    factors = most ** rng.uniform(-1, 1, count)
    return [float(factor) for factor in factors / factors.mean()]
