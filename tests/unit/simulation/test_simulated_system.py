from dataclasses import replace

import numpy as np
import pytest

from collapipe.allocation import LinkPlan, RadioLink, WiredLink, decide_round
from collapipe.simulation.scenario import Scenario
from collapipe.simulation.simulated_system import SimulatedSystem
from collapipe.simulation.transformer_costs import TRANSFORMERS

from .scenarios import RADIO, document, scenario


def _two_clusters(**channel: object) -> Scenario:
    clusters = document()["clusters"]
    clusters[0]["count"] = 2
    return scenario(clusters=clusters, channel=RADIO | channel)


def _with_devices(*devices: dict[str, object], **changes: object) -> SimulatedSystem:
    return SimulatedSystem(scenario(clusters=[{"devices": devices}], **changes), 0)


def test_same_seed_gives_the_same_links_and_another_seed_others() -> None:
    first, again, other = (SimulatedSystem(_two_clusters(), seed) for seed in (4, 4, 5))
    assert np.array_equal(first.draw(3).links, again.draw(3).links)
    assert not np.array_equal(first.draw(3).links, other.draw(3).links)
    assert not np.array_equal(first.draw(3).links, first.draw(4).links)


def test_hosts_are_what_the_scenario_says() -> None:
    system = SimulatedSystem(scenario(), 0)
    (cluster,) = system.problem(system.nominal()).clusters
    flops = TRANSFORMERS["bert-base"].block_flops(32)
    assert cluster.devices[1].seconds_per_sample == pytest.approx(flops / 10e9)
    assert cluster.devices[1].busy_watts == 5.0
    assert cluster.devices[1].memory_bytes is None
    assert cluster.micro_batch_options == (2, 4)


def test_given_values_replace_those_of_the_profile() -> None:
    given = {"memory_gb": 1.5, "energy_budget_joules": 3.0, "idle_watts": 2.0}
    system = _with_devices(
        {"profile": "laptop"} | given, {"gigaflops": 10.0, "battery_joules": 60.0}, rounds=3
    )
    first, second = system.devices
    assert (first.memory_bytes, first.energy_budget_joules) == (1_500_000_000, 3.0)
    assert (first.busy_watts, first.idle_watts) == (37.0, 2.0)
    assert second.energy_budget_joules == 20.0
    assert system.batteries == {"device-0-1": 60.0}


def test_spread_of_speeds_keeps_their_mean() -> None:
    system = _with_devices({"gigaflops": 10.0, "count": 8}, world={"speed_spread": 5.0})
    speeds = [1 / device.seconds_per_sample for device in system.devices]
    flops = TRANSFORMERS["bert-base"].block_flops(32)
    assert np.mean(speeds) * flops == pytest.approx(10e9)
    assert max(speeds) > 1.5 * min(speeds)


def test_any_two_hosts_of_a_cluster_have_links_and_hosts_of_two_clusters_none() -> None:
    system = SimulatedSystem(_two_clusters(), 0)
    for index, cluster in enumerate(system.problem(system.nominal()).clusters):
        names = set(cluster.hosts)
        assert set(cluster.links) == {(a, b) for a in names for b in names if a != b}
        assert cluster.channel == f"channel-{index}"
        assert all(isinstance(link, RadioLink) for link in cluster.links.values())


def test_wires_share_nothing_by_default() -> None:
    apart = SimulatedSystem(scenario(), 0)
    problem = apart.problem(apart.nominal())
    assert problem.channels == {}
    assert problem.clusters[0].channel is None
    assert all(link == WiredLink(1e8, 0.001) for link in problem.clusters[0].links.values())
    shared = SimulatedSystem(scenario(channel={"kind": "wire", "shared_rate_bps": 5e7}), 0)
    assert shared.problem(shared.nominal()).channels == {"channel-0": 5e7}


def test_highest_modulation_limits_the_rate_of_near_hosts() -> None:
    system = SimulatedSystem(_two_clusters(most_bits_per_hertz=6.7, efficiency=0.5), 0)
    links = system.problem(system.nominal()).clusters[0].links
    for one in links.values():
        assert one.rate_bps(20e6, 1e3) == pytest.approx(0.5 * 20e6 * 6.7)
        assert one.rate_bps(20e6, 1e-9) < 0.1 * 20e6


def test_interference_between_clusters_grows_with_their_power() -> None:
    system = SimulatedSystem(_two_clusters(interference="clusters"), 0)
    drawn = system.draw(0)
    loud = decide_round(system.problem(drawn, micro_batch_options=(4,)), "pipeline").plans
    quiet = tuple(
        replace(plan, links=tuple(LinkPlan("fp32", link.share, 0.01, 0.01) for link in plan.links))
        for plan in loud
    )
    silent, low, high = (
        system.with_interference(drawn, plans).interference for plans in (None, quiet, loud)
    )
    assert not silent.any()
    assert (low > 0).all()
    assert high == pytest.approx(10 * low)
    known = system.problem(system.with_interference(drawn, loud)).clusters[0].links
    alone = system.problem(drawn).clusters[0].links
    pair = ("device-0-0", "device-0-1")
    assert known[pair].noise_watts_per_hertz > alone[pair].noise_watts_per_hertz  # type: ignore[union-attr]
    apart = SimulatedSystem(_two_clusters(), 0)  # Their bands are separate.
    assert not apart.with_interference(apart.draw(0), loud).interference.any()


def test_telemetry_noise_has_the_given_deviation() -> None:
    devices = {"gigaflops": 10.0, "count": 200}
    noisy = _with_devices(devices, schedule={"telemetry_noise": 0.1})
    drawn = noisy.draw(0)
    known = noisy.as_known(drawn, 0)
    assert np.log(known.slowness / drawn.slowness).std() == pytest.approx(0.1, rel=0.2)
    exact = SimulatedSystem(scenario(), 0)
    assert exact.as_known(exact.draw(0), 0).links is not None
    assert np.array_equal(exact.as_known(exact.draw(0), 0).links, exact.draw(0).links)


def test_rates_of_weights_are_those_of_the_links() -> None:
    apart = SimulatedSystem(scenario(), 0)
    first = apart.problem(apart.nominal(), micro_batch_options=(4,))
    hosts = [first.clusters[0].control_unit, *first.clusters[0].devices]
    # Three hosts send at once, each on its own wire of 100 Mbit/s.
    assert [(host.push_bps, host.fetch_bps) for host in hosts] == [(3e8, 3e8)] * 3
    plans = decide_round(first, "centralized").plans
    alone = apart.problem(apart.nominal(), previous=plans)
    assert alone.clusters[0].control_unit.push_bps == 1e8
    shared = SimulatedSystem(scenario(channel={"kind": "wire", "shared_rate_bps": 5e7}), 0)
    assert shared.problem(shared.nominal()).clusters[0].control_unit.push_bps == 5e7


def test_weights_have_the_whole_radio_channel_at_full_power() -> None:
    system = SimulatedSystem(_two_clusters(fading="none"), 0)
    for cluster in system.problem(system.nominal()).clusters:
        head = cluster.edge_server
        for device in cluster.devices:
            up = cluster.links[device.host_id, head.host_id]
            assert device.push_bps == up.rate_bps(20e6, device.max_transmit_watts)
            down = cluster.links[head.host_id, device.host_id]
            assert device.fetch_bps == down.rate_bps(20e6, head.max_transmit_watts)


def _with_absences(seed: int, **world: float) -> SimulatedSystem:
    clusters = [{"count": 2, "devices": [{"gigaflops": 10.0, "count": 3}]}]
    config = scenario(clusters=clusters, rounds=1000, world={"absence": 0.4} | world)
    return SimulatedSystem(config, seed)


def test_devices_are_away_as_often_and_as_long_as_the_scenario_says() -> None:
    system = _with_absences(0, absence_rounds=4)
    present = np.array([system.draw(index).present for index in range(1000)])
    assert present[:, [0, 4, 8]].all()  # control units and edge server
    clusters = present[:, 1:4], present[:, 5:8]
    assert all(devices.any(axis=1).all() for devices in clusters)
    away = ~np.concatenate(clusters, axis=1)
    # A cluster keeps a device, so a few absences are missing.
    assert away.mean() == pytest.approx(0.4, abs=0.06)
    returns = (away[:-1] & ~away[1:]).sum()
    assert away.sum() / returns == pytest.approx(4, rel=0.15)


def test_absences_depend_on_the_seed_only() -> None:
    first, again, other = (_with_absences(seed).draw(5).present for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert SimulatedSystem(scenario(), 1).draw(0).present.all()


def test_an_absent_device_has_no_part_in_the_problem() -> None:
    system = SimulatedSystem(_two_clusters(), 0)
    gone = system.without(system.draw(0), ["device-0-1"])
    first, second = system.problem(gone).clusters
    assert [device.host_id for device in first.devices] == ["device-0-0"]
    assert not any("device-0-1" in pair for pair in first.links)
    assert len(second.devices) == 2
    assert system.draw(0).present.all()
