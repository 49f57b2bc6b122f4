"""Raw samples, as every telemetry source returns them, and the arithmetic on them.

A source never computes rates, so that two sources that read the same pages return the same numbers.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

BUSY = (
    "collapipe_stage_forward_seconds_sum",
    "collapipe_stage_backward_seconds_sum",
    "collapipe_stage_update_seconds_total",
)
"""The metrics of the seconds in which a stage computes."""

NEEDED = (
    "collapipe_stage_forward_seconds_sum",
    "collapipe_stage_backward_seconds_sum",
    "collapipe_stage_backward_seconds_count",
    "collapipe_stage_weight_gradient_seconds_total",
    "collapipe_stage_block_samples_total",
    "collapipe_stage_end_unit_seconds_total",
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
    "collapipe_emulation_overrun_seconds_total",
    "collapipe_energy_joules_total",
    "collapipe_process_peak_resident_memory_bytes",
)
"""Every metric that the estimates, the page and the warnings of the scheduler use."""

_LABELS = frozenset({"cluster", "stage", "link", "codec", "sensor"})
MOST = 1e18
"""No metric of a real host is larger. Sums and ratios of a few such values are finite."""
_COUNTER_ENDINGS = ("_total", "_sum", "_count")

Labels = tuple[tuple[str, str], ...]
"""Names and values, sorted by name."""


@dataclass(frozen=True)
class Series:
    """The samples of one metric of one host, with one set of labels, over a window."""

    instance: str
    """Address of the host, "host:port": `TelemetrySource.instance_field` says which one."""
    name: str
    labels: Labels
    points: tuple[tuple[float, float], ...]
    """Time in Unix seconds and value of every scrape, in order of time. The values are not checked."""
    may_be_born: bool = True
    """False if earlier samples may have been left out. Then the metric has not grown from 0."""

    @property
    def key(self) -> tuple[str, str, Labels]:
        """Identifies the series."""
        return self.instance, self.name, self.labels

    @property
    def is_counter(self) -> bool:
        """Whether its value begins at 0 with its process, and only grows."""
        return self.name.endswith(_COUNTER_ENDINGS)


class TelemetrySource(Protocol):
    """Something that keeps samples of the metrics of hosts."""

    @property
    def name(self) -> str:
        """Name in settings, logs and metrics."""

    @property
    def instance_field(self) -> str:
        """The field of a registered host with the address that is the `instance` of its series."""

    @property
    def max_gap_seconds(self) -> float:
        """Longest time between two samples of a host that answers; 0 if the source never skips a scrape."""

    @property
    def pass_seconds(self) -> float:
        """Time in which the source scrapes all hosts once, if they are many; else less than the interval."""

    def now(self) -> float:
        """Returns the present time on the clock of the samples, in Unix seconds."""

    def window(self, start: float, end: float) -> Sequence[Series]:
        """Returns every sample of the metrics in `NEEDED` from `start` to `end`, by the clock of `now`, both included.

        Each series has at least one point. A host that did not answer has a gap or no series.

        Raises:
            PeerLostError: The source cannot answer, or not in time.
        """

    def close(self) -> None:
        """Ends threads and connections."""


def kept_labels(labels: Mapping[str, str]) -> Labels:
    """Returns the labels that the services set, without those that a Prometheus server adds."""
    return tuple(sorted((name, value) for name, value in labels.items() if name in _LABELS))


def is_sound(value: float) -> bool:
    """Returns whether a metric in `NEEDED` can have this value."""
    return 0 <= value <= MOST


def increase(series: Series) -> float | None:
    """Returns by how much a counter grew within the window; `None` with fewer than two samples.

    Without a restart of the process, this is exactly the last value minus the first, for any number of
    samples between. After a restart, a counter grows from 0. Nothing is extrapolated, so ratios of counters
    of the same pages are exact. Invalid values are ignored.
    """
    values = [value for _, value in series.points if is_sound(value)]
    if len(values) < 2:
        return None
    grown, base = 0.0, values[0]
    for before, after in itertools.pairwise(values):
        if after < before:
            grown += before - base
            base = 0.0
    return grown + (values[-1] - base)


def latest(series: Series, now: float, max_age: float) -> float | None:
    """Returns the last valid value of a gauge; `None` if it is older than `max_age` seconds."""
    for at, value in reversed(series.points):
        if at < now - max_age:
            return None
        if at <= now and is_sound(value):
            return value
    return None


def born_at_zero(series: Sequence[Series]) -> list[Series]:
    """Adds a sample of 0 to every counter that appears within the window, at the scrape before.

    A page shows every counter that exists, so a counter that was not on the previous page has grown from 0
    since then. Without this sample, the first bytes of a codec that a link begins to use would be lost, but
    not their seconds. A counter whose earlier samples were left out has no such sample. The times of scrapes are found from all series of a host.
    """
    scrapes: dict[str, set[float]] = {}
    for one in series:
        scrapes.setdefault(one.instance, set()).update(at for at, _ in one.points)
    completed = []
    for one in series:
        if one.is_counter and one.points and one.may_be_born:
            earlier = [at for at in scrapes[one.instance] if at < one.points[0][0]]
            if earlier:
                one = replace(one, points=((max(earlier), 0.0), *one.points))
        completed.append(one)
    return completed
