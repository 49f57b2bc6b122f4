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


def test_increase_is_exactly_last_minus_first() -> None:
    values = [0.1, 0.2, 0.3, 0.7, 1.1]
    assert increase(series(*values)) == 1.1 - 0.1
    assert increase(series(values[0], values[-1])) == 1.1 - 0.1


def test_increase_of_a_constant_counter_is_zero() -> None:
    assert increase(series(7.0, 7.0, 7.0)) == 0


@pytest.mark.parametrize(
    ("values", "grown"),
    [
        ((5.0, 8.0, 1.0, 4.0), 3 + 4),
        ((5.0, 8.0, 0.0), 3),
        ((5.0, 2.0, 1.0), 2 + 1),
        ((100.0, 8.0, 9.0, 2.0), 9 + 2),
    ],
)
def test_increase_after_a_reset_counts_from_zero(values: tuple[float, ...], grown: float) -> None:
    assert increase(series(*values)) == grown


@pytest.mark.parametrize("values", [(), (3.0,), (math.nan, 3.0), (math.inf, -1.0, 3.0)])
def test_increase_without_two_valid_samples_is_no_data(values: tuple[float, ...]) -> None:
    assert increase(series(*values)) is None


@pytest.mark.parametrize("invalid", [math.nan, math.inf, -math.inf, -3.0])
def test_increase_ignores_invalid_values(invalid: float) -> None:
    assert increase(series(1.0, invalid, 3.0)) == 2


def test_latest_ignores_samples_of_the_future() -> None:
    assert latest(series(1.0, 2.0, 3.0), now=1.5, max_age=5) == 2


def test_latest_older_than_allowed_is_no_data() -> None:
    assert latest(series(1.0, 2.0, 3.0), now=7.0, max_age=5) == 3
    assert latest(series(1.0, 2.0, 3.0), now=7.1, max_age=5) is None
    assert latest(series(), now=0.0, max_age=5) is None


def test_latest_ignores_invalid_values() -> None:
    assert latest(series(1.0, 2.0, math.nan), now=2.0, max_age=5) == 2


def test_counter_that_appears_within_the_window_has_grown_from_zero() -> None:
    page = series(1.0, 1.0, 1.0, name="resident_bytes")
    late = series(40.0, start=2.0)
    begun = dict(zip(("page", "late"), born_at_zero([page, late]), strict=True))
    assert begun["late"].points == ((1.0, 0.0), (2.0, 40.0))
    assert begun["page"] == page


def test_counter_on_the_first_page_keeps_its_value() -> None:
    both = [series(40.0, 50.0), series(3.0, 4.0, name="y_total")]
    assert born_at_zero(both) == both


def test_gauge_that_appears_within_the_window_gets_no_zero() -> None:
    late = series(40.0, start=2.0, name="bps")
    assert born_at_zero([series(1.0, 1.0, 1.0), late])[1] == late


def test_labels_that_prometheus_adds_are_not_kept() -> None:
    labels = {"__name__": "x", "instance": "h:1", "job": "j", "stage": "2", "cluster": "0"}
    assert kept_labels(labels) == (("cluster", "0"), ("stage", "2"))
