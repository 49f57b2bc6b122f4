import threading
from collections.abc import Iterator

import pytest

from collapipe.scheduler import events
from collapipe.scheduler.events import Event, EventLog
from collapipe.v1.job_pb2 import RoundProgress
from collapipe.v1.scheduler_pb2 import JobStatus

SILENCE = 20.0


def status(number: int) -> Event:
    return Event(status=JobStatus(message=str(number)))


def progress(cluster_index: int, steps: int) -> Event:
    return Event(progress=RoundProgress(cluster_index=cluster_index, steps_done=steps))


def texts_of(watched: Iterator[Event | None]) -> list[str]:
    """The events of a closed log, as short texts."""
    words = []
    for event in watched:
        assert event is not None
        if event.HasField("progress"):
            words.append(f"{event.progress.cluster_index}: {event.progress.steps_done}")
        else:
            words.append(event.status.message)
    return words


def test_late_watcher_gets_all_events_and_the_end() -> None:
    log = EventLog()
    for number in range(3):
        log.publish(status(number))
    log.close()
    for _ in range(2):
        assert texts_of(log.watch(SILENCE)) == ["0", "1", "2"]


def test_watcher_that_was_interrupted_gets_only_later_events() -> None:
    log = EventLog()
    for number in range(3):
        log.publish(status(number))
    log.close()
    events = [event for event in log.watch(SILENCE) if event is not None]
    assert [(event.log_id, event.number) for event in events] == [
        (log.log_id, n) for n in (1, 2, 3)
    ]
    assert texts_of(log.watch(SILENCE, 2)) == ["2"]


def test_watcher_gets_each_event_once_when_it_happens() -> None:
    log = EventLog()
    watched = log.watch(SILENCE)
    for number in range(3):
        log.publish(status(number))
        event = next(watched)
        assert event is not None
        assert event.status.message == str(number)
    log.close()
    assert list(watched) == []


def test_waiting_watcher_gets_a_new_event() -> None:
    log = EventLog()
    first: list[Event | None] = []
    watcher = threading.Thread(target=lambda: first.append(next(log.watch(SILENCE))), daemon=True)
    watcher.start()
    log.publish(status(7))
    watcher.join(10)
    assert not watcher.is_alive()
    assert first[0] is not None
    assert first[0].status.message == "7"


def test_silence_yields_none_and_loses_no_event() -> None:
    log = EventLog()
    watched = log.watch(0.01)
    assert [next(watched), next(watched)] == [None, None]
    log.publish(status(1))
    event = next(watched)
    assert event is not None
    assert event.status.message == "1"


def test_only_the_last_progress_of_a_cluster_is_kept() -> None:
    log = EventLog()
    for steps in range(5):
        log.publish(progress(0, steps))
        log.publish(progress(1, 10 * steps))
    log.publish(status(9))
    log.close()
    assert texts_of(log.watch(SILENCE)) == ["0: 4", "1: 40", "9"]


def test_long_job_drops_its_oldest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_KEPT_EVENTS", 3)
    log = EventLog()
    watched = log.watch(SILENCE)
    for number in range(5):
        log.publish(status(number))
    log.close()
    assert texts_of(watched) == ["2", "3", "4"]


def test_events_carry_their_elapsed_time() -> None:
    log = EventLog()
    for number in range(2):
        log.publish(status(number))
    log.close()
    one, two = log.watch(SILENCE)
    assert one is not None
    assert two is not None
    assert 0 <= one.elapsed_seconds <= two.elapsed_seconds < 60


def test_watcher_of_too_much_progress_gets_only_other_events_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "_PROGRESS_PER_SECOND", 1e-3)
    log = EventLog()
    log.publish(progress(0, 1))
    watched = log.watch(0.01)
    first = next(watched)
    assert first is not None
    assert first.progress.steps_done == 1
    log.publish(progress(0, 2))
    assert [next(watched), next(watched)] == [None, None]
    log.publish(progress(1, 3))
    log.publish(status(4))
    log.publish(progress(0, 5))
    log.close()
    assert texts_of(watched) == ["4"]


def test_watcher_gets_progress_without_another_event() -> None:
    log = EventLog()
    watched = log.watch(SILENCE)
    for steps in range(3):
        log.publish(progress(0, steps))
        event = next(watched)
        assert event is not None
        assert event.progress.steps_done == steps
