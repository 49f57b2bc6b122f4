"""Telemetry from a Prometheus server."""

import asyncio
import math
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import httpx
from pydantic import BaseModel, ValidationError
from typing_extensions import TypedDict

from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.telemetry.known_hosts import DroppedSamples, KnownHosts
from collapipe.telemetry.sources.fetching import AnswerTooLargeError, Response, fetch, open_client
from collapipe.telemetry.sources.samples import NEEDED, Labels, Series, kept_labels

_MAX_ANSWER_BYTES = 64 << 20
_MAX_ANSWER_VALUES = 2_000_000
"""Labels, series, times and samples of an answer together. Each takes up to 300 bytes of memory, and a microsecond or more."""
_MOST_SECONDS, _LEAST_SECONDS = 300.0, 10.0
"""Longest window, as of the scheduler's own scrapes, and the window below which an answer that is too large is an error. The
answer of 1,000 hosts with 35 series each that are scraped every 2 s reaches the limit at 50 s."""
_SELECTOR = f'{{__name__=~"{"|".join(NEEDED)}"}}'


class _Row(TypedDict):
    metric: dict[str, str]
    values: list[tuple[float, float]]


class _Data(BaseModel):
    resultType: Literal["matrix"]  # noqa: N815 (Prometheus's name)
    result: list[_Row]


class _Answer(BaseModel):
    status: Literal["success", "error"]
    error: str = ""
    data: _Data | None = None


class PrometheusSource:
    """Asks a Prometheus server for raw samples.

    If an answer is too large, only its later half is asked for, and later windows are as short. They grow again when answers are
    small.

    Each query is a range selector at an explicit time. It returns the samples with the times of their
    scrapes, while functions such as `rate` would extrapolate.

    Args:
        url: Address of the server, for example `http://127.0.0.1:9090`.
        tls: Returns the context of the next connection to an https address, or `None` to trust the public authorities.
        server_name: The DNS name that the certificate of the server must have; the host of the address if it is empty.
        timeout_seconds: Limit of one query, from the look-up of the server's name to the last byte.
        known: Returns what samples may be about, by the addresses of the metrics of the hosts. `None` believes all labels.

    Raises:
        InvalidInputError: The URL is invalid.
    """

    name = "prometheus"
    instance_field = "metrics_address"
    max_gap_seconds = 0.0
    pass_seconds = 0.0

    def __init__(
        self,
        url: str,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        server_name: str = "",
        timeout_seconds: float = 5.0,
        known: Callable[[], KnownHosts] | None = None,
    ) -> None:
        try:
            self._url = httpx.URL(url.rstrip("/") + "/api/v1/query")
            port = self._url.port
            if self._url.scheme not in ("http", "https") or not self._url.host:
                raise ValueError("it needs a scheme and a host")
            if port is not None and not 0 < port < 1 << 16:
                raise ValueError(f"port {port} is not between 1 and 65535")
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidInputError(
                f"{url!r} is no URL of a Prometheus server ({error}): write, for example, http://127.0.0.1:9090"
            ) from None
        self._tls = tls
        self._extensions = {"sni_hostname": server_name} if server_name else {}
        self._timeout_seconds = timeout_seconds
        self._known = known
        self._dropped = DroppedSamples(self.name)
        self._most_seconds = _MOST_SECONDS
        self._counted_until = -math.inf
        """End of the windows whose dropped samples are counted."""

    def now(self) -> float:
        return time.time()

    def window(self, start: float, end: float) -> Sequence[Series]:
        while True:
            start = max(start, end - self._most_seconds)
            try:
                return self._believed(_series(self._rows(start, end), start, end), end)
            except AnswerTooLargeError:
                if end - start <= _LEAST_SECONDS:
                    raise
                self._most_seconds = (end - start) / 2

    def _rows(self, start: float, end: float) -> list[_Row]:
        # Prometheus keeps times in whole milliseconds. The range is a second longer than needed, because some
        # versions of Prometheus exclude its start.
        form = {
            "query": f"{_SELECTOR}[{math.ceil(end - start) + 1}s]",
            "time": f"{math.ceil(end * 1000) / 1000:.3f}",
            "timeout": f"{self._timeout_seconds:g}s",
        }
        # Not asyncio.run: at its end it waits for a name server that does not answer, without any limit.
        loop = asyncio.new_event_loop()
        try:
            response = loop.run_until_complete(self._ask(form))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        rows = self._read(response.status, response.body)
        if response.body.count(b",") < _MAX_ANSWER_VALUES / 4:
            self._most_seconds = min(2 * self._most_seconds, _MOST_SECONDS)
        return rows

    def close(self) -> None:
        """Does nothing, because every query has its own connection."""

    def _believed(self, series: list[Series], end: float) -> list[Series]:
        """Leaves out the series of unknown hosts, and those whose labels no honest host has."""
        if self._known is None:
            return series
        known, kept = self._known(), []
        dropped: dict[str, list[Labels]] = defaultdict(list)
        for one in series:
            if known.may_have(one.instance, one.labels):
                kept.append(one)
            elif host_id := known.host_id(one.instance):
                # Windows overlap.
                dropped[host_id] += [one.labels for at, _ in one.points if at > self._counted_until]
        self._counted_until = max(self._counted_until, end)
        for host_id, labels in dropped.items():
            self._dropped.count(host_id, labels)
        return kept

    async def _ask(self, form: dict[str, str]) -> Response:
        async with open_client(self._tls()) as client:
            # httpx checks the certificate for the name in this extension.
            request = client.build_request(
                "POST", self._url, data=form, extensions=self._extensions
            )
            return await fetch(client, request, self._timeout_seconds, _MAX_ANSWER_BYTES)

    def _read(self, status: int, body: bytes) -> list[_Row]:
        # A comma stands between each two values.
        if (num_values := body.count(b",")) > _MAX_ANSWER_VALUES:
            raise AnswerTooLargeError(
                "",
                f"{self._url} answered with {num_values} values, and at most {_MAX_ANSWER_VALUES} are read: check that the "
                "address is right, or let Prometheus scrape less often",
            )
        try:
            answer = _Answer.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise PeerLostError(
                "",
                f"{self._url} answered HTTP {status}, but not as Prometheus answers "
                f"({place or 'body'}: {first['msg']}): check that the address is right",
            ) from None
        if status != httpx.codes.OK or answer.status != "success" or answer.data is None:
            raise PeerLostError(
                "", f"{self._url} answered HTTP {status}: {answer.error or 'it gave no reason'}"
            )
        return answer.data.result


def _series(rows: list[_Row], start: float, end: float) -> list[Series]:
    """Returns the series of one scrape job for each host.

    If two jobs of Prometheus scrape the same host, every series comes twice and would count twice. Only the
    labels that the server added tell the jobs apart. The job with more samples is used.
    """
    jobs: dict[str, dict[tuple[tuple[str, str], ...], list[Series]]] = defaultdict(dict)
    for row in rows:
        points = tuple((at, value) for at, value in row["values"] if start <= at <= end)
        metric = row["metric"]
        name, instance = metric.get("__name__", ""), metric.get("instance", "")
        labels = kept_labels(metric)
        if points and name in NEEDED:
            job = tuple(sorted(metric.items() - set(labels) - {("__name__", name)}))
            jobs[instance].setdefault(job, []).append(Series(instance, name, labels, points))
    kept: list[Series] = []
    for by_job in jobs.values():
        kept += max(
            (by_job[job] for job in sorted(by_job)),
            key=lambda found: sum(len(one.points) for one in found),
        )
    return sorted(kept, key=lambda one: one.key)
