"""Present rates of hosts and links, from the samples that the scheduler has."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from collapipe.errors import CollapipeError
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.telemetry_window import MIN_SCRAPES, Telemetry
from collapipe.telemetry.sources import Series
from collapipe.telemetry.sources.samples import BUSY, increase

_BYTES = "collapipe_link_transfer_bytes_total"
_MEMORY = "collapipe_process_peak_resident_memory_bytes"
_LEAST_PAUSE_SECONDS = 2.0
_FAILURE_PAUSE_SECONDS = 30.0


@dataclass
class Rates:
    """What hosts and links do now.

    Args:
        busy: Share of the time in which a host computes, 0 to 1.
        bits_per_second: What arrives over a link, by "sender>receiver".
        memory_bytes: The largest memory that the process of a host has held.
    """

    busy: dict[str, float] = field(default_factory=dict)
    bits_per_second: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, float] = field(default_factory=dict)


class RateReader:
    """Computes the rates again when the samples are new. With many hosts, that is seldom."""

    def __init__(self, telemetry: Telemetry, registry: HostRegistry) -> None:
        self._telemetry = telemetry
        self._registry = registry
        self._lock = threading.Lock()
        self._rates = Rates()
        self._due = 0.0

    def read(self) -> Rates:
        """Returns the present rates. They are empty while the source does not answer.

        While another thread waits for the source, they are those from before.
        """
        if not self._lock.acquire(blocking=False):
            return self._rates
        source = self._telemetry.source
        try:
            if time.monotonic() < self._due:
                return self._rates
            now = self._telemetry.now()
            interval = max(self._telemetry.interval_seconds, source.pass_seconds)
            pause = max(_LEAST_PAUSE_SECONDS, source.pass_seconds)
            try:
                series = source.window(now - MIN_SCRAPES * interval, now)
            except (
                CollapipeError
            ):  # The planner logs it. Waiting for an answer would hold up the page each time.
                series, pause = (), _FAILURE_PAUSE_SECONDS
            hosts = {
                getattr(host, source.instance_field): host.host_id
                for host in self._registry.alive()
            }
            self._rates = _rates(series, hosts)
            self._due = time.monotonic() + pause
            return self._rates
        finally:
            self._lock.release()


def _rates(series: Iterable[Series], hosts: Mapping[str, str]) -> Rates:
    """Computes rates.

    Args:
        hosts: Host ids by instance.
    """
    rates = Rates(defaultdict(float), defaultdict(float))
    for one in series:
        host_id, seconds = hosts.get(one.instance), one.points[-1][0] - one.points[0][0]
        if host_id is None:
            continue
        if one.name == _MEMORY:
            rates.memory_bytes[host_id] = one.points[-1][1]
        elif one.name in BUSY and seconds:
            rates.busy[host_id] += min((increase(one) or 0.0) / seconds, 1.0)
        elif one.name == _BYTES and seconds:
            link = dict(one.labels).get("link", "")
            # The receiver measures what arrives.
            if link.endswith(f">{host_id}"):
                rates.bits_per_second[link] += 8 * (increase(one) or 0.0) / seconds
    for host_id, busy in rates.busy.items():
        rates.busy[host_id] = min(busy, 1.0)
    return rates
