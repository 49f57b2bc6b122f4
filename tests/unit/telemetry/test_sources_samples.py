import math

import pytest
from prometheus_client import REGISTRY

from collapipe.telemetry import metrics
from collapipe.telemetry.sources import NEEDED, Series
from collapipe.telemetry.sources.samples import born_at_zero, increase, kept_labels, latest


def series(*values: float, name: str = "x_total", start: float = 0.0) -> Series:
    points = tuple((start + second, value) for second, value in enumerate(values))
    return Series("host:1", name, (), points)


def test_hosts_export_every_needed_metric() -> None:
    metrics.create_stage_series("90", "1")
    metrics.LINK_TRANSFER_BYTES.labels("a>b", "fp32")
    for by_link in (
        metrics.LINK_TRANSFER_SECONDS,
        metrics.LINK_RATE_LIMIT_BPS,
        metrics.LINK_ROUND_TRIP_SECONDS,
        metrics.LINK_PROBED_BPS,
        metrics.RADIO_CHANNEL_GAIN,
        metrics.RADIO_NOISE_WATTS_PER_HERTZ,
        metrics.RADIO_TRANSMIT_POWER_WATTS,
    ):
        by_link.labels("a>b")
    metrics.ENERGY_JOULES.labels("test")
    exported = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    assert set(NEEDED) <= exported


@pytest.mark.parametrize(
    ("values", "grown"),
    [
        ((0.1, 0.2, 0.3, 0.7, 1.1), 1.1 - 0.1),  # to the last bit
        ((7.0, 7.0, 7.0), 0),
        # After a reset, it counts from zero.
        ((5.0, 8.0, 1.0, 4.0), 3 + 4),
        ((5.0, 8.0, 0.0), 3),
        ((5.0, 2.0, 1.0), 2 + 1),
        ((100.0, 8.0, 9.0, 2.0), 9 + 2),
        # Invalid values are ignored.
        *(((1.0, invalid, 3.0), 2) for invalid in (math.nan, math.inf, -math.inf, -3.0)),
        *((values, None) for values in ((), (3.0,), (math.nan, 3.0), (math.inf, -1.0, 3.0))),
    ],
)
def test_increase_is_what_a_counter_grew_by(values: tuple[float, ...], grown: float | None) -> None:
    assert increase(series(*values)) == grown


@pytest.mark.parametrize(
    ("values", "now", "expected"),
    [
        ((1.0, 2.0, 3.0), 1.5, 2),  # The last sample is in the future.
        ((1.0, 2.0, 3.0), 7.0, 3),
        ((1.0, 2.0, 3.0), 7.1, None),
        ((), 0.0, None),
        ((1.0, 2.0, math.nan), 2.0, 2),
    ],
)
def test_latest_is_the_last_valid_value_that_is_fresh(
    values: tuple[float, ...], now: float, expected: float | None
) -> None:
    assert latest(series(*values), now=now, max_age=5) == expected


def test_counter_that_appears_within_the_window_has_grown_from_zero() -> None:
    page = series(1.0, 1.0, 1.0, name="resident_bytes")
    late, gauge = series(40.0, start=2.0), series(40.0, start=2.0, name="bps")
    assert born_at_zero([page, late, gauge]) == [page, series(0.0, 40.0, start=1.0), gauge]
    first = [series(40.0, 50.0), series(3.0, 4.0, name="y_total")]
    assert born_at_zero(first) == first


def test_labels_that_prometheus_adds_are_not_kept() -> None:
    labels = {"__name__": "x", "instance": "h:1", "job": "j", "stage": "2", "cluster": "0"}
    assert kept_labels(labels) == (("cluster", "0"), ("stage", "2"))
