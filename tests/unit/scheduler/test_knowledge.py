import math
from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import pytest

from collapipe.allocation import ClusterPlan, LinkPlan, StagePlan
from collapipe.scheduler.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.telemetry.estimates import ClusterEstimate, Estimates, HostEstimate, LinkEstimate

LINK = "device-0>device-1"


def learn(known: Knowledge, share: float = math.inf, **estimates: object) -> Knowledge:
    known.update(Estimates(end=0.0, **estimates), [], {LINK: share})  # type: ignore[arg-type]
    return known


def seen(seconds: float, micro_batches: float = 20) -> dict[str, HostEstimate]:
    return {"device-0": HostEstimate(seconds_per_sample=seconds, micro_batches=micro_batches)}


def carried(bps: float, **more: float) -> dict[str, LinkEstimate]:
    return {LINK: LinkEstimate(goodput_bps=bps, transfer_bytes=1e6, **more)}


def push(known: Knowledge, *seconds: float) -> None:
    """Each device pushes 8 Mbit. `seconds` are the times from the common start to each end."""
    names = [f"device-{k}>edge-server" for k in range(len(seconds))]
    known.update_weights_rates(
        {name: (1e6, each) for name, each in zip(names, seconds, strict=True)}
    )


def probe(known: Knowledge, bps: float, working: Collection[str] = ("edge-server",)) -> None:
    link = LinkKnowledge(capacity_bps=bps)
    known.update_idle({}, {"device-0>edge-server": link}, working)


def push_bps(known: Knowledge, device: int = 0) -> float | None:
    link = known.links.get(f"device-{device}>edge-server")
    return link.weights_bps if link else None


def probed(bps: float) -> Knowledge:
    link = LinkKnowledge(capacity_bps=bps, probed_bps=bps)
    return Knowledge(links={"device-0>edge-server": link})


def test_first_measurement_replaces_the_profile() -> None:
    known = Knowledge(hosts={"device-0": HostKnowledge(seconds_per_sample=1.0, source="profile")})
    learn(known, hosts=seen(1.1))
    assert known.hosts["device-0"] == HostKnowledge(seconds_per_sample=1.1, source="rounds")


@pytest.mark.parametrize(("source", "expected"), [("guess", 1.1), ("profile", 1.0)])
def test_single_micro_batch_replaces_only_a_guess(
    source: Literal["guess", "profile"], expected: float
) -> None:
    known = Knowledge(hosts={"device-0": HostKnowledge(seconds_per_sample=1.0, source=source)})
    learn(known, hosts=seen(1.1, micro_batches=1))
    assert known.hosts["device-0"].seconds_per_sample == expected


def test_time_of_half_blocks_is_divided_by_their_work() -> None:
    # The device ran blocks 1 to 3, so a feed-forward network, an attention and a feed-forward network.
    known = Knowledge(work_shares=[0.6, 1.4])
    stages = (("control-unit", 0, 1), ("other", 1, 2), ("device-0", 2, 5), ("edge-server", 5, 6))
    plan = ClusterPlan(tuple(StagePlan(*stage, 1) for stage in stages), 1, (LinkPlan(),) * 3)
    same = {host_id: seen(1.0)["device-0"] for host_id, _, _ in stages}
    known.update(Estimates(end=0.0, hosts=same), [plan], {})
    found = {host_id: host.seconds_per_sample for host_id, host in known.hosts.items()}
    expected = {"control-unit": 1, "other": 1 / 0.6, "device-0": 3 / 3.4, "edge-server": 1}
    assert found == pytest.approx(expected)


def test_times_of_a_stage_that_recomputes_are_those_without_recomputation() -> None:
    known = Knowledge()
    stages = (StagePlan("device-0", 0, 3, 1, recompute=True), StagePlan("edge-server", 3, 5, 1))
    measured = HostEstimate(4.0, 2.0, deferred_share=0.25, micro_batches=10)
    hosts = {stage.host_id: measured for stage in stages}
    known.update(Estimates(end=0.0, hosts=hosts), [ClusterPlan(stages, 1, (LinkPlan(),))], {})
    found = [known.hosts[stage.host_id] for stage in stages]
    assert [host.seconds_per_sample for host in found] == pytest.approx([3.0, 4.0])
    assert [host.end_seconds_per_sample for host in found] == pytest.approx([1.5, 2.0])
    assert [host.deferred_share for host in found] == pytest.approx([1 / 3, 0.25])


def test_deferred_share_is_averaged_and_stays_without_a_measurement() -> None:
    known = Knowledge(hosts={"device-0": HostKnowledge(seconds_per_sample=1.0)})
    for share in (0.3, 0.32, None):
        learn(known, hosts={"device-0": HostEstimate(deferred_share=share)})
    assert known.hosts["device-0"].deferred_share == pytest.approx(0.31)


def test_similar_measurements_are_averaged() -> None:
    known = learn(learn(Knowledge(), hosts=seen(1.0)), hosts=seen(1.2))
    assert known.hosts["device-0"].seconds_per_sample == pytest.approx(1.1)


def test_very_different_measurement_replaces_the_average() -> None:
    known = learn(learn(Knowledge(), hosts=seen(1.0)), hosts=seen(4.0))
    assert known.hosts["device-0"].seconds_per_sample == 4.0


def test_block_time_of_a_host_without_blocks_follows_its_embedding() -> None:
    known = Knowledge(hosts={"control-unit": HostKnowledge(seconds_per_sample=2.0)})
    for seconds in (0.1, 0.4):
        alone = HostEstimate(end_seconds_per_sample=seconds, micro_batches=10)
        learn(known, hosts={"control-unit": alone})
    host = known.hosts["control-unit"]
    assert (host.seconds_per_sample, host.end_seconds_per_sample) == (8.0, 0.4)
    embedding, head = StagePlan("control-unit", 0, 1, 1), StagePlan("edge-server", 3, 4, 1)
    plan = ClusterPlan((embedding, StagePlan("device-0", 1, 3, 1), head), 1, (LinkPlan(),) * 2)
    known.hosts["edge-server"] = HostKnowledge(end_seconds_per_sample=0.1)
    assert not known.has_measured([plan])
    known.hosts["device-0"] = HostKnowledge(seconds_per_sample=1.0, source="rounds")
    assert known.has_measured([plan])
    # No round has measured the blocks of the control unit yet.
    with_blocks = (replace(embedding, stop_unit=2), StagePlan("device-0", 2, 3, 1), head)
    assert not known.has_measured([replace(plan, stages=with_blocks)])
    both = HostEstimate(seconds_per_sample=5.0, end_seconds_per_sample=0.4, micro_batches=10)
    learn(known, hosts={"control-unit": both})
    assert host.seconds_per_sample == 5.0


def test_host_without_a_measurement_keeps_its_value() -> None:
    known = learn(learn(Knowledge(), hosts=seen(1.0)), hosts={"device-0": HostEstimate()})
    assert known.hosts["device-0"].seconds_per_sample == 1.0


def test_link_that_delivers_less_than_its_share_has_that_capacity() -> None:
    known = learn(Knowledge(links={LINK: LinkKnowledge(capacity_bps=9e6)}), 8e6, links=carried(2e6))
    assert known.links[LINK].capacity_bps == 2e6


def test_link_that_delivers_its_share_keeps_a_higher_capacity() -> None:
    known = learn(Knowledge(links={LINK: LinkKnowledge(capacity_bps=9e6)}), 2e6, links=carried(2e6))
    assert known.links[LINK].capacity_bps == 9e6


def test_capacity_of_a_link_limited_by_its_share_grows_so_that_it_is_tested() -> None:
    known = Knowledge(links={LINK: LinkKnowledge(capacity_bps=2e6)})
    learn(known, 2e6, links=carried(2e6))  # the link is fast again, but its share limits it
    assert known.links[LINK].capacity_bps > 2e6


def test_rate_measured_on_a_few_bytes_is_ignored() -> None:
    few = {LINK: LinkEstimate(goodput_bps=1.0, transfer_bytes=100)}
    known = learn(Knowledge(links={LINK: LinkKnowledge(capacity_bps=9e6)}), links=few)
    assert known.links[LINK].capacity_bps == 9e6


def test_radio_that_delivers_half_of_the_formula_has_half_the_efficiency() -> None:
    # With a signal-to-noise ratio of 1, a bandwidth of 1 MHz gives 1 Mbit/s.
    state = {
        "channel_gain": 1e-9,
        "noise_watts_per_hertz": 1e-16,
        "transmit_power_watts": 0.1,
    }
    known = learn(Knowledge(), 1e6, links=carried(5e5, **state))
    assert known.links[LINK].efficiency == pytest.approx(0.5)
    assert (known.links[LINK].gain, known.links[LINK].noise_watts_per_hertz) == (1e-9, 1e-16)


def test_measured_size_of_activations_replaces_the_guess() -> None:
    known = Knowledge(activation_bytes=100.0)
    learn(known, clusters={"0": ClusterEstimate(activation_bytes_per_sample=500.0, samples=10)})
    assert known.activation_bytes == 500.0


def test_energy_queue_grows_above_the_budget_and_shrinks_below_it() -> None:
    known = Knowledge()
    known.update_backlogs({"device-0": 5.0}, {"device-0": 2.0})
    assert known.backlogs == {"device-0": 1.5}
    known.update_backlogs({}, {"device-0": 2.0})
    assert known.backlogs == {"device-0": 0.5}


def test_profile_of_an_unused_device_is_scaled_by_the_ratio_of_the_others() -> None:
    known = Knowledge(
        hosts={
            name: HostKnowledge(
                seconds_per_sample=seconds, source="profile", profiled_seconds_per_sample=seconds
            )
            for name, seconds in (("device-0", 1.0), ("device-1", 4.0))
        }
    )
    learn(known, hosts=seen(0.5))  # the texts are half as long as those of the profile
    assert known.hosts["device-1"].seconds_per_sample == 2.0
    assert known.hosts["device-1"].source == "profile"


def test_unused_device_changes_by_the_ratio_of_its_profiles() -> None:
    known = Knowledge(
        hosts={
            "device-0": HostKnowledge(
                seconds_per_sample=0.5, source="rounds", profiled_seconds_per_sample=1.0
            )
        }
    )
    known.update_idle({"device-0": 1.1}, {})  # this difference is noise
    assert known.hosts["device-0"].seconds_per_sample == 0.5
    known.update_idle({"device-0": 0.25}, {})
    assert known.hosts["device-0"].seconds_per_sample == 0.125


def test_device_that_slowed_down_in_use_recovers_when_its_profile_does() -> None:
    profiled = HostKnowledge(
        seconds_per_sample=1.0, source="profile", profiled_seconds_per_sample=2.0
    )
    known = learn(Knowledge(hosts={"device-0": profiled}), hosts=seen(1.0))
    learn(known, hosts=seen(4.0))  # it is so slow now that no round uses it
    known.update_idle({"device-0": 8.0}, {})
    assert known.hosts["device-0"].seconds_per_sample == pytest.approx(4.0)
    known.update_idle({"device-0": 2.0}, {})
    assert known.hosts["device-0"].seconds_per_sample == pytest.approx(1.0)


def test_unused_link_has_the_rate_of_its_last_probe() -> None:
    known = Knowledge(links={LINK: LinkKnowledge(capacity_bps=9e6, gain=1e-9)})
    known.update_idle({}, {LINK: LinkKnowledge(capacity_bps=2e6, round_trip_seconds=0.01)})
    seen = known.links[LINK]
    assert (seen.capacity_bps, seen.round_trip_seconds, seen.gain) == (2e6, 0.01, 1e-9)


def test_pushing_time_is_divided_among_the_hosts_that_still_send() -> None:
    known = Knowledge()
    push(known, 3.0, 3.0, 3.0)  # together they send at 8 Mbit/s
    assert [push_bps(known, k) for k in range(3)] == pytest.approx([8e6] * 3)
    push(known, 101.0, 3.0, 3.0)
    assert push_bps(known, 0) == pytest.approx(8e6 / 99)
    assert [push_bps(known, k) for k in (1, 2)] == pytest.approx([8e6] * 2)


def test_host_that_sends_more_bytes_gets_no_lower_rate() -> None:
    known = Knowledge()
    known.update_weights_rates({"a>edge-server": (4e6, 5.0), "b>edge-server": (1e6, 2.0)})
    assert known.links["a>edge-server"].weights_bps == pytest.approx(8e6)
    assert known.links["b>edge-server"].weights_bps == pytest.approx(8e6)


def test_transfer_of_a_few_bytes_is_ignored() -> None:
    known = Knowledge()
    known.update_weights_rates({"device-0>edge-server": (100, 3.0)})
    assert push_bps(known) is None


@pytest.mark.parametrize("probed_while_slow", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
def test_rate_of_weights_is_forgotten_when_the_link_is_restored(
    rounds: int, probed_while_slow: bool
) -> None:
    known = probed(1e8)
    push(known, 1.0)
    for _ in range(rounds):
        push(known, 50.0)
    if probed_while_slow:
        probe(known, 2e6)
        assert push_bps(known) == pytest.approx(8e6 / 50)
    probe(known, 1e8)
    assert push_bps(known) is None  # the link is measured again


def test_rate_of_weights_on_a_link_that_was_slow_from_the_start_is_forgotten() -> None:
    known = probed(1e8)  # the probe ran before the link became slow
    push(known, 50.0, 1.0)
    probe(known, 2e6)
    assert push_bps(known) < 2e5  # type: ignore[operator]
    probe(known, 1e8)
    assert push_bps(known) is None


def test_device_that_is_slow_for_another_reason_is_tried_again_only_once() -> None:
    known = probed(1e8)
    push(known, 1.0)
    push(known, 50.0)
    probe(known, 1e8)
    assert push_bps(known) is None  # it may be fast again
    push(known, 50.0)
    probe(known, 1e8)
    assert push_bps(known) == pytest.approx(8e6 / 50)


def test_link_that_became_faster_while_in_use_keeps_its_rate() -> None:
    known = probed(1e8)
    for seconds in (1.0, 50.0, 1.0):
        push(known, seconds)
    probe(known, 1e8)
    assert push_bps(known) == pytest.approx(8e6)


@pytest.mark.parametrize("change", ["noise", "working", "failed probe"])
def test_probe_without_new_information_leaves_the_rate_of_weights(change: str) -> None:
    known = probed(1e8)
    push(known, 50.0)
    probe(
        known,
        {"noise": 1.4e8, "working": 9e8, "failed probe": 0.0}[change],
        {"working": ["device-0", "edge-server"]}.get(change, ["edge-server"]),
    )
    assert push_bps(known) == pytest.approx(8e6 / 50)


def test_much_smaller_transfer_does_not_change_the_rate_of_weights() -> None:
    known = Knowledge()
    for num_bytes, seconds, expected in (
        (1_000_000, 1.0, 8e6),
        (49_999, 0.5, 8e6),  # With LoRA, later rounds move little, and its fixed costs count.
        (50_000, 0.5, 8e5),
    ):
        known.update_weights_rates({"a>b": (num_bytes, seconds)})
        assert known.links["a>b"].weights_bps == pytest.approx(expected)
