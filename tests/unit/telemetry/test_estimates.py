import json
import math
import random
from dataclasses import asdict, replace

import pytest
from pydantic import TypeAdapter, ValidationError

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
    """Makes one sample per second, the last at `end`; the first value fills up to four samples."""
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
    end_unit_seconds: float = 0.0,
    end: float = END,
) -> list[Series]:
    """Makes the counters of a stage, which grow by the given amounts within a window of four scrapes."""
    grown = {
        "stage_forward_seconds_sum": forward,
        "stage_backward_seconds_sum": backward,
        "stage_backward_seconds_count": micro_batches,
        "stage_block_samples_total": block_samples,
        "stage_end_unit_seconds_total": end_unit_seconds,
        "stage_samples_total": 40.0 * bool(micro_batches),
    }
    labels = {"cluster": cluster, "stage": number}
    return [
        series(instance, name, 512, 512 + by / 2, 512 + by, 512 + by, end=end, **labels)
        for name, by in grown.items()
    ]


def link(seconds: float = 2.0, rate_limit: float | None = None, **codecs: float) -> list[Series]:
    """Makes the counters of the link control-unit>device; `codecs` gives the bytes that arrived by codec."""
    name = "control-unit>device"
    found = [series("b:1", "link_transfer_seconds_total", 64, 64 + seconds, link=name)]
    for codec, count in codecs.items():
        found.append(series("b:1", "link_transfer_bytes_total", 0, count, link=name, codec=codec))
    if rate_limit is not None:
        found.append(series("a:1", "link_rate_limit_bps", rate_limit, rate_limit, link=name))
    return found


def estimated(found: list[Series], **priors: HostPrior) -> Estimates:
    return estimate(found, HOSTS, priors, end=END, max_age_seconds=5.0)


def test_seconds_per_sample_exclude_the_fixed_cost_of_micro_batches() -> None:
    got = estimated(stage(), device=HostPrior(0.05, seconds_per_micro_batch=0.12))
    host = got.hosts["device"]
    assert host.seconds_per_sample == pytest.approx((2 + 4 - 10 * 0.12) / 120)
    assert (host.micro_batches, host.busy_seconds) == (10, 6)
    assert got.rejected == ()


def test_embedding_or_head_is_measured_apart_from_the_blocks_of_its_stage() -> None:
    alone = stage("c:1", "0", "3", block_samples=0, end_unit_seconds=6)
    host = estimated(alone).hosts["edge-server"]
    assert host.seconds_per_sample is None
    assert (host.end_seconds_per_sample, host.micro_batches) == (6 / 40, 10)
    # The second stage runs blocks, too. Its fixed cost of 1.2 s is a fifth of its time.
    prior = HostPrior(0.05, seconds_per_micro_batch=0.12)
    mixed = stage("b:1", "1", "3", end_unit_seconds=1.5)
    host = estimated(mixed, device=prior).hosts["device"]
    assert host.seconds_per_sample == pytest.approx(0.8 * 4.5 / 120)
    assert host.end_seconds_per_sample == pytest.approx(0.8 * 1.5 / 40)


def test_host_of_several_clusters_sums_over_its_stages() -> None:
    both = [
        *stage("c:1", "0", "3"),
        *stage("c:1", "1", "2", forward=1, backward=1, micro_batches=5, block_samples=40),
    ]
    host = estimated(both).hosts["edge-server"]
    assert host.seconds_per_sample == pytest.approx((6 + 2) / (120 + 40))
    assert host.end_seconds_per_sample is None
    assert host.micro_batches == 15


def test_clusters_of_other_jobs_count_for_the_power_of_a_host_only() -> None:
    both = [
        *stage("c:1", "0", "3", block_samples=0, end_unit_seconds=6),
        *stage("c:1", "1", "2", forward=20, backward=20, block_samples=0, end_unit_seconds=40),
        series("c:1", "energy_joules_total", 0, 92, sensor="rapl"),
    ]
    got = estimate(both, HOSTS, {}, end=END, max_age_seconds=5.0, clusters={"0"})
    host = got.hosts["edge-server"]
    assert (host.end_seconds_per_sample, host.micro_batches) == (6 / 40, 10)
    assert (host.busy_seconds, host.busy_watts) == (46, 2)


def test_fixed_cost_above_the_measured_time_leaves_a_small_share_of_the_profile() -> None:
    got = estimated(stage(), device=HostPrior(0.05, seconds_per_micro_batch=1.0))
    assert got.hosts["device"].seconds_per_sample == pytest.approx(0.05 * 0.05)


@pytest.mark.parametrize("factor", [1 / 1001, 1001])
def test_host_a_thousand_times_off_its_profile_is_rejected(factor: float) -> None:
    got = estimated(stage(), device=HostPrior(6 / 120 * factor))
    assert got.hosts["device"].seconds_per_sample is None
    assert got.hosts["device"].micro_batches == 0
    (reason,) = got.rejected
    assert reason.startswith("device: seconds per block and sample: 0.05 is outside of")
    assert "; the profile says" in reason


def test_host_without_a_profile_is_estimated() -> None:
    assert estimated(stage()).hosts["device"].seconds_per_sample == pytest.approx(0.05)


def test_counters_that_do_not_grow_are_no_data() -> None:
    resting = stage(forward=0, backward=0, micro_batches=0, block_samples=0)
    updates = [
        series("b:1", "stage_update_seconds_total", 3, 3, cluster="0", stage="1"),
        series("b:1", "stage_steps_total", 3, 3, cluster="0", stage="1"),
    ]
    got = estimated([*resting, *updates, *link(seconds=0.0, fp32=0.0)])
    assert got.hosts == {"device": HostEstimate()}
    assert got.links == {}
    assert got.rejected == ()


def test_stage_without_one_of_its_counters_is_no_data() -> None:
    got = estimated(stage()[:3])
    assert got.hosts["device"].seconds_per_sample is None


def test_counters_of_a_restarted_process_count_from_zero() -> None:
    labels = {"cluster": "0", "stage": "1"}
    values = {
        "stage_forward_seconds_sum": (90.0, 91.0, 0.0, 1.0),
        "stage_backward_seconds_sum": (90.0, 92.0, 0.0, 2.0),
        "stage_backward_seconds_count": (90.0, 95.0, 0.0, 5.0),
        "stage_block_samples_total": (900.0, 960.0, 0.0, 60.0),
        "stage_end_unit_seconds_total": (0.0, 0.0, 0.0, 0.0),
        "stage_samples_total": (450.0, 480.0, 0.0, 30.0),
    }
    found = [series("b:1", name, *each, **labels) for name, each in values.items()]
    host = estimated(found).hosts["device"]
    assert host.seconds_per_sample == pytest.approx((2 + 4) / 120)
    assert host.micro_batches == 10


@pytest.mark.parametrize("invalid", [math.nan, math.inf, -math.inf, -1.0])
def test_page_with_an_invalid_value_is_left_out_for_its_whole_group(invalid: float) -> None:
    valid = stage()
    damaged = replace(valid[0], points=(*valid[0].points[:-1], (END, invalid)))
    # The others grow on the last page only. It must be left out for them, too.
    late = [replace(one, points=(*one.points[:-1], (END, 1e6))) for one in valid[1:]]
    got = estimated([damaged, *late])
    assert got.hosts["device"].seconds_per_sample == pytest.approx((2 + 4) / 120)
    (reason,) = got.rejected
    assert "device: collapipe_stage_forward_seconds_sum (cluster 0, stage 1) was" in reason
    assert "left out 1 of 4 samples" in reason


def test_counter_without_a_valid_first_page_did_not_begin_at_zero() -> None:
    valid = stage()
    damaged = replace(valid[0], points=((END - 3, math.nan), *valid[0].points[1:]))
    got = estimated([damaged, *valid[1:], series("b:1", "stage_steps_total", 1)])
    assert got.hosts["device"].seconds_per_sample == pytest.approx((1 + 2) / 60)


def test_invalid_value_of_one_group_leaves_the_others() -> None:
    resident = series("b:1", "process_peak_resident_memory_bytes", math.nan, math.nan)
    got = estimated([*stage(), resident])
    assert got.hosts["device"].seconds_per_sample is not None
    assert got.hosts["device"].peak_resident_bytes is None
    assert len(got.rejected) == 1


def test_host_without_fresh_samples_is_missing_and_not_estimated() -> None:
    got = estimated(stage(end=END - 5.5))
    assert got.hosts == {}
    assert got.missing == ("control-unit", "device", "edge-server")
    assert "device" in estimated(stage(end=END - 4.5)).hosts


def test_host_with_only_its_memory_is_not_missing() -> None:
    resident = series("a:1", "process_peak_resident_memory_bytes", 4096.0)
    got = estimated([resident])
    assert got.hosts == {"control-unit": HostEstimate(peak_resident_bytes=4096.0)}
    assert got.missing == ("device", "edge-server")


def test_unknown_instances_are_ignored() -> None:
    assert estimated(stage("other:1")).hosts == {}


def test_seconds_per_step_are_those_of_one_stage() -> None:
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


def test_deferred_share_is_a_part_of_the_compute_time() -> None:
    labels = {"cluster": "0", "stage": "1"}
    deferred = series("b:1", "stage_weight_gradient_seconds_total", 5, 6.5, **labels)
    found = estimated([*stage(), deferred]).hosts["device"]
    assert found.deferred_share == 1.5 / 6
    assert found.seconds_per_sample == estimated(stage()).hosts["device"].seconds_per_sample
    assert estimated(stage()).hosts["device"].deferred_share is None


def test_busy_watts_use_the_sensor_that_covers_most_of_the_device() -> None:
    found = [*stage(), joules("rapl", 30), joules("ina3221", 60)]
    assert estimated(found).hosts["device"].busy_watts == pytest.approx(60 / 6)


def test_sensor_without_energy_is_replaced_by_the_next() -> None:
    found = [*stage(), joules("battery", 0), joules("rapl", 30)]
    assert estimated(found).hosts["device"].busy_watts == pytest.approx(30 / 6)


def test_busy_watts_do_not_use_modelled_energy() -> None:
    found = [*stage(), joules("model", 90)]
    assert estimated(found).hosts["device"].busy_watts is None
    found = [*found, joules("rapl", 30)]
    assert estimated(found).hosts["device"].busy_watts == pytest.approx(30 / 6)


def test_busy_watts_without_a_sensor_or_without_work_are_no_data() -> None:
    assert estimated(stage()).hosts["device"].busy_watts is None
    assert estimated([joules("rapl", 30)]).hosts["device"].busy_watts is None


def test_implausible_busy_watts_are_rejected() -> None:
    got = estimated([*stage(), joules("rapl", 1e9)])
    assert got.hosts["device"].busy_watts is None
    assert got.rejected[0].startswith("device: busy watts by rapl: 1.667e+08 is outside of")


def test_activation_bytes_count_only_stages_that_send_activations() -> None:
    found = []
    for instance, number, passed in (("a:1", "0", 6400), ("b:1", "1", 3200), ("c:1", "2", 0)):
        labels = {"cluster": "1", "stage": number}
        found += [
            series(instance, "stage_activation_bytes_total", 8, 8 + passed, **labels),
            series(instance, "stage_samples_total", 0, passed / 64 or 50, **labels),
        ]
    assert estimated(found).clusters == {"1": ClusterEstimate(64.0, samples=150)}


def test_goodput_is_measured_by_the_receiver_over_all_codecs() -> None:
    got = estimated(link(seconds=2.0, fp32=1e6, int8=5e5))
    assert got.links == {
        "control-unit>device": LinkEstimate(goodput_bps=8 * 1.5e6 / 2, transfer_bytes=1.5e6)
    }


def test_codec_that_a_link_begins_to_use_counts_from_its_first_byte() -> None:
    both = link(seconds=2.0, fp32=1e6, int8=5e5)
    assert dict(both[-1].labels)["codec"] == "int8"
    got = estimated([*both[:-1], replace(both[-1], points=both[-1].points[-1:])])
    assert got.links["control-unit>device"].transfer_bytes == 1.5e6


@pytest.mark.parametrize(
    ("seconds", "limit", "reason"),
    [
        (2.0, 2e6, "4e+06 is outside of 1 to 3e+06; its sender limits itself to 2e+06"),
        (1e-7, None, "8e+13 is outside of 1 to 1e+12"),
        (0.0, None, "inf is outside of 1 to 1e+12"),
        (1e8, None, "0.08 is outside of 1 to 1e+12"),
    ],
)
def test_implausible_goodput_is_rejected(seconds: float, limit: float | None, reason: str) -> None:
    got = estimated(link(seconds, limit, fp32=1e6))
    assert got.rejected == (f"device: bit/s from control-unit: {reason}",)
    found = got.links.get("control-unit>device", LinkEstimate())
    assert (found.goodput_bps, found.transfer_bytes) == (None, 0)


@pytest.mark.parametrize("limit", [3e6, 0.0])
def test_goodput_within_the_senders_limit_or_without_one_is_used(limit: float) -> None:
    got = estimated(link(2.0, limit, fp32=1e6)).links["control-unit>device"]
    assert (got.goodput_bps, got.rate_limit_bps) == (4e6, limit)


def test_gauges_of_a_link_are_the_last_values_of_its_sender() -> None:
    both = {"link": "device>edge-server"}
    gauges = {
        "link_round_trip_seconds": (0.5, 0.25),
        "link_probed_bps": (1e6, 2e6),
        "radio_channel_gain": (1e-9, 1e-10),
        "radio_noise_watts_per_hertz": (4e-21, 8e-21),
        "radio_transmit_power_watts": (0.5, 0.0),
    }
    found = [series("b:1", name, *values, **both) for name, values in gauges.items()]
    # Values of another host and of the receiver are ignored.
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
def test_implausible_gauge_of_a_link_is_rejected(name: str, value: float) -> None:
    got = estimated([series("b:1", name, value, link="device>edge-server")])
    assert got.links == {}
    (reason,) = got.rejected
    assert reason.startswith(f"device: collapipe_{name} (link device>edge-server): {value:.4g}")


def everything() -> list[Series]:
    """Makes series of every kind, with sums whose rounding depends on their order."""
    found = [joules("rapl", 10 / 3), series("b:1", "process_peak_resident_memory_bytes", 5e8)]
    for number in range(7):
        found += stage("c:1", str(number), "3", forward=1 / (3 + number), backward=0.1 * number)
    found += [*stage(), *link(1 / 3, 1e9, fp32=1e6 / 7, int8=1e5 / 3, bf16=1 / 7)]
    found.append(series("a:1", "link_probed_bps", math.nan, link="control-unit>device"))
    return found


def test_order_of_the_series_changes_no_estimate() -> None:
    found = everything()
    expected = estimated(found)
    assert expected.rejected and expected.missing == () and expected.links
    for seed in range(20):
        random.Random(seed).shuffle(found)
        assert estimated(found) == expected


def test_estimates_survive_a_file_to_the_last_bit() -> None:
    expected = estimated([*everything(), *stage("a:1", end=END - 50)])
    for estimates in (expected, estimated(stage())):
        document = json.loads(json.dumps(asdict(estimates)))
        assert TypeAdapter(Estimates).validate_python(document) == estimates


@pytest.mark.parametrize("document", [None, [], {}, {"end": "soon"}, {"end": 1, "other": 2}])
def test_document_of_another_form_is_refused(document: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Estimates).validate_python(document)
