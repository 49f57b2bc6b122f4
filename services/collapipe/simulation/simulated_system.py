"""The simulated hosts and links of one scenario and seed, and their conditions in each round."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from collapipe.allocation.round_model.problem import (
    ClusterProblem,
    Convergence,
    Host,
    Link,
    ModelCost,
    RadioLink,
    RoundPlan,
    RoundProblem,
    WiredLink,
    exchange_bps,
    push_overlap,
)
from collapipe.emulation.device_profiles import device_profile
from collapipe.job import recompute_options
from collapipe.simulation.radio_propagation import (
    Floats,
    interference_density,
    noise_density,
    path_gain,
    positions_in_disc,
    rayleigh_fading,
)
from collapipe.simulation.scenario import HardwareSection, RadioSection, Scenario
from collapipe.simulation.transformer_costs import TRANSFORMERS

EDGE_SERVER = "edge-server"

_Flags = NDArray[np.bool_]

_LAYOUT, _ROUND, _TELEMETRY, _ABSENCE = range(4)
"""Independent streams of random numbers of a seed."""


@dataclass(frozen=True)
class RoundConditions:
    """Speeds, links, interference and presence of hosts in one round.

    Arrays number the hosts cluster by cluster, each control unit before its devices, and the edge server
    last.

    Args:
        slowness: (n,) Factor on the compute time of each host.
        links: (n, n) From sender to receiver: power gains of radios, or rates of wires in bit/s.
        interference: (clusters, n) In W/Hz at each host while it receives for each cluster.
        present: (n,) Which hosts are there. A host that is away has no part in the problem of the round.
    """

    slowness: Floats
    links: Floats
    interference: Floats
    present: _Flags


class SimulatedSystem:
    """The hosts and links of one scenario and seed. The same scenario and seed always give the same system.

    The scenario must have no sweep; see `Scenario.points`.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed
        rng = self._rng(_LAYOUT)
        shape, model = TRANSFORMERS[scenario.model.name], scenario.model
        self.model: ModelCost = replace(
            shape.cost(model.sequence_length, half_blocks=model.half_blocks),
            lossy_uploads=scenario.training.upload_codecs != ["fp32"],
        )
        self._deferred_share = 0.0
        if model.split_backward:
            self._deferred_share = shape.deferred_share(model.sequence_length)
        self._block_flops = shape.block_flops(model.sequence_length) / self.model.period
        kinds = [cluster for cluster in scenario.clusters for _ in range(cluster.count)]
        self._clusters: list[tuple[Host, ...]] = []
        self.batteries: dict[str, float] = {}
        """Capacity in J of each device with a battery."""
        for index, kind in enumerate(kinds):
            devices = [device for device in kind.devices for _ in range(device.count)]
            if scenario.world.shuffle_devices:
                devices = [devices[i] for i in rng.permutation(len(devices))]
            speeds = _speed_factors(rng, len(devices), scenario.world.speed_spread)
            hosts = [self._host(f"control-unit-{index}", scenario.control_unit)]
            for i, (device, speed) in enumerate(zip(devices, speeds, strict=True)):
                host = self._host(f"device-{index}-{i}", device, speed)
                if device.battery_joules is not None:
                    self.batteries[host.host_id] = device.battery_joules
                    host = replace(
                        host, energy_budget_joules=device.battery_joules / scenario.rounds
                    )
                hosts.append(host)
            self._clusters.append(tuple(hosts))
        self._edge_server = self._host(EDGE_SERVER, scenario.edge_server)
        self._number = {host.host_id: i for i, host in enumerate(self.hosts)}
        self._links = self._draw_links(rng)
        self._present = self._draw_presence(self._rng(_ABSENCE))

    @property
    def hosts(self) -> list[Host]:
        """Every host with its nominal speed, in the order of `RoundConditions`."""
        return [*(host for cluster in self._clusters for host in cluster), self._edge_server]

    @property
    def devices(self) -> list[Host]:
        return [device for cluster in self._clusters for device in cluster[1:]]

    def nominal(self) -> RoundConditions:
        """Returns the conditions without anything that changes from round to round."""
        size = len(self._number)
        silent = np.zeros((len(self._clusters), size))
        return RoundConditions(np.ones(size), self._links, silent, np.ones(size, dtype=bool))

    def draw(self, round_index: int) -> RoundConditions:
        """Draws the conditions of a round, without interference between clusters.

        In a round after the last one of the scenario, such as a trial, every device is there.
        """
        rng = self._rng(_ROUND, round_index)
        channel, nominal, size = self._scenario.channel, self.nominal(), len(self._number)
        slowness = np.exp(self._scenario.world.speed_fluctuation * rng.standard_normal(size))
        if isinstance(channel, RadioSection):
            faded = channel.fading == "rayleigh"
            change = rayleigh_fading(rng, size, channel.fading_branches) if faded else 1.0
        else:
            change = np.exp(channel.fluctuation * rng.standard_normal((size, size)))
        drawn = replace(nominal, slowness=slowness, links=nominal.links * change)
        if round_index >= len(self._present):
            return drawn
        return replace(drawn, present=self._present[round_index])

    def without(self, conditions: RoundConditions, host_ids: Iterable[str]) -> RoundConditions:
        """Returns the conditions after hosts have left."""
        present = conditions.present.copy()
        present[[self._number[host_id] for host_id in host_ids]] = False
        return replace(conditions, present=present)

    @property
    def clusters_interfere(self) -> bool:
        """Whether the clusters use the same band, so that each one disturbs the others."""
        channel = self._scenario.channel
        return isinstance(channel, RadioSection) and channel.interference == "clusters"

    def with_interference(
        self, conditions: RoundConditions, plans: RoundPlan | None
    ) -> RoundConditions:
        """Adds the interference that plans cause in other clusters, if `clusters_interfere`."""
        channel = self._scenario.channel
        if plans is None or not self.clusters_interfere:
            return conditions
        assert isinstance(channel, RadioSection)
        radiated = np.zeros((len(plans), len(self._number)))
        for cluster, plan in enumerate(plans):
            for i, link in enumerate(plan.links):
                sender = self._number[plan.stages[i].host_id]
                receiver = self._number[plan.stages[i + 1].host_id]
                radiated[cluster, sender] += channel.duty * link.forward_watts
                radiated[cluster, receiver] += channel.duty * link.backward_watts
        received = interference_density(conditions.links, radiated, channel.bandwidth_hz)
        return replace(conditions, interference=received)

    def as_known(self, conditions: RoundConditions, round_index: int) -> RoundConditions:
        """Returns the conditions as telemetry reports them, with its measurement noise."""
        noise = self._scenario.schedule.telemetry_noise
        if not noise:
            return conditions
        rng = self._rng(_TELEMETRY, round_index)

        def measured(values: Floats) -> Floats:
            return np.asarray(values * np.exp(noise * rng.standard_normal(values.shape)))

        return replace(
            conditions,
            slowness=measured(conditions.slowness),
            links=measured(conditions.links),
        )

    def problem(
        self,
        conditions: RoundConditions,
        *,
        round_index: int = 0,
        previous: RoundPlan | None = None,
        backlogs: Mapping[str, float] | None = None,
        micro_batch_options: tuple[int, ...] | None = None,
        reference_seconds: float = 1.0,
    ) -> RoundProblem:
        """Returns the problem of a round under some conditions.

        Args:
            backlogs: Backlog of each host that has an energy budget. `None` means that no host has a backlog.
            micro_batch_options: Values that M may take. `None` means those of the scenario.
        """
        scenario, channel = self._scenario, self._scenario.channel
        training, schedule = scenario.training, scenario.schedule
        backlogs = backlogs or {}
        edge_server = self._host_now(self._edge_server, conditions, backlogs)
        shared = channel.bandwidth_hz if channel.kind == "radio" else channel.shared_rate_bps
        clusters = []
        for index, everyone in enumerate(self._clusters):
            hosts = [h for h in everyone if conditions.present[self._number[h.host_id]]]
            before = previous[index] if previous else None
            links = self._cluster_links(index, hosts, conditions)
            # Before the first round, all hosts may get equally much.
            overlap = float(len(hosts))
            if before is not None:
                overlap = push_overlap(self.model, links, EDGE_SERVER, before)
            exchange = partial(exchange_bps, overlap=overlap, channel=shared or math.inf)
            control_unit, *devices = (
                replace(
                    self._host_now(host, conditions, backlogs),
                    push_bps=exchange(links[host.host_id, EDGE_SERVER], host),
                    fetch_bps=exchange(links[EDGE_SERVER, host.host_id], edge_server),
                    push_watts=host.max_transmit_watts,
                )
                for host in hosts
            )
            clusters.append(
                ClusterProblem(
                    control_unit=control_unit,
                    devices=tuple(devices),
                    edge_server=edge_server,
                    links=links,
                    micro_batch_options=micro_batch_options or training.micro_batch_options,
                    channel=None if shared is None else f"channel-{index}",
                    previous=before,
                    step_seconds=training.step_seconds,
                    upload_codecs=tuple(training.upload_codecs),
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
            blocks_on_control_unit=schedule.blocks_on_control_unit,
            blocks_on_edge_server=schedule.blocks_on_edge_server,
            recompute_options=recompute_options(scenario.model.recompute),
        )

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *stream])

    def _host(self, host_id: str, hardware: HardwareSection, speed: float = 1.0) -> Host:
        """Returns a host as its section describes it. A value that is not given comes from its profile.

        `speed` is a factor on its operations per second.
        """
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
            deferred_share=self._deferred_share,
            memory_bytes=memory,
            base_bytes=int(scenario.training.base_memory_gb * 1e9),
            busy_watts=watts or 0.0,
            idle_watts=hardware.idle_watts,
            energy_budget_joules=hardware.energy_budget_joules,
            max_transmit_watts=hardware.transmit_watts if scenario.channel.kind == "radio" else 0.0,
        )

    def _host_now(
        self, host: Host, conditions: RoundConditions, backlogs: Mapping[str, float]
    ) -> Host:
        slowness = float(conditions.slowness[self._number[host.host_id]])
        return replace(
            host,
            seconds_per_sample=host.seconds_per_sample * slowness,
            seconds_per_micro_batch=host.seconds_per_micro_batch * slowness,
            backlog=backlogs.get(host.host_id, 0.0),
        )

    def _draw_links(self, rng: np.random.Generator) -> Floats:
        """Draws the links between any two hosts, (n, n): mean gains of radios, or rates of wires in bit/s."""
        channel, size = self._scenario.channel, len(self._number)
        if not isinstance(channel, RadioSection):
            rates = channel.rate_bps * channel.spread ** rng.uniform(-1, 1, (size, size))
            return np.asarray(np.triu(rates, 1) + np.triu(rates, 1).T)
        origin = np.zeros(2)
        centres = positions_in_disc(rng, len(self._clusters), channel.area_radius_m, origin)
        positions = []
        for centre, hosts in zip(centres, self._clusters, strict=True):
            radius = channel.cluster_radius_m
            positions += [centre, *positions_in_disc(rng, len(hosts) - 1, radius, centre)]
        positions.append(origin)  # the edge server
        gains = path_gain(
            np.array(positions), channel.reference_loss_db, channel.path_loss_exponent
        )
        if channel.shadowing_db:
            shadows = np.triu(rng.normal(0.0, channel.shadowing_db, (size, size)), 1)
            gains = gains * 10 ** ((shadows + shadows.T) / 10)
        return gains

    def _draw_presence(self, rng: np.random.Generator) -> _Flags:
        """Draws which hosts are there, (rounds, n): a Markov chain of each device, which starts in its steady state."""
        world, rounds, size = self._scenario.world, self._scenario.rounds, len(self._number)
        present = np.ones((rounds, size), dtype=bool)
        for hosts in self._clusters if world.absence else ():
            numbers = [self._number[device.host_id] for device in hosts[1:]]
            away = rng.random(len(numbers)) < world.absence
            for here in present:
                if away.all():
                    away[rng.integers(len(numbers))] = False
                here[numbers] = ~away
                drawn = rng.random(len(numbers))
                away = np.where(away, drawn >= 1 / world.absence_rounds, drawn < world.leaving)
        return present

    def _cluster_links(
        self, cluster: int, hosts: Sequence[Host], conditions: RoundConditions
    ) -> dict[tuple[str, str], Link]:
        channel = self._scenario.channel
        names = [*(host.host_id for host in hosts), EDGE_SERVER]
        numbers = [self._number[name] for name in names]
        table = conditions.links[np.ix_(numbers, numbers)].tolist()
        pairs = list(itertools.permutations(range(len(names)), 2))
        if not isinstance(channel, RadioSection):
            return {
                (names[i], names[j]): WiredLink(table[i][j], channel.round_trip_seconds)
                for i, j in pairs
            }
        noise = noise_density(channel.noise_figure_db, channel.temperature_kelvin)
        if channel.interference == "density":
            noise += channel.interference_watts_per_hertz
        density = (noise + conditions.interference[cluster, numbers]).tolist()
        return {
            (names[i], names[j]): RadioLink(
                table[i][j],
                density[j],
                channel.round_trip_seconds,
                channel.efficiency,
                channel.most_bits_per_hertz or math.inf,
            )
            for i, j in pairs
        }


def _speed_factors(rng: np.random.Generator, count: int, spread: float) -> list[float]:
    """Draws log-uniform factors from 1 / spread to spread, and scales them to a mean of 1."""
    factors = spread ** rng.uniform(-1, 1, count)
    return [float(factor) for factor in factors / factors.mean()]
