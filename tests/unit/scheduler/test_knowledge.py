import json
import math

import pytest

from collapipe.errors import InvalidInputError
from collapipe.scheduler.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.telemetry.estimates import ClusterEstimate, Estimates, HostEstimate, LinkEstimate

LINK = "device-0>device-1"


def learn(known: Knowledge, share: float = math.inf, **estimates: object) -> Knowledge:
    known.learn(Estimates(end=0.0, **estimates), [], {LINK: share})  # type: ignore[arg-type]
    return known


def seen(seconds: float) -> dict[str, HostEstimate]:
    return {"device-0": HostEstimate(seconds_per_sample=seconds, micro_batches=20)}


def carried(bps: float, **more: float) -> dict[str, LinkEstimate]:
    return {LINK: LinkEstimate(goodput_bps=bps, transfer_bytes=1e6, **more)}


def test_first_measurement_replaces_the_profile() -> None:
    known = Knowledge(hosts={"device-0": HostKnowledge(seconds_per_sample=1.0, origin="profile")})
    learn(known, hosts=seen(1.1))
    assert known.hosts["device-0"] == HostKnowledge(seconds_per_sample=1.1, origin="rounds")


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
    known.charge({"device-0": 5.0}, {"device-0": 2.0})
    assert known.backlogs == {"device-0": 1.5}
    known.charge({}, {"device-0": 2.0})
    assert known.backlogs == {"device-0": 0.5}


def test_device_that_only_a_profile_knows_is_as_much_faster_as_the_others_were() -> None:
    known = Knowledge(
        hosts={
            name: HostKnowledge(
                seconds_per_sample=seconds, origin="profile", profiled_seconds_per_sample=seconds
            )
            for name, seconds in (("device-0", 1.0), ("device-1", 4.0))
        }
    )
    learn(known, hosts=seen(0.5))  # texts are half as long as the profile's
    assert known.hosts["device-1"].seconds_per_sample == 2.0
    assert known.hosts["device-1"].origin == "profile"


def test_idle_device_follows_the_ratio_of_its_profiles() -> None:
    known = Knowledge(
        hosts={
            "device-0": HostKnowledge(
                seconds_per_sample=0.5, origin="rounds", profiled_seconds_per_sample=1.0
            )
        }
    )
    known.learn_idle({"device-0": 1.1}, {})  # noise
    assert known.hosts["device-0"].seconds_per_sample == 0.5
    known.learn_idle({"device-0": 0.25}, {})
    assert known.hosts["device-0"].seconds_per_sample == 0.125


def test_device_that_was_slow_in_use_and_is_profiled_fast_again_is_what_it_was() -> None:
    profiled = HostKnowledge(
        seconds_per_sample=1.0, origin="profile", profiled_seconds_per_sample=2.0
    )
    known = learn(Knowledge(hosts={"device-0": profiled}), hosts=seen(1.0))
    learn(known, hosts=seen(4.0))  # slow, so that no round uses it any more
    known.learn_idle({"device-0": 8.0}, {})
    assert known.hosts["device-0"].seconds_per_sample == pytest.approx(4.0)
    known.learn_idle({"device-0": 2.0}, {})
    assert known.hosts["device-0"].seconds_per_sample == pytest.approx(1.0)


def test_idle_link_is_what_its_last_probe_saw() -> None:
    known = Knowledge(links={LINK: LinkKnowledge(capacity_bps=9e6, gain=1e-9)})
    known.learn_idle({}, {LINK: LinkKnowledge(capacity_bps=2e6, round_trip_seconds=0.01)})
    assert known.links[LINK] == LinkKnowledge(capacity_bps=2e6, round_trip_seconds=0.01, gain=1e-9)


def test_knowledge_survives_a_way_through_a_file() -> None:
    known = learn(Knowledge(), 1e6, hosts=seen(1.0), links=carried(5e5))
    known.learn_round(0.5, 1.0, 1e6)
    stored = json.loads(json.dumps(known.to_json()))
    assert Knowledge.from_json(stored) == known


def test_knowledge_that_is_something_else_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="what was kept of the hosts cannot be used"):
        Knowledge.from_json({"hosts": 3})
