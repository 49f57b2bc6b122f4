import math
from collections.abc import Collection

import pytest

from collapipe.scheduler.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.telemetry.estimates import ClusterEstimate, Estimates, HostEstimate, LinkEstimate

LINK = "device-0>device-1"


def learn(known: Knowledge, share: float = math.inf, **estimates: object) -> Knowledge:
    known.update(Estimates(end=0.0, **estimates), [], {LINK: share})  # type: ignore[arg-type]
    return known


def seen(seconds: float) -> dict[str, HostEstimate]:
    return {"device-0": HostEstimate(seconds_per_sample=seconds, micro_batches=20)}


def carried(bps: float, **more: float) -> dict[str, LinkEstimate]:
    return {LINK: LinkEstimate(goodput_bps=bps, transfer_bytes=1e6, **more)}


def gather(known: Knowledge, *seconds: float) -> None:
    """Lets every device send a megabyte: 8 Mbit."""
    names = [f"device-{k}>control-unit" for k in range(len(seconds))]
    known.update_gather_rates(
        [{name: (1e6, each) for name, each in zip(names, seconds, strict=True)}]
    )


def probe(known: Knowledge, bps: float, working: Collection[str] = ()) -> None:
    link = LinkKnowledge(capacity_bps=bps)
    known.update_unused({}, {"device-0>control-unit": link}, working)


def gathered_at(known: Knowledge, device: int = 0) -> float:
    return known.gather_bps(f"device-{device}", "control-unit")


def probed(bps: float) -> Knowledge:
    link = LinkKnowledge(capacity_bps=bps, probed_bps=bps)
    return Knowledge(links={"device-0>control-unit": link})


def test_first_measurement_replaces_the_profile() -> None:
    known = Knowledge(hosts={"device-0": HostKnowledge(seconds_per_sample=1.0, source="profile")})
    learn(known, hosts=seen(1.1))
    assert known.hosts["device-0"] == HostKnowledge(seconds_per_sample=1.1, source="rounds")


def test_measurements_that_say_about_the_same_are_averaged() -> None:
    known = learn(learn(Knowledge(), hosts=seen(1.0)), hosts=seen(1.2))
    assert known.hosts["device-0"].seconds_per_sample == pytest.approx(1.1)


def test_measurement_of_a_changed_world_is_believed_at_once() -> None:
    known = learn(learn(Knowledge(), hosts=seen(1.0)), hosts=seen(4.0))
    assert known.hosts["device-0"].seconds_per_sample == 4.0


def test_host_that_was_not_seen_keeps_what_is_known() -> None:
    known = learn(learn(Knowledge(), hosts=seen(1.0)), hosts={"device-0": HostEstimate()})
    assert known.hosts["device-0"].seconds_per_sample == 1.0


def test_link_that_delivers_less_than_its_share_is_that_slow() -> None:
    known = learn(Knowledge(links={LINK: LinkKnowledge(capacity_bps=9e6)}), 8e6, links=carried(2e6))
    assert known.links[LINK].capacity_bps == 2e6


def test_link_that_delivers_its_share_may_carry_more() -> None:
    known = learn(Knowledge(links={LINK: LinkKnowledge(capacity_bps=9e6)}), 2e6, links=carried(2e6))
    assert known.links[LINK].capacity_bps == 9e6


def test_link_that_was_slow_once_is_given_more_until_it_is_what_it_was() -> None:
    known = Knowledge(links={LINK: LinkKnowledge(capacity_bps=2e6)})
    learn(known, 2e6, links=carried(2e6))  # restored by now, but held by its share
    assert known.links[LINK].capacity_bps > 2e6


def test_link_measured_on_a_handful_of_bytes_is_not_believed() -> None:
    few = {LINK: LinkEstimate(goodput_bps=1.0, transfer_bytes=100)}
    known = learn(Knowledge(links={LINK: LinkKnowledge(capacity_bps=9e6)}), links=few)
    assert known.links[LINK].capacity_bps == 9e6


def test_radio_that_delivers_half_of_the_formula_has_half_the_efficiency() -> None:
    # 1 MHz at a ratio of signal to noise of 1: 1 Mbit/s
    state = {
        "channel_gain": 1e-9,
        "noise_watts_per_hertz": 1e-16,
        "transmit_power_watts": 0.1,
    }
    known = learn(Knowledge(), 1e6, links=carried(5e5, **state))
    assert known.links[LINK].efficiency == pytest.approx(0.5)
    assert (known.links[LINK].gain, known.links[LINK].noise_watts_per_hertz) == (1e-9, 1e-16)


def test_activations_are_as_large_as_they_were_measured() -> None:
    known = Knowledge(activation_bytes=100.0)
    learn(known, clusters={"0": ClusterEstimate(activation_bytes_per_sample=500.0, samples=10)})
    assert known.activation_bytes == 500.0


def test_queue_grows_beyond_the_budget_and_empties_below() -> None:
    known = Knowledge()
    known.update_backlogs({"device-0": 5.0}, {"device-0": 2.0})
    assert known.backlogs == {"device-0": 1.5}
    known.update_backlogs({}, {"device-0": 2.0})
    assert known.backlogs == {"device-0": 0.5}


def test_device_that_only_a_profile_knows_is_as_much_faster_as_the_others_were() -> None:
    known = Knowledge(
        hosts={
            name: HostKnowledge(
                seconds_per_sample=seconds, source="profile", profiled_seconds_per_sample=seconds
            )
            for name, seconds in (("device-0", 1.0), ("device-1", 4.0))
        }
    )
    learn(known, hosts=seen(0.5))  # texts are half as long as the profile's
    assert known.hosts["device-1"].seconds_per_sample == 2.0
    assert known.hosts["device-1"].source == "profile"


def test_idle_device_follows_the_ratio_of_its_profiles() -> None:
    known = Knowledge(
        hosts={
            "device-0": HostKnowledge(
                seconds_per_sample=0.5, source="rounds", profiled_seconds_per_sample=1.0
            )
        }
    )
    known.update_unused({"device-0": 1.1}, {})  # noise
    assert known.hosts["device-0"].seconds_per_sample == 0.5
    known.update_unused({"device-0": 0.25}, {})
    assert known.hosts["device-0"].seconds_per_sample == 0.125


def test_device_that_was_slow_in_use_and_is_profiled_fast_again_is_what_it_was() -> None:
    profiled = HostKnowledge(
        seconds_per_sample=1.0, source="profile", profiled_seconds_per_sample=2.0
    )
    known = learn(Knowledge(hosts={"device-0": profiled}), hosts=seen(1.0))
    learn(known, hosts=seen(4.0))  # slow, so that no round uses it any more
    known.update_unused({"device-0": 8.0}, {})
    assert known.hosts["device-0"].seconds_per_sample == pytest.approx(4.0)
    known.update_unused({"device-0": 2.0}, {})
    assert known.hosts["device-0"].seconds_per_sample == pytest.approx(1.0)


def test_idle_link_is_what_its_last_probe_saw() -> None:
    known = Knowledge(links={LINK: LinkKnowledge(capacity_bps=9e6, gain=1e-9)})
    known.update_unused({}, {LINK: LinkKnowledge(capacity_bps=2e6, round_trip_seconds=0.01)})
    seen = known.links[LINK]
    assert (seen.capacity_bps, seen.round_trip_seconds, seen.gain) == (2e6, 0.01, 1e-9)


def test_gathering_is_charged_to_who_still_sends() -> None:
    known = Knowledge()
    gather(known, 3.0, 3.0, 3.0)  # they share what the control unit receives: 8 Mbit a second
    assert [gathered_at(known, k) for k in range(3)] == pytest.approx([8e6] * 3)
    gather(known, 101.0, 3.0, 3.0)
    assert gathered_at(known, 0) == pytest.approx(8e6 / 99)
    assert [gathered_at(known, k) for k in (1, 2)] == pytest.approx([8e6] * 2)


def test_device_that_sends_more_is_no_slower_for_it() -> None:
    known = Knowledge()
    known.update_gather_rates([{"a>control-unit": (4e6, 5.0), "b>control-unit": (1e6, 2.0)}])
    assert known.gather_bps("a", "control-unit") == pytest.approx(8e6)
    assert known.gather_bps("b", "control-unit") == pytest.approx(8e6)


def test_device_that_none_was_gathered_from_is_as_good_as_the_best() -> None:
    known = Knowledge()
    assert gathered_at(known) == math.inf
    gather(known, 3.0, 100.0)
    assert gathered_at(known, 7) == pytest.approx(8e6 / 1.5)


def test_narrow_link_of_the_only_device_in_use_is_not_that_of_the_others() -> None:
    known = Knowledge()
    gather(known, 1.0)
    gather(known, 100.0)
    assert gathered_at(known, 0) == pytest.approx(8e4)
    assert gathered_at(known, 1) > 4e6


def test_handful_of_gathered_bytes_is_not_believed() -> None:
    known = Knowledge()
    known.update_gather_rates([{"device-0>control-unit": (100, 3.0)}, {}])
    assert gathered_at(known) == math.inf


@pytest.mark.parametrize("seen_narrow", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
def test_device_is_what_it_was_when_its_link_is_restored(rounds: int, seen_narrow: bool) -> None:
    known = probed(1e8)
    gather(known, 1.0)
    for _ in range(rounds):
        gather(known, 50.0)
    if seen_narrow:
        probe(known, 2e6)
        assert gathered_at(known) == pytest.approx(8e6 / 50)
    known.default_gather_bps = 8e6  # of devices in use meanwhile
    probe(known, 1e8)
    assert gathered_at(known) == pytest.approx(8e6)


def test_device_whose_link_was_narrow_from_the_start_comes_back() -> None:
    known = probed(1e8)  # not yet narrow
    gather(known, 50.0, 1.0)
    probe(known, 2e6)
    narrow = gathered_at(known)
    assert narrow < 2e5
    probe(known, 1e8)
    assert narrow < gathered_at(known) <= known.default_gather_bps


def test_device_that_is_slow_for_another_reason_than_its_link_is_tried_again_once() -> None:
    known = probed(1e8)
    gather(known, 1.0)
    gather(known, 50.0)
    known.default_gather_bps = 8e6
    probe(known, 1e8)
    assert gathered_at(known) > 4e6  # it might be again what it was
    gather(known, 50.0)
    known.default_gather_bps = 8e6
    probe(known, 1e8)
    assert gathered_at(known) == pytest.approx(8e6 / 50)


def test_device_whose_link_widens_while_it_works_is_not_believed_to_widen_again() -> None:
    known = probed(1e8)
    for seconds in (1.0, 50.0, 1.0):
        gather(known, seconds)
    known.default_gather_bps = 1e9
    probe(known, 1e8)
    assert gathered_at(known) == pytest.approx(8e6)


@pytest.mark.parametrize("change", ["noise", "working", "no way through"])
def test_probe_that_says_nothing_new_leaves_the_rate(change: str) -> None:
    known = probed(1e8)
    gather(known, 50.0)
    known.default_gather_bps = 8e6
    probe(
        known,
        {"noise": 1.4e8, "working": 9e8, "no way through": 0.0}[change],
        {"working": ["device-0"]}.get(change, []),
    )
    assert gathered_at(known) == pytest.approx(8e6 / 50)


def test_device_without_a_rate_of_its_own_has_the_default_until_one_is_gathered() -> None:
    link = LinkKnowledge(capacity_bps=1e8)
    known = Knowledge(links={"device-0>control-unit": link}, default_gather_bps=3e6)
    assert gathered_at(known) == 3e6
    gather(known, 50.0)
    probe(known, 2e6)
    probe(known, 1e8)
    assert gathered_at(known) > 1e6
