"""Raw samples as every source returns them, and the only arithmetic that is done on them.

A source never computes a rate: two that saw the same pages give the same numbers, whoever asks.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

NEEDED = (
    "collapipe_stage_forward_seconds_sum",
    "collapipe_stage_backward_seconds_sum",
    "collapipe_stage_backward_seconds_count",
    "collapipe_stage_block_samples_total",
    "collapipe_stage_samples_total",
    "collapipe_stage_activation_bytes_total",
    "collapipe_stage_steps_total",
    "collapipe_stage_update_seconds_total",
    "collapipe_link_transfer_bytes_total",
    "collapipe_link_transfer_seconds_total",
    "collapipe_link_rate_limit_bps",
    "collapipe_link_round_trip_seconds",
    "collapipe_link_probed_bps",
    "collapipe_radio_channel_gain",
    "collapipe_radio_noise_watts_per_hertz",
    "collapipe_radio_transmit_power_watts",
    "collapipe_energy_joules_total",
    "collapipe_process_peak_resident_memory_bytes",
)
"""Every metric that a decision of the scheduler rests on."""

_LABELS = frozenset({"cluster", "stage", "link", "codec", "sensor"})
_COUNTER_ENDINGS = ("_total", "_sum", "_count")

Labels = tuple[tuple[str, str], ...]
"""Names and values, sorted by name."""


@dataclass(frozen=True)
class Series:
    """One metric of one host under one set of labels, over a window."""

    instance: str
    """Where the host serves /metrics, host:port: what Prometheus writes into the label `instance`."""
    name: str
    labels: Labels
    points: tuple[tuple[float, float], ...]
    """Unix seconds and value of every scrape, in time order, as scraped: values may be lies."""

    @property
    def key(self) -> tuple[str, str, Labels]:
        """What tells it from every other series."""
        return self.instance, self.name, self.labels

    @property
    def is_counter(self) -> bool:
        """Whether it only grows, from 0 when its process starts."""
        return self.name.endswith(_COUNTER_ENDINGS)

    def label(self, name: str) -> str:
        """The value of a label; empty when it has none."""
        return dict(self.labels).get(name, "")


class TelemetrySource(Protocol):
    """Something that keeps what the hosts' /metrics pages said."""

    @property
    def name(self) -> str:
        """As settings, logs and metrics call it."""

    def window(self, start: float, end: float) -> Sequence[Series]:
        """Returns every sample of the metrics in `NEEDED` that was scraped from `start` to `end`.

        Args:
            start: Unix seconds, included.
            end: Unix seconds, included.

        Returns:
            Series with at least one point each. A host that did not answer has a gap or no series at all.

        Raises:
            PeerLostError: The source cannot answer, or not in time.
        """

    def close(self) -> None:
        """Lets go of threads and connections."""


def kept_labels(labels: Mapping[str, str]) -> Labels:
    """Returns the labels that our metrics have themselves; a deployment's Prometheus adds some of its own."""
    return tuple(sorted((name, value) for name, value in labels.items() if name in _LABELS))


def is_sound(value: float) -> bool:
    """Whether a metric in `NEEDED` can have this value: none of them can be negative, infinite or NaN."""
    return math.isfinite(value) and value >= 0


def increase(series: Series, min_samples: int = 2) -> float | None:
    """Returns by how much a counter grew between its first and its last sample.

    It is the sum over the stretches between resets of the process, so that without one it is last minus first, to
    the last bit, however many samples lie between. A value after a reset has grown from 0. Nothing is extrapolated:
    ratios of counters from the same pages are exact. Values that no counter can have are left out.

    Returns:
        `None` when there are fewer than `min_samples` samples: no data is not 0.
    """
    values = [value for _, value in series.points if is_sound(value)]
    if len(values) < max(min_samples, 1):
        return None
    grown, base = 0.0, values[0]
    for before, after in itertools.pairwise(values):
        if after < before:
            grown += before - base
            base = 0.0
    return grown + (values[-1] - base)


def latest(series: Series, now: float, max_age: float) -> float | None:
    """Returns the last value of a gauge; `None` when it is older than `max_age` seconds: stale is not fresh."""
    for moment, value in reversed(series.points):
        if moment < now - max_age:
            return None
        if moment <= now and is_sound(value):
            return value
    return None


def born_at_zero(series: Sequence[Series]) -> list[Series]:
    """Gives counters that appear within the window the 0 that they began at.

    A page shows every series that exists: one that was not on the page before has grown from 0 since. Without that,
    the first values of a codec that a link begins to use would be lost while their seconds count.

    Args:
        series: All series of the hosts, over one window.
    """
    pages: dict[str, set[float]] = {}
    for one in series:
        pages.setdefault(one.instance, set()).update(moment for moment, _ in one.points)
    scrapes = {instance: sorted(moments) for instance, moments in pages.items()}
    begun = []
    for one in series:
        if one.is_counter and one.points:
            born = one.points[0][0]
            earlier = [moment for moment in scrapes[one.instance] if moment < born]
            if earlier:
                one = replace(one, points=((earlier[-1], 0.0), *one.points))
        begun.append(one)
    return begun
