"""Telemetry that the scheduler scrapes itself, which is the default because it needs no other server."""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.telemetry.sources.fetching import fetch, open_client
from collapipe.telemetry.sources.samples import NEEDED, Labels, Series, kept_labels

logger = logging.getLogger(__name__)

_MAX_PAGE_BYTES = 4 << 20
_MAX_PAGE_SERIES = 5000
"""Far more than a host exports. Together with `keep_seconds` it limits the memory of the scheduler."""

_LEAST_LIMIT_SECONDS = 10.0
"""A page may take at least this long, because a slow link carries other traffic, too."""
_PAUSE_SHARE = 9.0
"""After a page, its host is left alone for this multiple of the time in which the page arrived. So telemetry takes
about a tenth of a slow link."""
_MOST_PAUSE_SECONDS = 30.0

_PAGES_PER_SECOND = 20
"""Most pages in a second. Each takes about 3 ms of the scheduler, which has heartbeats to answer, too."""

Page = dict[tuple[str, Labels], float]
"""Values by name and labels."""


class ScrapeSource:
    """Scrapes the /metrics pages of all hosts regularly, in a thread, and keeps the samples for a while.

    A host behind a slow link is scraped less often, and so is each of more than 20 hosts. A host that does not answer has a gap
    in its samples.

    Args:
        addresses: Returns where hosts serve /metrics, "host:port". The thread calls it in every interval.
        interval_seconds: Least time between two scrapes of a host.
        keep_seconds: How long samples are kept. A window cannot start earlier.

    Raises:
        InvalidInputError: Fewer than two scrapes would be kept.
    """

    name = "scrape"

    def __init__(
        self,
        addresses: Callable[[], Iterable[str]],
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
        self._addresses = addresses
        self._interval_seconds = interval_seconds
        self._keep_seconds = keep_seconds
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str, Labels], deque[tuple[float, float]]] = {}
        self._failing: set[str] = set()
        """Addresses whose last scrape failed; each failure is logged once."""
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._scrape_until_cancelled())
        self._thread = threading.Thread(target=self._run, name="scrape", daemon=True)
        self._thread.start()

    @property
    def max_gap_seconds(self) -> float:
        return self._limit_seconds + _MOST_PAUSE_SECONDS + self.pass_seconds

    def window(self, start: float, end: float) -> Sequence[Series]:
        if not self._thread.is_alive():
            raise PeerLostError(
                "", "the hosts are no longer scraped: the source was closed, or failed"
            )
        with self._lock:
            windows = {
                key: tuple(point for point in points if start <= point[0] <= end)
                for key, points in self._kept.items()
            }
        return [Series(*key, points) for key, points in sorted(windows.items()) if points]

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop may have ended already.
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(self._interval_seconds + 1.0)

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        finally:
            self._loop.close()

    async def _scrape_until_cancelled(self) -> None:
        scrapes: dict[str, asyncio.Task[None]] = {}
        async with open_client() as client:
            due = self._loop.time()
            try:
                while True:
                    addresses = {address for address in self._addresses() if address}
                    self._failing &= addresses
                    scrapes = {at: task for at, task in scrapes.items() if not task.done()}
                    self.pass_seconds = len(addresses) / _PAGES_PER_SECOND
                    for address in addresses - scrapes.keys():
                        scrapes[address] = self._loop.create_task(self._scrape(client, address))
                        await asyncio.sleep(1 / _PAGES_PER_SECOND)
                    self._forget_old(time.time())
                    due = max(due + self._interval_seconds, self._loop.time())
                    await asyncio.sleep(due - self._loop.time())
            finally:
                for task in scrapes.values():
                    task.cancel()
                await asyncio.gather(*scrapes.values(), return_exceptions=True)

    async def _scrape(self, client: httpx.AsyncClient, address: str) -> None:
        """Scrapes a host once, and then leaves it alone for a while."""
        started = self._loop.time()
        link_seconds: float | None = None
        try:
            link_seconds = await self._scrape_page(client, address)
        except Exception as error:  # An error with one page must not end the other scrapes.
            expected = isinstance(error, PeerLostError | InvalidInputError | httpx.InvalidURL)
            if address not in self._failing:
                logger.warning(
                    "scraping %s fails: %s; the next message says when it works again",
                    address,
                    error if expected else f"{type(error).__name__}: {error}",
                    exc_info=not expected,
                )
            self._failing.add(address)
        else:
            if address in self._failing:
                logger.info("scraping %s works again", address)
                self._failing.discard(address)
        if link_seconds is None:  # The link may have been too slow for the page.
            link_seconds = self._loop.time() - started
        await asyncio.sleep(min(_PAUSE_SHARE * link_seconds, _MOST_PAUSE_SECONDS))

    async def _scrape_page(self, client: httpx.AsyncClient, address: str) -> float:
        """Returns for how long the page used the link, in seconds."""
        # As Prometheus does: the time of a sample is the start of its scrape, in whole milliseconds.
        started = round(time.time(), 3)
        # These parameters make prometheus_client leave out other metrics, which saves time on a device.
        request = client.build_request(
            "GET",
            f"http://{address}/metrics",
            params={"name[]": NEEDED},
            headers={"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"},
        )
        response = await fetch(client, request, self._limit_seconds, _MAX_PAGE_BYTES)
        if response.status != httpx.codes.OK:
            raise PeerLostError("", f"{request.url} answered HTTP {response.status}")
        page = parse_page(response.body)
        with self._lock:
            for (name, labels), value in page.items():
                points = self._kept.setdefault((address, name, labels), deque())
                if not points or points[-1][0] < started:  # Otherwise the clock was set back.
                    points.append((started, value))
        return response.body_seconds

    def _forget_old(self, now: float) -> None:
        with self._lock:
            for key, points in list(self._kept.items()):
                while points and points[0][0] < now - self._keep_seconds:
                    points.popleft()
                while points and points[-1][0] > now:  # The clock was set back.
                    points.pop()
                if not points:
                    del self._kept[key]


def parse_page(body: bytes) -> Page:
    """Returns the samples of the metrics in `NEEDED` on a /metrics page.

    Raises:
        InvalidInputError: The page is no page of metrics, or it has too many series for a host.
    """
    try:
        # Searching for the few needed lines first is a hundred times faster than parsing the whole page.
        lines = [line for line in body.decode("utf-8").split("\n") if line.startswith(NEEDED)]
        page = {
            (sample.name, kept_labels(sample.labels)): float(sample.value)
            for family in text_string_to_metric_families("\n".join(lines))
            for sample in family.samples
            if sample.name in NEEDED
        }
    except (ValueError, LookupError) as error:
        raise InvalidInputError(f"its page is not in Prometheus's text format: {error}") from None
    if len(page) > _MAX_PAGE_SERIES:
        raise InvalidInputError(
            f"its page has {len(page)} series of the scheduler's metrics, and the limit is {_MAX_PAGE_SERIES}: check "
            "that the address is that of a host"
        )
    return page
