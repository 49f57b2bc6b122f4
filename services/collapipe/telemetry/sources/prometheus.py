"""Telemetry that a Prometheus server has scraped."""

import asyncio
import math
from collections.abc import Sequence
from typing import Literal

import httpx
from pydantic import BaseModel, ValidationError

from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.telemetry.sources.fetching import fetch, open_client
from collapipe.telemetry.sources.samples import NEEDED, Series, kept_labels

_MAX_ANSWER_BYTES = 64 << 20
_SELECTOR = f'{{__name__=~"{"|".join(NEEDED)}"}}'


class _Row(BaseModel):
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
    """Asks a Prometheus server for raw samples, in PromQL over HTTP.

    The one query is a range selector at an explicit time: it returns samples with the times of their scrapes, where a
    function such as `rate` would extrapolate.

    Args:
        url: Of the server, for example `http://127.0.0.1:9090`.
        timeout_seconds: Bounds one question, from looking up the server's name to the last byte.

    Raises:
        InvalidInputError: The URL is none.
    """

    name = "prometheus"

    def __init__(self, url: str, timeout_seconds: float = 5.0) -> None:
        try:
            self._url = httpx.URL(url.rstrip("/") + "/api/v1/query")
        except (httpx.InvalidURL, ValueError) as error:  # of a name that is none, too
            raise InvalidInputError(f"{url!r} is no URL of a Prometheus server: {error}") from None
        port = self._url.port
        fits = port is None or 0 < port < 1 << 16
        if self._url.scheme not in ("http", "https") or not self._url.host or not fits:
            raise InvalidInputError(
                f"{url!r} is no URL of a Prometheus server: write, for example, http://127.0.0.1:9090"
            )
        self._timeout_seconds = timeout_seconds

    def window(self, start: float, end: float) -> Sequence[Series]:
        """Returns the samples from `start` to `end`; see `TelemetrySource`."""
        # whole milliseconds are what Prometheus keeps; a second more, for it may leave out the first end of a range
        reach = math.ceil(end - start) + 1
        form = {
            "query": f"{_SELECTOR}[{reach}s]",
            "time": f"{math.ceil(end * 1000) / 1000:.3f}",
            "timeout": f"{self._timeout_seconds:g}s",
        }
        # no asyncio.run: at its end it would wait for a name server that does not answer, past every limit
        loop = asyncio.new_event_loop()
        try:
            status, body = loop.run_until_complete(self._ask(form))
        finally:
            loop.close()
        return _series(self._read(status, body), start, end)

    def close(self) -> None:
        """Does nothing: no connection outlives a question."""

    async def _ask(self, form: dict[str, str]) -> tuple[int, bytes]:
        async with open_client() as client:
            request = client.build_request("POST", self._url, data=form)
            return await fetch(client, request, self._timeout_seconds, _MAX_ANSWER_BYTES)

    def _read(self, status: int, body: bytes) -> list[_Row]:
        try:
            answer = _Answer.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise PeerLostError(
                "",
                f"{self._url} answered HTTP {status} with what is no answer of Prometheus "
                f"({place or 'body'}: {first['msg']}): is it the right address?",
            ) from None
        if status != httpx.codes.OK or answer.status != "success" or answer.data is None:
            raise PeerLostError(
                "", f"{self._url} answered HTTP {status}: {answer.error or 'it gave no reason'}"
            )
        return answer.data.result


def _series(rows: list[_Row], start: float, end: float) -> list[Series]:
    """Sorts out what was asked for.

    Two jobs of Prometheus that scrape the same host give each series twice, apart only by labels of the deployment:
    the job with more samples is taken, for together they would count everything twice.
    """
    jobs: dict[str, dict[tuple[tuple[str, str], ...], list[Series]]] = {}
    for row in rows:
        points = tuple((at, value) for at, value in row.values if start <= at <= end)
        name, instance, labels = (
            row.metric.get("__name__", ""),
            row.metric.get("instance", ""),
            kept_labels(row.metric),
        )
        if points and name in NEEDED:
            added = set(row.metric.items()) - set(labels) - {("__name__", name)}
            job = jobs.setdefault(instance, {}).setdefault(tuple(sorted(added)), [])
            job.append(Series(instance, name, labels, points))
    found = []
    for of_instance in jobs.values():
        fullest = max(
            sorted(of_instance), key=lambda job: sum(len(one.points) for one in of_instance[job])
        )
        found += of_instance[fullest]
    return sorted(found, key=lambda one: one.key)
