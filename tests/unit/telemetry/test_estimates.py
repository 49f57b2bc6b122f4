import json
import math
import random
from dataclasses import replace

import pytest

from collapipe.errors import InvalidInputError
from collapipe.telemetry.estimates import (
    ClusterEstimate,
    Estimates,
    HostEstimate,
    HostPrior,
    LinkEstimate,
    estimate,
)
from collapipe.telemetry.sources import Series

END = 1000.0
HOSTS = {"a:1": "control-unit", "b:1": "device", "c:1": "edge-server"}


def series(instance: str, name: str, *values: float, end: float = END, **labels: str) -> Series:
    """One sample a second, the last at `end`; before the values given, 4 samples in all, nothing changed."""
    values = (values[0],) * (4 - len(values)) + values
    start = end - len(values) + 1
    points = tuple((start + second, value) for second, value in enumerate(values))
    return Series(instance, f"collapipe_{name}", tuple(sorted(labels.items())), points)


def stage(
    instance: str = "b:1",
    cluster: str = "0",
    number: str = "1",
    *,
    forward: float = 2.0,
    backward: float = 4.0,
    micro_batches: float = 10.0,
    block_samples: float = 120.0,
    end: float = END,
) -> list[Series]:
    """What a stage did within a window of 4 scrapes, and much before it."""
    grown = {
        "stage_forward_seconds_sum": forward,
        "stage_backward_seconds_sum": backward,
        "stage_backward_seconds_count": micro_batches,
        "stage_block_samples_total": block_samples,
    }
    labels = {"cluster": cluster, "stage": number}
    return [
        series(instance, name, 512, 512 + by / 2, 512 + by, 512 + by, end=end, **labels)
        for name, by in grown.items()
    ]


def link(seconds: float = 2.0, rate_limit: float | None = None, **codecs: float) -> list[Series]:
    """What arrived over control-unit>device, in bytes by codec."""
    name = "control-unit>device"
    found = [series("b:1", "link_transfer_seconds_total", 64, 64 + seconds, link=name)]
    for codec, count in codecs.items():
        found.append(series("b:1", "link_transfer_bytes_total", 0, count, link=name, codec=codec))
    if rate_limit is not None:
        found.append(series("a:1", "link_rate_limit_bps", rate_limit, rate_limit, link=name))
    return found


def estimated(found: list[Series], **priors: HostPrior) -> Estimates:
    return estimate(found, HOSTS, priors, end=END, max_age_seconds=5.0)


def test_seconds_of_a_sample_are_what_is_left_without_the_cost_of_micro_batches() -> None:
    got = estimated(stage(), device=HostPrior(0.05, seconds_per_micro_batch=0.12))
    host = got.hosts["device"]
    assert host.seconds_per_sample == pytest.approx((2 + 4 - 10 * 0.12) / 120)
    assert (host.micro_batches, host.busy_seconds) == (10, 6)
    assert got.rejected == ()


def test_host_of_several_clusters_sums_over_its_stages() -> None:
    both = [
        *stage("c:1", "0", "3"),
        *stage("c:1", "1", "2", forward=1, backward=1, micro_batches=5, block_samples=40),
    ]
    host = estimated(both).hosts["edge-server"]
    assert host.seconds_per_sample == pytest.approx((6 + 2) / (120 + 40))
    assert host.micro_batches == 15


def test_cost_of_micro_batches_beyond_all_time_leaves_a_small_share_of_the_profile() -> None:
    got = estimated(stage(), device=HostPrior(0.05, seconds_per_micro_batch=1.0))
    assert got.hosts["device"].seconds_per_sample == pytest.approx(0.05 * 0.05)


@pytest.mark.parametrize("factor", [1 / 1001, 1001])
def test_host_a_thousand_times_off_its_profile_is_not_believed(factor: float) -> None:
    got = estimated(stage(), device=HostPrior(6 / 120 * factor))
    assert got.hosts["device"].seconds_per_sample is None
    assert got.hosts["device"].micro_batches == 0
    (reason,) = got.rejected
    assert reason.startswith("device: seconds of a sample: 0.05 is not from")
    assert "where the profile says" in reason


def test_host_without_a_profile_is_believed() -> None:
    assert estimated(stage()).hosts["device"].seconds_per_sample == pytest.approx(0.05)


def test_counters_at_rest_are_no_data() -> None:
    resting = stage(forward=0, backward=0, micro_batches=0, block_samples=0)
    updates = [
        series("b:1", "stage_update_seconds_total", 3, 3, cluster="0", stage="1"),
        series("b:1", "stage_steps_total", 3, 3, cluster="0", stage="1"),
    ]
    got = estimated([*resting, *updates, *link(seconds=0.0, fp32=0.0)])
    assert got.hosts == {"device": HostEstimate()}
    assert got.links == {}
    assert got.rejected == ()


def test_stage_whose_page_lacks_a_counter_is_no_data() -> None:
    got = estimated(stage()[:3])
    assert got.hosts["device"].seconds_per_sample is None


def test_process_that_restarted_counts_from_zero() -> None:
    labels = {"cluster": "0", "stage": "1"}
    values = {
        "stage_forward_seconds_sum": (90.0, 91.0, 0.0, 1.0),
        "stage_backward_seconds_sum": (90.0, 92.0, 0.0, 2.0),
        "stage_backward_seconds_count": (90.0, 95.0, 0.0, 5.0),
        "stage_block_samples_total": (900.0, 960.0, 0.0, 60.0),
    }
    found = [series("b:1", name, *each, **labels) for name, each in values.items()]
    host = estimated(found).hosts["device"]
    assert host.seconds_per_sample == pytest.approx((2 + 4) / 120)
    assert host.micro_batches == 10


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf, -1.0])
def test_page_with_a_lie_is_left_out_for_all_that_it_is_put_in_relation_to(lie: float) -> None:
    honest = stage()
    lying = replace(honest[0], points=(*honest[0].points[:-1], (END, lie)))
    # the others have grown on the last page only: taken with the shortened one, they would be off
    late = [replace(one, points=(*one.points[:-1], (END, 1e6))) for one in honest[1:]]
    got = estimated([lying, *late])
    assert got.hosts["device"].seconds_per_sample == pytest.approx((2 + 4) / 120)
    (reason,) = got.rejected
    assert "device: collapipe_stage_forward_seconds_sum (cluster 0, stage 1) was" in reason
    assert "left out 1 of 4 samples" in reason


def test_first_page_with_a_lie_is_no_birth() -> None:
    honest = stage()
    lying = replace(honest[0], points=((END - 3, math.nan), *honest[0].points[1:]))
    got = estimated([lying, *honest[1:], series("b:1", "stage_steps_total", 1)])
    assert got.hosts["device"].seconds_per_sample == pytest.approx((1 + 2) / 60)


def test_lies_about_one_thing_leave_the_rest() -> None:
    resident = series("b:1", "process_peak_resident_memory_bytes", math.nan, math.nan)
    got = estimated([*stage(), resident])
    assert got.hosts["device"].seconds_per_sample is not None
    assert got.hosts["device"].peak_resident_bytes is None
    assert len(got.rejected) == 1


def test_host_that_went_silent_is_missing_and_what_it_said_is_not_used() -> None:
    got = estimated(stage(end=END - 5.5))
    assert got.hosts == {}
    assert got.missing == ("control-unit", "device", "edge-server")
    assert "device" in estimated(stage(end=END - 4.5)).hosts


def test_host_that_reports_nothing_of_use_is_heard() -> None:
    resident = series("a:1", "process_peak_resident_memory_bytes", 4096.0)
    got = estimated([resident])
    assert got.hosts == {"control-unit": HostEstimate(peak_resident_bytes=4096.0)}
    assert got.missing == ("device", "edge-server")


def test_instances_of_nobody_are_passed_over() -> None:
    assert estimated(stage("other:1")).hosts == {}


def test_seconds_of_a_step_are_of_one_stage() -> None:
    found = []
    for number, seconds in (("3", 4.0), ("4", 8.0)):
        labels = {"cluster": "0", "stage": number}
        found += [
            series("c:1", "stage_update_seconds_total", 1, 1 + seconds, **labels),
            series("c:1", "stage_steps_total", 7, 7 + 6, **labels),
        ]
    host = estimated(found).hosts["edge-server"]
    assert (host.step_seconds, host.steps) == (1.0, 12)


def joules(sensor: str, used: float) -> Series:
    return series("b:1", "energy_joules_total", 32, 32 + used, sensor=sensor)


def test_watts_are_energy_over_busy_time_of_the_sensor_that_covers_most() -> None:
    found = [*stage(), joules("rapl", 30), joules("ina3221", 60)]
    assert estimated(found).hosts["device"].busy_watts == pytest.approx(60 / 6)


def test_sensor_that_counts_nothing_gives_way_to_the_next() -> None:
    found = [*stage(), joules("battery", 0), joules("rapl", 30)]
    assert estimated(found).hosts["device"].busy_watts == pytest.approx(30 / 6)


def test_watts_are_not_taken_from_energy_that_was_modelled() -> None:
    found = [*stage(), joules("model", 90)]
    assert estimated(found).hosts["device"].busy_watts is None
    found = [*found, joules("rapl", 30)]
    assert estimated(found).hosts["device"].busy_watts == pytest.approx(30 / 6)


def test_watts_without_a_sensor_or_without_work_are_no_data() -> None:
    assert estimated(stage()).hosts["device"].busy_watts is None
    assert estimated([joules("rapl", 30)]).hosts["device"].busy_watts is None


def test_watts_of_a_power_station_are_not_believed() -> None:
    got = estimated([*stage(), joules("rapl", 1e9)])
    assert got.hosts["device"].busy_watts is None
    assert got.rejected[0].startswith("device: busy watts by rapl: 1.667e+08 is not from")


def test_bytes_of_a_sample_are_of_the_stages_that_pass_something_on() -> None:
    found = []
    for instance, number, passed in (("a:1", "0", 6400), ("b:1", "1", 3200), ("c:1", "2", 0)):
        labels = {"cluster": "1", "stage": number}
        found += [
            series(instance, "stage_activation_bytes_total", 8, 8 + passed, **labels),
            series(instance, "stage_samples_total", 0, passed / 64 or 50, **labels),
        ]
    assert estimated(found).clusters == {"1": ClusterEstimate(64.0, samples=150)}


def test_goodput_is_what_the_receiver_saw_over_all_codecs() -> None:
    got = estimated(link(seconds=2.0, fp32=1e6, int8=5e5))
    assert got.links == {
        "control-unit>device": LinkEstimate(goodput_bps=8 * 1.5e6 / 2, transfer_bytes=1.5e6)
    }


def test_codec_that_a_link_begins_to_use_counts_from_its_first_byte() -> None:
    both = link(seconds=2.0, fp32=1e6, int8=5e5)
    assert both[-1].label("codec") == "int8"
    got = estimated([*both[:-1], replace(both[-1], points=both[-1].points[-1:])])
    assert got.links["control-unit>device"].transfer_bytes == 1.5e6


@pytest.mark.parametrize(
    ("seconds", "limit", "reason"),
    [
        (2.0, 2e6, "4e+06 is not from 1 to 3e+06, for its sender paces at 2e+06"),
        (1e-7, None, "8e+13 is not from 1 to 1e+12"),
        (0.0, None, "inf is not from 1 to 1e+12"),
        (1e8, None, "0.08 is not from 1 to 1e+12"),
    ],
)
def test_goodput_that_cannot_be_is_not_believed(
    seconds: float, limit: float | None, reason: str
) -> None:
    got = estimated(link(seconds, limit, fp32=1e6))
    assert got.rejected == (f"device: bit/s from control-unit: {reason}",)
    believed = got.links.get("control-unit>device", LinkEstimate())
    assert (believed.goodput_bps, believed.transfer_bytes) == (None, 0)


@pytest.mark.parametrize("limit", [3e6, 0.0])
def test_goodput_within_the_senders_limit_or_without_one_is_believed(limit: float) -> None:
    got = estimated(link(2.0, limit, fp32=1e6)).links["control-unit>device"]
    assert (got.goodput_bps, got.rate_limit_bps) == (4e6, limit)


def test_state_of_a_link_is_what_its_sender_said_last() -> None:
    both = {"link": "device>edge-server"}
    gauges = {
        "link_round_trip_seconds": (0.5, 0.25),
        "link_probed_bps": (1e6, 2e6),
        "radio_channel_gain": (1e-9, 1e-10),
        "radio_noise_watts_per_hertz": (4e-21, 8e-21),
        "radio_transmit_power_watts": (0.5, 0.0),
    }
    found = [series("b:1", name, *values, **both) for name, values in gauges.items()]
    # not one of a bystander, nor of the receiver
    found.append(series("a:1", "link_round_trip_seconds", 9.0, **both))
    found.append(series("c:1", "link_round_trip_seconds", 9.0, **both))
    assert estimated(found).links == {
        "device>edge-server": LinkEstimate(
            round_trip_seconds=0.25,
            probed_bps=2e6,
            channel_gain=1e-10,
            noise_watts_per_hertz=8e-21,
            transmit_power_watts=0.0,
        )
    }


@pytest.mark.parametrize(
    ("name", "value"), [("link_round_trip_seconds", 1e5), ("link_probed_bps", 1e13)]
)
def test_state_of_a_link_that_cannot_be_is_not_believed(name: str, value: float) -> None:
    got = estimated([series("b:1", name, value, link="device>edge-server")])
    assert got.links == {}
    (reason,) = got.rejected
    assert reason.startswith(f"device: collapipe_{name} (link device>edge-server): {value:.4g}")


def everything() -> list[Series]:
    """Something of each kind, with sums whose rounding depends on their order."""
    found = [joules("rapl", 10 / 3), series("b:1", "process_peak_resident_memory_bytes", 5e8)]
    for number in range(7):
        found += stage("c:1", str(number), "3", forward=1 / (3 + number), backward=0.1 * number)
    found += [*stage(), *link(1 / 3, 1e9, fp32=1e6 / 7, int8=1e5 / 3, bf16=1 / 7)]
    found.append(series("a:1", "link_probed_bps", math.nan, link="control-unit>device"))
    return found


def test_order_of_the_series_changes_nothing() -> None:
    found = everything()
    expected = estimated(found)
    assert expected.rejected and expected.missing == () and expected.links
    for seed in range(20):
        random.Random(seed).shuffle(found)
        assert estimated(found) == expected


def test_estimates_survive_a_file_to_the_last_bit() -> None:
    expected = estimated([*everything(), *stage("a:1", end=END - 50)])
    assert Estimates.from_json(json.loads(json.dumps(expected.to_json()))) == expected
    missing = estimated(stage())
    assert Estimates.from_json(json.loads(json.dumps(missing.to_json()))) == missing


@pytest.mark.parametrize("document", [None, [], {}, {"end": "soon"}, {"end": 1, "other": 2}])
def test_document_that_is_no_estimates_is_refused(document: object) -> None:
    with pytest.raises(InvalidInputError, match="the stored telemetry cannot be used"):
        Estimates.from_json(document)
