"""The valid samples of one window of time, by host, metric and group."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from collapipe.telemetry.sources.samples import (
    MOST,
    Labels,
    Series,
    born_at_zero,
    increase,
    is_sound,
    latest,
)

ABOVE_ZERO = 5e-324
"""The smallest float above 0."""


class Group(NamedTuple):
    """One stage, link or sensor, as one host reports it."""

    host: str
    labels: Labels
    """The labels that its metrics share: all except `codec`."""


class SampleWindow:
    """Looks up increases of counters and last values of gauges.

    Args:
        series: From a `TelemetrySource`. Series of other instances than those in `hosts` are ignored.
        hosts: Host ids by instance.
        end: End of the window, in Unix seconds.
        max_age_seconds: Older gauges are not used. A host whose last sample is older is not used at all.
    """

    def __init__(
        self,
        series: Sequence[Series],
        hosts: Mapping[str, str],
        *,
        end: float,
        max_age_seconds: float,
    ) -> None:
        self._end = end
        self._max_age_seconds = max_age_seconds
        self.rejected: list[str] = []
        """One sentence for each value that was left out because it is implausible."""
        known = [one for one in series if one.instance in hosts]
        fresh = {
            one.instance
            for one in known
            if any(end - max_age_seconds <= at <= end for at, _ in one.points)
        }
        self.hosts = sorted({hosts[instance] for instance in fresh})
        """Ids of the hosts with fresh samples."""
        # Sorting makes all sums independent of the order in which the source returns the series.
        heard = sorted((one for one in known if one.instance in fresh), key=lambda one: one.key)
        self._series: dict[tuple[Group, str], list[Series]] = {}
        # Zeros are added before invalid pages are dropped: a counter whose first page is invalid did not
        # begin at 0 on its second page.
        for one in self._without_invalid_pages(born_at_zero(heard), hosts):
            group = _group(one, hosts)
            self._series.setdefault((group, one.name), []).append(one)
        self._groups: dict[tuple[str, str | None], list[tuple[Group, str]]] = {}
        """Groups with the value of a label, by the label and the host. The host is `None` for those of all hosts."""
        for group in sorted({group for group, _ in self._series}):
            for label, value in group.labels:
                for host in (None, group.host):
                    self._groups.setdefault((label, host), []).append((group, value))

    def groups(self, label: str, host: str | None = None) -> Sequence[tuple[Group, str]]:
        """Returns every group of a host that has the label, with the value of the label. Without a host, returns those of all."""
        return self._groups.get((label, host), ())

    def series(self, group: Group, name: str) -> list[Series]:
        """Returns the series of a metric, named without the prefix `collapipe_`: one for each codec."""
        return self._series.get((group, f"collapipe_{name}"), [])

    def increases(self, group: Group, *names: str) -> list[float] | None:
        """Returns by how much counters grew, each summed over its codecs; `None` if one is missing."""
        grown = []
        for name in names:
            each = [increase(one) for one in self.series(group, name)]
            known = [value for value in each if value is not None]
            if not known:
                return None
            grown.append(sum(known))
        return grown

    def latest(
        self, group: Group, name: str, most: float, least: float = ABOVE_ZERO
    ) -> float | None:
        """Returns the last value of a gauge, or `None` if there is no fresh and plausible one."""
        for one in self.series(group, name):
            value = latest(one, self._end, self._max_age_seconds)
            if value is not None:
                return self.plausible(f"{group.host}: {_described(one)}", value, least, most)
        return None

    def plausible(
        self, what: str, value: float, least: float, most: float, reason: str = ""
    ) -> float | None:
        """Returns a value within limits. For any other value, it extends `rejected` and returns `None`."""
        if least <= value <= most:
            return value
        self.rejected.append(f"{what}: {value:.4g} is outside of {least:.4g} to {most:.4g}{reason}")
        return None

    def _without_invalid_pages(
        self, series: Sequence[Series], hosts: Mapping[str, str]
    ) -> list[Series]:
        """Drops pages with an invalid value for the whole group, so that all sums cover the same time."""
        invalid: dict[Group, set[float]] = {}
        for one in series:
            bad = [(at, value) for at, value in one.points if not is_sound(value)]
            if bad:
                group = _group(one, hosts)
                invalid.setdefault(group, set()).update(at for at, _ in bad)
                at, value = bad[0]
                self.rejected.append(
                    f"{group.host}: {_described(one)} was {value:g} at {at:.3f}, but must be from 0 to {MOST:g}; "
                    f"left out {len(bad)} of {len(one.points)} samples"
                )
        kept = []
        for one in series:
            bad_times = invalid.get(_group(one, hosts), set())
            points = tuple(point for point in one.points if point[0] not in bad_times)
            if points:
                kept.append(replace(one, points=points))
        return kept


def _group(series: Series, hosts: Mapping[str, str]) -> Group:
    labels = tuple(pair for pair in series.labels if pair[0] != "codec")
    return Group(hosts[series.instance], labels)


def _described(series: Series) -> str:
    labels = ", ".join(f"{name} {value}" for name, value in series.labels)
    return f"{series.name} ({labels})" if labels else series.name
