"""The scheduler scrapes hosts over real gRPC, within its limits, and believes them only about themselves."""

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from collapipe.errors import InvalidInputError, PeerLostError, WrongStateError
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.scheduler import scrape
from collapipe.scheduler.scrape import ScrapeSource, read_page
from collapipe.telemetry import metrics
from collapipe.telemetry.sources import NEEDED, Series
from collapipe.telemetry_service import TelemetryServicer
from collapipe.v1 import telemetry_pb2, telemetry_pb2_grpc
from collapipe.v1.scheduler_pb2 import Host

STEPS = "collapipe_stage_steps_total"
LINK_BYTES = "collapipe_link_transfer_bytes_total"
LIMIT_SECONDS = 30.0
"""Time limit for something that takes milliseconds on an idle machine."""
SLOW_SECONDS = 2.0
"""So the pause is 18 s."""

Answer = Callable[[telemetry_pb2.GetMetricsRequest], telemetry_pb2.GetMetricsResponse]


def sample(name: str, value: float, **labels: str) -> telemetry_pb2.MetricSample:
    return telemetry_pb2.MetricSample(name=name, labels=labels, value=value)


def page(steps: float, seconds: float = 0.0) -> telemetry_pb2.GetMetricsResponse:
    samples = [sample(STEPS, steps, cluster="0", stage="1", foreign="x"), sample("other_total", 3)]
    return telemetry_pb2.GetMetricsResponse(samples=samples, seconds=seconds)


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Serves the metrics of a host, and yields its address."""

    class Servicer(telemetry_pb2_grpc.TelemetryServiceServicer):
        def GetMetrics(self, request: telemetry_pb2.GetMetricsRequest, context: Any) -> Any:
            return answer(request)

    with serving(Servicer()) as address:
        yield address


@contextmanager
def serving(servicer: telemetry_pb2_grpc.TelemetryServiceServicer) -> Iterator[str]:
    def add(server: grpc.Server, address: str) -> None:
        telemetry_pb2_grpc.add_TelemetryServiceServicer_to_server(servicer, server)

    server = serve("127.0.0.1:0", Security.insecure(), add)
    try:
        yield server.address
    finally:
        server.drain(0)


@contextmanager
def scraping(present: Sequence[str], interval: float = 0.05, **options: Any) -> Iterator[Any]:
    """Scrapes the hosts at some addresses. The id of a host is its address."""
    channels = ChannelPool(Security.insecure())
    source = ScrapeSource(
        lambda: [Host(host_id=address, address=address) for address in present],
        channels,
        interval,
        **options,
    )
    try:
        yield source
    finally:
        source.close()
        channels.close()


def everything(source: ScrapeSource) -> Sequence[Series]:
    return source.window(0.0, time.time() + 1)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def points_of(source: ScrapeSource, instance: str) -> int:
    return sum(len(one.points) for one in everything(source) if one.instance == instance)


def test_samples_are_kept_in_order_of_time_with_the_labels_of_services() -> None:
    asked, steps = [], itertools.count(1)

    def answer(request: telemetry_pb2.GetMetricsRequest) -> telemetry_pb2.GetMetricsResponse:
        asked.append(list(request.names))
        return page(next(steps))

    with answering(answer) as address, scraping([address]) as source:
        eventually(lambda: points_of(source, address) >= 3)
        (found,) = everything(source)
    assert asked[0] == list(NEEDED)
    assert (found.instance, found.name) == (address, STEPS)
    assert found.labels == (("cluster", "0"), ("stage", "1"))
    assert list(found.points) == sorted(found.points)
    assert [value for _, value in found.points] == [n + 1.0 for n in range(len(found.points))]


def test_window_includes_both_of_its_ends() -> None:
    with answering(lambda request: page(1)) as address, scraping([address]) as source:
        eventually(lambda: points_of(source, address) >= 4)
        points = everything(source)[0].points
        (found,) = source.window(points[1][0], points[2][0])
        assert found.points == points[1:3]
        assert source.window(points[0][0] - 2, points[0][0] - 1) == []


def test_host_answers_with_its_metrics_that_the_scheduler_needs() -> None:
    metrics.STAGE_STEPS.labels("scraped", "1").inc(3)
    with serving(TelemetryServicer()) as address, scraping([address]) as source:
        eventually(lambda: points_of(source, address) >= 1)
        found = everything(source)
    assert {one.name for one in found} <= set(NEEDED)
    (steps,) = [one for one in found if ("cluster", "scraped") in one.labels]
    assert (steps.name, steps.points[0][1]) == (STEPS, 3)
    assert "collapipe_process_peak_resident_memory_bytes" in {one.name for one in found}


def test_host_that_does_not_run_has_no_series_and_affects_no_other() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so the port is taken, but nothing listens
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            answering(lambda request: page(1)) as address,
            scraping([dead, address, "no address"]) as source,
        ):
            eventually(lambda: points_of(source, address) >= 3)
            assert {one.instance for one in everything(source)} == {address}


def test_host_that_hangs_does_not_hold_up_the_others() -> None:
    done = threading.Event()

    def hang(request: telemetry_pb2.GetMetricsRequest) -> telemetry_pb2.GetMetricsResponse:
        done.wait(60)
        return page(1)

    with answering(hang) as slow, answering(lambda request: page(1)) as address:
        try:
            with scraping([slow, address]) as source:
                eventually(lambda: points_of(source, address) >= 3)
                assert points_of(source, slow) == 0
        finally:
            done.set()


@pytest.mark.parametrize(
    ("own_seconds", "is_slow"), [(0.0, True), (SLOW_SECONDS, False), (math.nan, False)]
)
def test_host_behind_a_slow_link_is_scraped_less_often(own_seconds: float, is_slow: bool) -> None:
    asked = []

    def answer(request: telemetry_pb2.GetMetricsRequest) -> telemetry_pb2.GetMetricsResponse:
        asked.append(request)
        time.sleep(SLOW_SECONDS)
        return page(1, own_seconds)

    with (
        answering(answer) as slow,
        answering(lambda request: page(1)) as address,
        scraping([slow, address]) as source,
    ):
        eventually(lambda: points_of(source, slow) >= 3)
        before = points_of(source, address)
        eventually(lambda: points_of(source, address) >= before + 5)
        if not is_slow:
            eventually(lambda: points_of(source, slow) >= 4)
    assert (len(asked) == 3) == is_slow
    assert source.max_gap_seconds > 30


def test_pages_that_failed_leave_a_gap_and_no_zero(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "collapipe.scheduler.scrape")
    numbers = itertools.count()

    def answer(request: telemetry_pb2.GetMetricsRequest) -> telemetry_pb2.GetMetricsResponse:
        number = next(numbers)
        if number in (1, 2):
            raise WrongStateError("not now")
        return page(5 + number)

    with answering(answer) as address, scraping([address]) as source:
        eventually(lambda: points_of(source, address) >= 3)
        (found,) = everything(source)
    assert [value for _, value in found.points[:3]] == [5, 8, 9]
    messages = [record.message for record in caplog.records if address in record.message]
    assert f"scraping {address} fails: not now" in messages[0]
    assert messages[1:] == [f"scraping {address} works again"]  # the second failure is not logged


def test_unexpected_error_affects_no_other_host_and_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def break_off(answer: telemetry_pb2.GetMetricsResponse, host_id: str) -> scrape.Page:
        if answer == page(7):
            read.append(answer)
            raise AttributeError("no such thing")
        return read_page(answer, host_id)

    monkeypatch.setattr(scrape, "read_page", break_off)
    with (
        answering(lambda request: page(7)) as odd,
        answering(lambda request: page(1)) as address,
        scraping([odd, address]) as source,
    ):
        eventually(lambda: points_of(source, address) >= 3 and len(read) >= 3)
        assert points_of(source, odd) == 0
    (logged,) = [record for record in caplog.records if odd in record.message]
    assert "fails: AttributeError: no such thing" in logged.message
    assert logged.exc_info is not None


def test_hosts_come_and_go_and_their_samples_are_forgotten_after_a_while() -> None:
    present: list[str] = []
    steps = itertools.count(1)
    with (
        answering(lambda request: page(next(steps))) as address,
        scraping(present, 0.02, keep_seconds=0.2) as source,
    ):
        assert everything(source) == []
        present.append(address)
        eventually(lambda: any(one.points[0][1] > 1 for one in everything(source)))
        present.clear()
        eventually(lambda: not everything(source))


def test_closed_source_raises_an_error() -> None:
    with answering(lambda request: page(1)) as address:
        with scraping([address]) as source:
            eventually(lambda: points_of(source, address) >= 1)
        with pytest.raises(PeerLostError, match="no longer scraped"):
            everything(source)
        source.close()  # closing twice is allowed


def test_interval_with_fewer_than_two_kept_scrapes_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"every 5 s and keeping 9 s"):
        ScrapeSource(lambda: (), ChannelPool(Security.insecure()), 5, keep_seconds=9)


@pytest.mark.parametrize(
    "samples",
    [
        [sample(STEPS, 1, stage=str(stage)) for stage in range(5001)],
        [sample(STEPS, 1, stage="x" * (1 << 20))],
    ],
)
def test_page_that_is_too_large_is_refused(samples: list[telemetry_pb2.MetricSample]) -> None:
    with pytest.raises(InvalidInputError, match=f"greedy sent {len(samples)} samples in"):
        read_page(telemetry_pb2.GetMetricsResponse(samples=samples), "greedy")


def test_host_cannot_speak_about_the_links_of_others() -> None:
    links = ["b>me", "me>b", "b>c", "me", "", ">", "mean>b", "b>me>c"]
    samples = [sample(LINK_BYTES, 1, link=link, codec="fp32") for link in links]
    found = read_page(telemetry_pb2.GetMetricsResponse(samples=samples), "me")
    assert [dict(labels)["link"] for _, labels in found] == ["b>me", "me>b", "me"]


def test_many_hosts_are_scraped_at_a_limited_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_PAGES_PER_SECOND", 5)
    started = time.monotonic()
    with (
        answering(lambda request: page(1)) as address,
        answering(lambda request: page(1)) as other,
        scraping([address, other]) as source,
    ):
        eventually(lambda: points_of(source, address) + points_of(source, other) >= 4)
        assert time.monotonic() - started >= 3 / 5
        assert source.pass_seconds == 2 / 5
        assert source.max_gap_seconds > 40
