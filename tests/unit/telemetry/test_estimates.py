import json
import math
import random
import re
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
from collapipe.telemetry.sources import NEEDED, Series

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
    restarted: bool = False,
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
    found = []
    for name, by in grown.items():
        last = (0, by / 2) if restarted else (512 + by, 512 + by)
        values = (512, 512 + by / 2, *last)
        found.append(series(instance, name, *values, end=end, cluster=cluster, stage=number))
    return found


def link(seconds: float = 2.0, rate_limit: float | None = None, **codecs: float) -> list[Series]:
    """Makes the counters of the link control-unit>device; `codecs` gives the bytes that arrived by codec."""
    name = "control-unit>device"
    found = [series("b:1", "link_transfer_seconds_total", 64, 64 + seconds, link=name)]
    for codec, count in codecs.items():
        found.append(series("b:1", "link_transfer_bytes_total", 0, count, link=name, codec=codec))
    if rate_limit is not None:
        found.append(series("a:1", "link_rate_limit_bps", rate_limit, rate_limit, link=name))
    return found


def joules(sensor: str, used: float) -> Series:
    return series("b:1", "energy_joules_total", 32, 32 + used, sensor=sensor)


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


@pytest.mark.parametrize(
    ("prior", "seconds"),
    [(HostPrior(), 0.05), (HostPrior(0.05, seconds_per_micro_batch=1.0), 0.05 * 0.05)],
    ids=["no profile", "fixed cost above the measured time"],
)
def test_seconds_per_sample_are_at_least_a_small_share_of_the_profile(
    prior: HostPrior, seconds: float
) -> None:
    got = estimated(stage(), device=prior).hosts["device"]
    assert got.seconds_per_sample == pytest.approx(seconds)


@pytest.mark.parametrize("factor", [1 / 1001, 1001])
def test_host_a_thousand_times_off_its_profile_is_rejected(factor: float) -> None:
    got = estimated(stage(), device=HostPrior(6 / 120 * factor))
    assert got.hosts["device"].seconds_per_sample is None
    assert got.hosts["device"].micro_batches == 0
    (reason,) = got.rejected
    assert re.search(rf"device: .* 0\.05 .* {6 / 120 * factor:.4g}$", reason)


def test_counters_that_are_missing_or_do_not_grow_are_no_data() -> None:
    resting = stage(forward=0, backward=0, micro_batches=0, block_samples=0)
    for name in ("update_seconds", "steps"):
        resting.append(series("b:1", f"stage_{name}_total", 3, 3, cluster="0", stage="1"))
    got = estimated([*resting, *link(seconds=0.0, fp32=0.0)])
    assert (got.hosts, got.links, got.rejected) == ({"device": HostEstimate()}, {}, ())
    assert estimated(stage()[:3]).hosts["device"].seconds_per_sample is None


def test_counters_of_a_restarted_process_count_from_zero() -> None:
    expected = estimated(stage()).hosts
    assert expected["device"].seconds_per_sample == pytest.approx((2 + 4) / 120)
    assert estimated(stage(restarted=True)).hosts == expected


@pytest.mark.parametrize("invalid", [math.nan, math.inf, -math.inf, -1.0])
def test_page_with_an_invalid_value_is_left_out_for_its_whole_group(invalid: float) -> None:
    valid = stage()
    damaged = replace(valid[0], points=(*valid[0].points[:-1], (END, invalid)))
    # The others grow on the last page only. It must be left out for them, too.
    late = [replace(one, points=(*one.points[:-1], (END, 1e6))) for one in valid[1:]]
    got = estimated([damaged, *late])
    assert got.hosts["device"].seconds_per_sample == pytest.approx((2 + 4) / 120)
    (reason,) = got.rejected
    assert "device: collapipe_stage_forward_seconds_sum (cluster 0, stage 1)" in reason
    assert "1 of 4 samples" in reason


def test_counter_without_a_valid_first_page_did_not_begin_at_zero() -> None:
    valid = stage()
    damaged = replace(valid[0], points=((END - 3, math.nan), *valid[0].points[1:]))
    got = estimated([damaged, *valid[1:], series("b:1", "stage_steps_total", 1)])
    assert got.hosts["device"].seconds_per_sample == pytest.approx((1 + 2) / 60)


def test_invalid_value_of_one_group_leaves_the_others() -> None:
    resident = series("b:1", "process_peak_resident_memory_bytes", math.nan, math.nan)
    got = estimated([*stage(), resident])
    assert got.hosts == estimated(stage()).hosts
    assert len(got.rejected) == 1


def test_host_without_fresh_samples_is_missing_and_not_estimated() -> None:
    got = estimated([*stage(end=END - 5.5), *stage("other:1")])
    assert got.hosts == {}
    assert got.missing == ("control-unit", "device", "edge-server")
    assert "device" in estimated(stage(end=END - 4.5)).hosts
    got = estimated([series("a:1", "process_peak_resident_memory_bytes", 4096.0)])
    assert got.hosts == {"control-unit": HostEstimate(peak_resident_bytes=4096.0)}
    assert got.missing == ("device", "edge-server")


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


def test_deferred_share_is_a_part_of_the_compute_time() -> None:
    labels = {"cluster": "0", "stage": "1"}
    deferred = series("b:1", "stage_weight_gradient_seconds_total", 5, 6.5, **labels)
    found = estimated([*stage(), deferred]).hosts["device"]
    assert found.deferred_share == 1.5 / 6
    assert found.seconds_per_sample == estimated(stage()).hosts["device"].seconds_per_sample
    assert estimated(stage()).hosts["device"].deferred_share is None


@pytest.mark.parametrize(
    ("sensors", "used"),
    [
        ({"rapl": 30, "ina3221": 60}, 60),  # It covers more of the device.
        ({"battery": 0, "rapl": 30}, 30),
        ({"model": 90, "rapl": 30}, 30),
        ({"model": 90}, None),
        ({}, None),
    ],
)
def test_busy_watts_use_the_best_sensor_with_energy(
    sensors: dict[str, float], used: float | None
) -> None:
    energy = [joules(sensor, each) for sensor, each in sensors.items()]
    expected = None if used is None else pytest.approx(used / 6)
    assert estimated([*stage(), *energy]).hosts["device"].busy_watts == expected
    assert all(host.busy_watts is None for host in estimated(energy).hosts.values())


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
    both = link(seconds=2.0, fp32=1e6, int8=5e5)
    begun = replace(both[-1], points=both[-1].points[-1:])  # It counts from its first byte.
    expected = LinkEstimate(goodput_bps=8 * 1.5e6 / 2, transfer_bytes=1.5e6)
    for found in (both, [*both[:-1], begun]):
        assert estimated(found).links == {"control-unit>device": expected}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (link(2.0, 2e6, fp32=1e6), r"control-unit: 4e\+06 .* 1 to 3e\+06; .* 2e\+06$"),
        (link(1e-7, fp32=1e6), r"control-unit: 8e\+13 .* 1 to 1e\+12$"),
        (link(0.0, fp32=1e6), "control-unit: inf "),
        (link(1e8, fp32=1e6), r"control-unit: 0\.08 "),
        ([series("b:1", "link_probed_bps", 1e13, link="device>c")], r"link_probed_bps .*: 1e\+13 "),
        ([series("b:1", "link_round_trip_seconds", 1e5, link="device>c")], r"trip.*: 1e\+05 "),
        ([*stage(), joules("rapl", 1e9)], r"rapl: 1\.667e\+08 "),
    ],
)
def test_implausible_value_is_rejected(found: list[Series], reason: str) -> None:
    got = estimated(found)
    (rejected,) = got.rejected
    assert re.search(f"device: .*{reason}", rejected)
    assert all(host.busy_watts is None for host in got.hosts.values())
    links = [replace(one, rate_limit_bps=None) for one in got.links.values()]
    assert links in ([], [LinkEstimate()])


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
    for seed in range(8):
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


EXTREMES = (0.0, 5e-324, 1e-300, 1.0, 1e15, 1e300, 1.7e308, math.inf, -math.inf, math.nan, -1.0)


@pytest.mark.parametrize("seed", range(40))
def test_extreme_samples_give_finite_estimates(seed: int) -> None:
    draw = random.Random(seed)

    def value() -> float:
        return draw.choice(EXTREMES) if draw.random() < 0.3 else draw.uniform(0, 100)

    found = []
    for address in ("b:1", "c:1"):
        for name in NEEDED:
            labels = {"cluster": "0", "stage": "1"} if "_stage_" in name else {}
            if "_link_" in name or "_radio_" in name:
                labels = {"link": draw.choice(["device>edge-server", "edge-server>device"])}
            if "_energy_" in name:
                labels = {"sensor": "rapl"}
            values = [value() for _ in range(4)]
            found.append(series(address, name.removeprefix("collapipe_"), *values, **labels))
    got = estimate(found, HOSTS, {"device": HostPrior(0.01)}, end=END, max_age_seconds=4.0)
    json.dumps(asdict(got), allow_nan=False)
    for measured in got.hosts.values():
        assert measured.deferred_share is None or 0 <= measured.deferred_share <= 1


def test_only_some_of_many_invalid_values_are_told() -> None:
    found = [
        series("b:1", "stage_steps_total", math.nan, cluster="0", stage=str(n)) for n in range(5000)
    ]
    got = estimated(found)
    assert len(got.rejected) == 21 and got.rejected[-1].startswith("4980 ")
