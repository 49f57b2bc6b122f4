import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from unit.telemetry.answering import Form, answering

from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.telemetry.sources import NEEDED, Series, scrape
from collapipe.telemetry.sources.scrape import ScrapeSource, parse_page

STEPS = "collapipe_stage_steps_total"
LIMIT_SECONDS = 30.0
"""Time limit for something that takes milliseconds on an idle machine."""
PATIENT_SECONDS = 0.4
"""A scrape interval, which is also the time limit of a page, that is long enough for a loaded machine."""


def page(steps: float) -> bytes:
    return (
        f"# HELP {STEPS} Mini-batches.\n# TYPE {STEPS} counter\n"
        f'{STEPS}{{cluster="0",stage="1"}} {steps}\n'
        f'{STEPS}_more{{cluster="0",stage="1"}} 7\nprocess_cpu_seconds_total 3\n'
    ).encode()


@contextmanager
def scraping(*addresses: str, interval: float = 0.05, keep: float = 60.0) -> Iterator[ScrapeSource]:
    source = ScrapeSource(lambda: addresses, interval, keep)
    try:
        yield source
    finally:
        source.close()


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
    steps = itertools.count(1)
    with (
        answering(lambda form: (200, page(next(steps)))) as address,
        scraping(address, interval=PATIENT_SECONDS) as source,
    ):
        eventually(lambda: points_of(source, address) >= 3)
        (found,) = everything(source)
    assert (found.instance, found.name) == (address, STEPS)
    assert found.labels == (("cluster", "0"), ("stage", "1"))
    assert list(found.points) == sorted(found.points)
    assert [value for _, value in found.points] == [n + 1.0 for n in range(len(found.points))]


def test_window_includes_both_of_its_ends() -> None:
    with answering(lambda form: (200, page(1))) as address, scraping(address) as source:
        eventually(lambda: points_of(source, address) >= 4)
        points = everything(source)[0].points
        (found,) = source.window(points[1][0], points[2][0])
        assert found.points == points[1:3]
        assert source.window(points[0][0] - 2, points[0][0] - 1) == []


def test_hosts_are_asked_for_the_needed_metrics_only() -> None:
    asked: list[Form] = []

    def answer(form: Form) -> tuple[int, bytes]:
        asked.append(form)
        return 200, page(1)

    with answering(answer) as address, scraping(address) as source:
        eventually(lambda: points_of(source, address) >= 1)
    assert asked[0]["name[]"] == list(NEEDED)


def test_host_that_does_not_run_has_no_series_and_affects_no_other() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so the port is taken, but nothing listens
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            answering(lambda form: (200, page(1))) as address,
            scraping(dead, address, "", "no address") as source,
        ):
            eventually(lambda: points_of(source, address) >= 3)
            assert {one.instance for one in everything(source)} == {address}


def test_host_that_hangs_does_not_hold_up_the_others() -> None:
    done = threading.Event()

    def hang(form: Form) -> tuple[int, bytes]:
        done.wait(60)
        return 200, page(1)

    with answering(hang) as slow, answering(lambda form: (200, page(1))) as address:
        try:
            with scraping(slow, address) as source:
                eventually(lambda: points_of(source, address) >= 3)
                assert points_of(source, slow) == 0
        finally:
            done.set()


def test_host_behind_a_slow_link_is_scraped_less_often_than_the_others() -> None:
    asked: list[Form] = []

    def answer(form: Form) -> tuple[int, bytes]:
        asked.append(form)
        return 200, page(1)

    with (
        answering(answer, body_seconds=2.0) as slow,  # so the pause is 18 s
        answering(lambda form: (200, page(1))) as address,
        scraping(slow, address) as source,
    ):
        eventually(lambda: points_of(source, slow) >= 1)
        before = points_of(source, address)
        eventually(lambda: points_of(source, address) >= before + 5)
    assert len(asked) == 1
    assert source.max_gap_seconds > 30


def test_pages_that_failed_leave_a_gap_and_no_zero(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "collapipe.telemetry.sources.scrape")
    answers = iter([(200, page(5)), (500, b"no"), (200, b"\xff"), (200, page(6))])
    with (
        answering(lambda form: next(answers, (200, page(6)))) as address,
        scraping(address, interval=PATIENT_SECONDS) as source,
    ):
        eventually(lambda: points_of(source, address) >= 3)
        (found,) = everything(source)
    assert [value for _, value in found.points[:3]] == [5, 6, 6]
    messages = [record.message for record in caplog.records if address in record.message]
    assert "HTTP 500" in messages[0] and f"scraping {address} fails" in messages[0]
    assert messages[1:] == [f"scraping {address} works again"]  # the second failure is not logged


def test_unexpected_error_affects_no_other_host_and_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def break_off(body: bytes) -> dict[object, float]:
        if body == page(7):
            read.append(body)
            raise AttributeError("no such thing")
        return parse_page(body)

    monkeypatch.setattr(scrape, "parse_page", break_off)
    with (
        answering(lambda form: (200, page(7))) as odd,
        answering(lambda form: (200, page(1))) as address,
        scraping(odd, address, interval=PATIENT_SECONDS) as source,
    ):
        eventually(lambda: points_of(source, address) >= 3 and len(read) >= 3)
        assert points_of(source, odd) == 0
    (logged,) = [record for record in caplog.records if odd in record.message]
    assert "fails: AttributeError: no such thing" in logged.message
    assert logged.exc_info is not None


def test_samples_are_forgotten_after_a_while() -> None:
    present = ["host"]
    steps = itertools.count(1)
    with answering(lambda form: (200, page(next(steps)))) as address:
        present[:] = [address]
        source = ScrapeSource(lambda: tuple(present), 0.02, keep_seconds=0.2)
        try:
            eventually(lambda: bool(everything(source)) and everything(source)[0].points[0][1] > 1)
            present.clear()
            eventually(lambda: not everything(source))
        finally:
            source.close()


def test_hosts_that_come_later_are_scraped_too() -> None:
    present: list[str] = []
    with answering(lambda form: (200, page(1))) as address:
        source = ScrapeSource(lambda: tuple(present), 0.02)
        try:
            assert everything(source) == []
            present.append(address)
            eventually(lambda: points_of(source, address) >= 1)
        finally:
            source.close()


def test_closed_source_raises_an_error() -> None:
    with answering(lambda form: (200, page(1))) as address:
        with scraping(address) as source:
            eventually(lambda: points_of(source, address) >= 1)
        with pytest.raises(PeerLostError, match="no longer scraped"):
            everything(source)
        source.close()  # closing twice is allowed


def test_interval_with_fewer_than_two_kept_scrapes_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"every 5 s and keeping 9 s"):
        ScrapeSource(lambda: (), interval_seconds=5, keep_seconds=9)


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe",
        f'{STEPS}{{cluster="0" 3'.encode(),
        f"{STEPS} many".encode(),
        STEPS.encode(),
        f"{STEPS}{{".encode(),
    ],
)
def test_page_in_another_format_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInputError, match="text format"):
        parse_page(body)


def test_page_with_too_many_series_is_refused() -> None:
    body = "\n".join(f'{STEPS}{{stage="{stage}"}} 1' for stage in range(5001))
    with pytest.raises(InvalidInputError, match="5001 series"):
        parse_page(body.encode())


def test_page_without_needed_metrics_has_no_samples() -> None:
    assert parse_page(b"<html>hello</html>") == {}


def test_many_hosts_are_scraped_at_a_limited_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_PAGES_PER_SECOND", 5)
    started = time.monotonic()
    with answering(lambda form: (200, page(1))) as address:
        other_name = address.replace("127.0.0.1", "localhost")
        with scraping(address, other_name) as source:
            eventually(lambda: points_of(source, address) + points_of(source, other_name) >= 4)
            assert time.monotonic() - started >= 3 / 5
            assert source.pass_seconds == 2 / 5
            assert source.max_gap_seconds > 40
