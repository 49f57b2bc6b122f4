"""Telemetry that the scheduler scrapes itself, which is the default because it needs no other server."""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from collapipe.errors import CollapipeError, InvalidInputError, PeerLostError
from collapipe.rpc import ChannelPool, call
from collapipe.telemetry.known_hosts import DroppedSamples, KnownHosts
from collapipe.telemetry.sources import NEEDED, Series
from collapipe.telemetry.sources.samples import Labels, kept_labels
from collapipe.v1 import scheduler_pb2, telemetry_pb2, telemetry_pb2_grpc

logger = logging.getLogger(__name__)

_MAX_PAGE_BYTES = 1 << 20
_MAX_PAGE_SAMPLES = 5000
"""Far more than a host has."""
_MAX_KEPT_SAMPLES = 300_000
"""Samples of one host, which take 26 MB. With an interval of 1 s, that is enough for 1,000 series."""

_LEAST_LIMIT_SECONDS = 10.0
"""A page may take at least this long, because a slow link carries other traffic, too."""
_PAUSE_SHARE = 9.0
"""After a page, its host is left alone for this multiple of the time that its link needs. So telemetry takes about a tenth of a
slow link."""
_PAGES_COMPARED = 3
"""A slow link needs long for each page, and a busy host only for some. So the shortest of so many pages counts."""
_MOST_PAUSE_SECONDS = 30.0

_PAGES_PER_SECOND = 20
"""Most pages in a second. Each takes time of the scheduler, which has heartbeats to answer, too."""
_THREADS = 8
"""Most pages at a time. Hosts that do not answer hold up the others only if they are more."""

_REQUEST = telemetry_pb2.GetMetricsRequest(names=NEEDED)

Page = dict[tuple[str, Labels], float]
"""Values by name and labels."""


@dataclass
class _Scraped:
    """What is known about a host with some address. A thread that scrapes it changes this."""

    is_failing: bool = False
    """Whether its last page failed. Only the first of several failures is logged."""
    free_at: float = 0.0
    """When it may be asked again. It is infinite until the present page ends."""
    link_seconds: deque[float] = field(default_factory=lambda: deque([0.0], _PAGES_COMPARED))
    """Time of the last pages without the time of the host. The first pages cause no pause: one of them opens the connection."""


class ScrapeSource:
    """Asks all hosts for their metrics regularly, in threads, and keeps the samples for a while.

    What a host answers to one such question is called a page. A host behind a slow link is scraped less often, and so is
    each of more than 20 hosts. A host that does not answer has a gap in its samples.

    Args:
        hosts: Returns the hosts to scrape. A thread calls it in every interval.
        known: Returns what samples may be about, by the addresses of the hosts. The thread calls it then, too.
        interval_seconds: Least time between two scrapes of a host.
        keep_seconds: How long samples are kept. A window cannot start earlier.

    Raises:
        InvalidInputError: Fewer than two scrapes would be kept.
    """

    name = "scrape"
    instance_field = "address"

    def __init__(
        self,
        hosts: Callable[[], Iterable[scheduler_pb2.Host]],
        known: Callable[[], KnownHosts],
        channels: ChannelPool,
        interval_seconds: float = 1.0,
        keep_seconds: float = 300.0,
    ) -> None:
        if not 0 < 2 * interval_seconds <= keep_seconds:
            raise InvalidInputError(
                f"scraping every {interval_seconds:g} s and keeping {keep_seconds:g} s leaves no two samples to "
                "compare: scrape more often, or keep at least twice the interval"
            )
        self._limit_seconds = max(interval_seconds, _LEAST_LIMIT_SECONDS)
        self.pass_seconds = 0.0
        # If the clock of this machine is set, the times of samples must not jump: rates are computed from them.
        self._offset = time.time() - time.monotonic()
        self._hosts = hosts
        self._known = known
        self._known_now = KnownHosts([])
        self._dropped = DroppedSamples(self.name)
        self._channels = channels
        self._interval_seconds = interval_seconds
        self._keep_seconds = keep_seconds
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str, Labels], deque[tuple[float, float]]] = {}
        self._incomplete: set[str] = set()
        """Addresses whose last page had samples that were left out."""
        self._unborn: set[tuple[str, str, Labels]] = set()
        """Series of which earlier samples may have been left out."""
        self._owners: dict[str, str] = {}
        """The host that had an address, for all addresses with kept samples."""
        self._num_kept: Counter[str] = Counter()
        """Number of series of each host, at all addresses that it has had."""
        self._num_samples: Counter[str] = Counter()
        """Number of samples of each host, at all addresses that it has had."""
        self._closed = threading.Event()
        self._pages = ThreadPoolExecutor(_THREADS, "page")
        self._thread = threading.Thread(
            target=self._scrape_until_closed, name="scrape", daemon=True
        )
        self._thread.start()

    @property
    def max_gap_seconds(self) -> float:
        return self._limit_seconds + _MOST_PAUSE_SECONDS + self.pass_seconds

    def now(self) -> float:
        return self._offset + time.monotonic()

    def window(self, start: float, end: float) -> Sequence[Series]:
        if not self._thread.is_alive():
            raise PeerLostError(
                "",
                "the hosts are no longer scraped, because the source was closed or failed: restart the scheduler",
            )
        with self._lock:
            windows = {
                key: tuple(point for point in points if start <= point[0] <= end)
                for key, points in self._kept.items()
            }
            unborn = set(self._unborn)
        return [
            Series(*key, points, key not in unborn)
            for key, points in sorted(windows.items())
            if points
        ]

    def close(self) -> None:
        """Ends the scrapes. Pages that hosts are asked for at the moment end with the channels."""
        self._closed.set()
        self._thread.join()
        self._pages.shutdown(wait=False, cancel_futures=True)

    def _scrape_until_closed(self) -> None:
        scraped: dict[str, _Scraped] = {}
        due = time.monotonic()
        while not self._closed.wait(due - time.monotonic()):
            hosts = {host.address: host.host_id for host in self._hosts()}
            self._known_now = self._known()
            scraped = {address: scraped.get(address) or _Scraped() for address in hosts}
            self.pass_seconds = len(hosts) / _PAGES_PER_SECOND
            for address, one in scraped.items():
                if one.free_at <= time.monotonic():
                    one.free_at = math.inf
                    self._pages.submit(self._scrape, hosts[address], address, one)
                    if self._closed.wait(1 / _PAGES_PER_SECOND):
                        return
            self._forget_old(self.now())
            due = max(due + self._interval_seconds, time.monotonic())

    def _scrape(self, host_id: str, address: str, scraped: _Scraped) -> None:
        """Scrapes a host once, and says when it may be asked again."""
        started = time.monotonic()
        own_seconds = 0.0
        try:
            own_seconds = self._scrape_page(host_id, address)
        except Exception as error:  # An error with one page must not end the other scrapes.
            expected = isinstance(error, CollapipeError)
            if not (scraped.is_failing or self._closed.is_set()):
                logger.warning(
                    "scraping %s fails: %s; the next message says when it works again",
                    host_id,
                    error if expected else f"{type(error).__name__}: {error}",
                    exc_info=not expected,
                )
            scraped.is_failing = True
        else:
            if scraped.is_failing:
                logger.info("scraping %s works again", host_id)
            scraped.is_failing = False
        now = time.monotonic()
        # Without an answer, the link may have been too slow. A host may also claim any time of its own.
        link_seconds = max(0.0, now - started - own_seconds)
        scraped.link_seconds.append(link_seconds)
        if not scraped.is_failing:
            link_seconds = min(scraped.link_seconds)
        scraped.free_at = now + min(_PAUSE_SHARE * link_seconds, _MOST_PAUSE_SECONDS)

    def _scrape_page(self, host_id: str, address: str) -> float:
        """Returns how long the host says that it needed, in seconds."""
        # As Prometheus does: the time of a sample is the start of its scrape, in whole milliseconds.
        started = round(self.now(), 3)
        stub = telemetry_pb2_grpc.TelemetryServiceStub(self._channels.channel(address))
        answer = call(stub.GetMetrics, _REQUEST, host_id, self._limit_seconds)
        page, dropped = read_page(answer, host_id, address, self._known_now)
        self._dropped.count(host_id, dropped)
        with self._lock:
            owner = self._owners.setdefault(address, host_id)
            if self._num_samples[owner] + len(page) > _MAX_KEPT_SAMPLES:
                raise InvalidInputError(
                    f"{host_id} has {self._num_samples[owner]} samples of the last {self._keep_seconds:g} s and sent {len(page)} "
                    f"more, and the limit is {_MAX_KEPT_SAMPLES}: check what runs there, or raise --telemetry-interval-seconds"
                )
            was_incomplete = address in self._incomplete
            self._incomplete.discard(address)
            if dropped:
                self._incomplete.add(address)
            for (name, labels), value in page.items():
                key = address, name, labels
                if key not in self._kept:
                    if self._num_kept[owner] >= _MAX_PAGE_SAMPLES:
                        self._incomplete.add(address)
                        continue  # Labels, or ports, that change with every page would fill the memory.
                    self._num_kept[owner] += 1
                    if was_incomplete:
                        self._unborn.add(key)
                points = self._kept.setdefault(key, deque())
                # Another page may have begun in this millisecond.
                if not points or points[-1][0] < started:
                    points.append((started, value))
                    self._num_samples[owner] += 1
        return answer.seconds

    def _forget_old(self, now: float) -> None:
        with self._lock:
            for key, points in list(self._kept.items()):
                num_before = len(points)
                while points and points[0][0] < now - self._keep_seconds:
                    points.popleft()
                owner = self._owners[key[0]]
                self._num_samples[owner] -= num_before - len(points)
                if not points:
                    del self._kept[key]
                    self._unborn.discard(key)
                    self._num_kept[owner] -= 1
            kept = {key[0] for key in self._kept}
            self._incomplete &= kept
            self._owners = {a: owner for a, owner in self._owners.items() if a in kept}


def read_page(
    answer: telemetry_pb2.GetMetricsResponse, host_id: str, address: str, known: KnownHosts
) -> tuple[Page, list[Labels]]:
    """Returns the needed samples of a host, and the labels of those that are left out because no honest host has them.

    Raises:
        InvalidInputError: The answer is larger than that of any host.
    """
    if len(answer.samples) > _MAX_PAGE_SAMPLES or answer.ByteSize() > _MAX_PAGE_BYTES:
        raise InvalidInputError(
            f"{host_id} sent {len(answer.samples)} samples in {answer.ByteSize()} bytes, and the limits are "
            f"{_MAX_PAGE_SAMPLES} and {_MAX_PAGE_BYTES}: check what runs there"
        )
    page: Page = {}
    dropped = []
    for sample in answer.samples:
        if sample.name in NEEDED:
            labels = kept_labels(sample.labels)
            if known.may_have(address, labels):
                page[sample.name, labels] = sample.value
            else:
                dropped.append(labels)
    return page, dropped
