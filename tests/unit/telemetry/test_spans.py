"""Spans are kept in a ring, and belong to the round that was current when they ended."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from collapipe.telemetry import spans
from collapipe.telemetry.spans import SpanLog


def recorded(log: SpanLog, round_index: int = 0, attempt: int = 0) -> list[int]:
    """Returns the steps of the spans of a round."""
    return [span.step for span in log.of_round("job", round_index, attempt)]


def record(log: SpanLog, steps: range) -> None:
    for step in steps:
        log.record("compute", "forward", time.perf_counter(), step=step)


def test_span_comes_back_as_it_was_recorded() -> None:
    log = SpanLog()
    log.begin_round("job", 3, 1)
    started = time.perf_counter()
    numbers = {"step": 2, "micro_batch": 5, "unit": 7, "num_bytes": 2**40}
    log.record("send to b", "send forward", started, peer="b", codec="int8", **numbers)
    log.record("compute", "update", started)
    sent, update = log.of_round("job", 3, 1)
    names = {"track": "send to b", "name": "send forward", "peer": "b", "codec": "int8"}
    assert asdict(sent) == {**names, **numbers, "started": started, "ended": sent.ended}
    assert started <= sent.ended <= time.perf_counter()
    assert (update.step, update.micro_batch, update.unit) == (-1, -1, -1)
    assert (update.num_bytes, update.peer, update.codec) == (0, "", "")


def test_full_ring_forgets_the_oldest_spans() -> None:
    log = SpanLog(capacity=10)
    log.begin_round("job", 0, 0)
    record(log, range(25))
    assert recorded(log) == list(range(15, 25))
    log.begin_round("job", 1, 0)
    record(log, range(8))
    assert recorded(log, 0) == [23, 24]
    record(log, range(8, 12))
    assert not recorded(log, 0)
    assert recorded(log, 1) == list(range(2, 12))


def test_spans_belong_to_the_round_that_was_current() -> None:
    log = SpanLog(capacity=10)
    record(log, range(2))  # Before any round.
    for round_index, attempt in ((0, 0), (0, 1), (1, 0)):
        log.begin_round("job", round_index, attempt)
        log.begin_round("job", round_index, attempt)  # Another session of the same round.
        record(log, range(10 * round_index + attempt, 10 * round_index + attempt + 2))
    assert recorded(log, 0, 0) == [0, 1]
    assert recorded(log, 0, 1) == [1, 2]
    assert recorded(log, 1, 0) == [10, 11]
    assert not recorded(log, 2, 0)
    assert not list(log.of_round("another job", 0, 0))


def test_round_lasts_until_its_job_begins_another_or_is_over_whatever_other_jobs_do() -> None:
    log = SpanLog()
    log.begin_round("job", 0, 0)
    record(log, range(1))
    log.begin_round("other", 0, 0)
    record(log, range(1, 2))
    log.begin_round("job", 1, 0)
    record(log, range(2, 3))
    log.end_job("job")
    record(log, range(3, 4))
    assert recorded(log, 0) == [0, 1]
    assert recorded(log, 1) == [2]
    assert [span.step for span in log.of_round("other", 0, 0)] == [1, 2, 3]


def test_block_is_recorded_with_its_bytes_even_if_it_raises() -> None:
    log = SpanLog()
    log.begin_round("job", 0, 0)
    with pytest.raises(ValueError), log.span("weights", "fetch", unit=3) as moved:
        moved.num_bytes = 17
        raise ValueError
    [span] = log.of_round("job", 0, 0)
    assert (span.track, span.name, span.unit, span.num_bytes) == ("weights", "fetch", 3, 17)


def test_number_of_labels_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_MOST_LABELS", 8)
    log = SpanLog()
    log.begin_round("job", 0, 0)
    for number in range(20):
        log.record(f"track {number}", "forward", time.perf_counter())
    tracks = [span.track for span in log.of_round("job", 0, 0)]
    assert tracks[0] == "track 0" and tracks[-1] == "(other)"
    assert len(set(tracks)) == 8


def test_threads_lose_no_span() -> None:
    log = SpanLog()
    log.begin_round("job", 0, 0)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(record, [log] * 4, [range(1000 * n, 1000 * (n + 1)) for n in range(4)]))
    assert sorted(recorded(log)) == list(range(4000))
