"""Tests that a Prometheus server and the scheduler's own scraper give the same estimates."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_server import INTERVAL_SECONDS, eventually, running_prometheus

from collapipe.errors import PeerLostError
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler.scrape import ScrapeSource
from collapipe.scheduler.telemetry_window import known_hosts
from collapipe.telemetry.estimates import Estimates, HostPrior, estimate
from collapipe.telemetry.sources import Series, TelemetrySource
from collapipe.telemetry.sources.prometheus import PrometheusSource
from collapipe.v1.scheduler_pb2 import Host

MAX_AGE_SECONDS = 3.5
HOSTS = ("control-unit-0", "device-0", "edge-server")
PRIORS = {host: HostPrior(0.05, seconds_per_micro_batch=0.01) for host in HOSTS}


class MetricsHost:
    """A running metrics_host.py."""

    def __init__(self, host: str, stage: int, previous: str) -> None:
        script = Path(__file__).with_name("metrics_host.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), host, str(stage), previous],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        address, metrics_address = self._line().split()
        self.registered = Host(host_id=host, address=address, metrics_address=metrics_address)

    def start_work(self, micro_batches: int, pause: float = 0.0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{micro_batches} {pause}\n")
        self._process.stdin.flush()

    def end_work(self) -> None:
        assert self._line() == "done"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass
class Observed:
    """Hosts, and both telemetry sources that scrape them."""

    hosts: list[MetricsHost]
    prometheus: PrometheusSource
    scrape: ScrapeSource

    @property
    def sources(self) -> tuple[TelemetrySource, TelemetrySource]:
        return self.prometheus, self.scrape

    def instances(self, source: TelemetrySource) -> dict[str, str]:
        hosts = [one.registered for one in self.hosts]
        return {getattr(host, source.instance_field): host.host_id for host in hosts}

    def work(self, micro_batches: int) -> None:
        for one in self.hosts:
            one.start_work(micro_batches)
        for one in self.hosts:
            one.end_work()

    def wait_for_scrapes(self, since: float, count: int = 2) -> None:
        """Waits until both sources have scraped every living host `count` times since a time."""

        def done() -> bool:
            return all(
                scrapes(source.window(since, time.time()), address) >= count
                for source in self.sources
                for address in self.instances(source)
            )

        eventually(done)

    def estimates(self, start: float, end: float) -> tuple[Estimates, Estimates]:
        """Returns the estimates from the Prometheus server and from the scraper."""
        both = [
            estimate(
                source.window(start, end),
                self.instances(source),
                PRIORS,
                end=end,
                max_age_seconds=MAX_AGE_SECONDS,
            )
            for source in self.sources
        ]
        return both[0], both[1]


def scrapes(series: Sequence[Series], address: str) -> int:
    return max((len(one.points) for one in series if one.instance == address), default=0)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Provides three hosts that both sources scrape. Their counters grow only while they work.

    The last test that uses it ends a host.
    """
    with ExitStack() as stack:
        hosts = []
        for stage, host in enumerate(HOSTS):
            hosts.append(MetricsHost(host, stage, HOSTS[stage - 1] if stage else "nobody"))
            stack.callback(hosts[-1].kill)
        server = stack.enter_context(running_prometheus(tmp_path_factory.mktemp("prometheus")))
        registered = [one.registered for one in hosts]
        server.scrape(one.metrics_address for one in registered)
        channels = ChannelPool(Security.insecure())
        stack.callback(channels.close)
        named = [*registered, Host(host_id="nobody")]
        known = partial(known_hosts, named, ScrapeSource.instance_field)
        scrape = ScrapeSource(lambda: registered, known, channels, INTERVAL_SECONDS)
        stack.callback(scrape.close)
        yield Observed(hosts, PrometheusSource(server.url), scrape)


def names_of(
    source: TelemetrySource, observed: Observed, start: float, end: float
) -> set[tuple[str, str, object]]:
    hosts = observed.instances(source)
    series = source.window(start, end)
    return {(hosts[one.instance], one.name, one.labels) for one in series}


def without_memory(estimates: Estimates) -> Estimates:
    """Removes the peak memory, which is the only value that grows while a host does nothing."""
    hosts = {host: replace(one, peak_resident_bytes=None) for host, one in estimates.hosts.items()}
    return replace(estimates, hosts=hosts)


def test_both_sources_give_the_same_estimates_of_the_same_window(observed: Observed) -> None:
    start = time.time()
    observed.wait_for_scrapes(start)
    observed.work(11)  # the first work makes the series of link bytes
    observed.wait_for_scrapes(time.time())
    observed.work(7)
    observed.wait_for_scrapes(time.time())
    end = time.time()

    asked, scraped = (names_of(source, observed, start, end) for source in observed.sources)
    assert asked == scraped
    assert {host for host, _, _ in asked} == set(HOSTS)
    by_prometheus, by_scraping = observed.estimates(start, end)
    # The counters no longer grow, so the times of the scrapes do not matter, and the estimates are equal to
    # the last bit.
    assert without_memory(by_prometheus) == without_memory(by_scraping)
    for host in HOSTS:
        held = [got.hosts[host].peak_resident_bytes for got in (by_prometheus, by_scraping)]
        assert held[0] == pytest.approx(held[1], rel=0.2)  # answering a scrape takes memory too

    assert by_scraping.missing == by_scraping.rejected == ()
    device = by_scraping.hosts["device-0"]
    assert device.micro_batches == 18
    assert device.seconds_per_sample == pytest.approx((0.6 - 0.01) / 24)
    assert device.busy_watts == pytest.approx(18 * 0.7 / (18 * 0.6 + 2 * 0.3))
    assert by_scraping.clusters["0"].activation_bytes_per_sample == 4096
    link = by_scraping.links["control-unit-0>device-0"]
    assert link.transfer_bytes == 18 * 8 * 4100
    assert link.goodput_bps == pytest.approx(8 * 8 * 4100 / 0.002)
    back = by_scraping.links["device-0>control-unit-0"]
    assert (back.rate_limit_bps, back.round_trip_seconds) == (5e8, 0.006)


def test_both_sources_agree_while_counters_move(observed: Observed) -> None:
    start = time.time()
    observed.wait_for_scrapes(start)
    for one in observed.hosts:
        one.start_work(1200, pause=0.005)
    observed.wait_for_scrapes(time.time(), count=4)
    end = time.time()
    by_prometheus, by_scraping = observed.estimates(start, end)
    for one in observed.hosts:
        one.end_work()

    assert by_prometheus.hosts.keys() == by_scraping.hosts.keys() == set(HOSTS)
    for host in HOSTS:
        asked, scraped = by_prometheus.hosts[host], by_scraping.hosts[host]
        # A scrape can happen in the middle of a micro-batch, at both ends of both windows.
        near = 4 / min(asked.micro_batches, scraped.micro_batches)
        assert asked.seconds_per_sample == pytest.approx(scraped.seconds_per_sample, rel=near)
        assert asked.busy_watts == pytest.approx(scraped.busy_watts, rel=near)
    for link in ("control-unit-0>device-0", "device-0>edge-server"):
        both = [got.links[link] for got in (by_prometheus, by_scraping)]
        near = 4 * 8 * 4100 / min(one.transfer_bytes for one in both)
        assert both[0].goodput_bps == pytest.approx(both[1].goodput_bps, rel=near)


def test_both_sources_have_no_data_of_a_host_that_died(observed: Observed) -> None:
    start = time.time()
    observed.wait_for_scrapes(start)
    observed.work(5)
    observed.wait_for_scrapes(time.time())
    observed.hosts[1].kill()
    died = time.time()
    eventually(lambda: time.time() > died + MAX_AGE_SECONDS + INTERVAL_SECONDS)
    end = time.time()

    by_prometheus, by_scraping = observed.estimates(start, end)
    assert without_memory(by_prometheus) == without_memory(by_scraping)
    assert by_scraping.missing == ("device-0",)
    assert by_scraping.hosts.keys() == {"control-unit-0", "edge-server"}
    assert "control-unit-0>device-0" not in by_scraping.links  # only its receiver measures goodput
    assert by_scraping.links["device-0>edge-server"].goodput_bps is not None
    for source in observed.sources:
        series = source.window(died + INTERVAL_SECONDS, end)
        alive, dead, _ = observed.instances(source)
        assert scrapes(series, dead) == 0
        assert scrapes(series, alive) > 0


def test_prometheus_that_ended_is_an_error_and_not_an_empty_window(tmp_path: Path) -> None:
    with running_prometheus(tmp_path) as server:
        source = PrometheusSource(server.url)
        assert source.window(time.time() - 60, time.time()) == []
    with pytest.raises(PeerLostError, match="cannot be reached"):
        source.window(time.time() - 60, time.time())
