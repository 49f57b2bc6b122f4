"""What watchers of the events of a job get, and when."""

import threading

import pytest

from collapipe.scheduler import events
from collapipe.scheduler.events import Event, EventLog
from collapipe.v1.job_pb2 import RoundProgress
from collapipe.v1.scheduler_pb2 import Incident, JobStatus, JobWarning

SILENCE = 60.0


def status(number: int) -> Event:
    return Event(status=JobStatus(message=str(number)))


def progress(cluster_index: int, steps: int) -> Event:
    return Event(progress=RoundProgress(cluster_index=cluster_index, steps_done=steps))


def text_of(event: Event | None) -> str:
    if event is None:
        return "silence"
    if event.HasField("progress"):
        return f"{event.progress.cluster_index}: {event.progress.steps_done}"
    return event.status.message


@pytest.fixture
def log() -> EventLog:
    return EventLog()


def publish(log: EventLog, *published: Event) -> None:
    """Publishes the last events of a log."""
    for event in published:
        log.publish(event)
    log.close()


def test_late_watcher_gets_all_events_or_those_after_an_interruption(log: EventLog) -> None:
    publish(log, *map(status, range(3)))
    for _ in range(2):
        assert list(map(text_of, log.watch(SILENCE))) == ["0", "1", "2"]
    assert list(map(text_of, log.watch(SILENCE, 2))) == ["2"]
    places = [(event.log_id, event.number) for event in log.watch(SILENCE) if event]
    assert places == [(log.log_id, number) for number in (1, 2, 3)]
    times = [event.elapsed_seconds for event in log.watch(SILENCE) if event]
    assert times[0] >= 0 and times == sorted(times) and times[-1] < 3600


def test_watcher_gets_each_event_once_when_it_happens(log: EventLog) -> None:
    watched = log.watch(SILENCE)
    for event in (status(0), status(1), progress(0, 1), progress(0, 2)):
        log.publish(event)
        assert text_of(next(watched)) == text_of(event)
    log.close()
    assert list(watched) == []


def test_waiting_watcher_gets_a_new_event(log: EventLog) -> None:
    first: list[Event | None] = []
    watcher = threading.Thread(target=lambda: first.append(next(log.watch(SILENCE))), daemon=True)
    watcher.start()
    log.publish(status(7))
    watcher.join(SILENCE)
    assert [text_of(event) for event in first] == ["7"]


def test_silence_yields_none_and_loses_no_event(log: EventLog) -> None:
    watched = log.watch(0.01)
    assert [next(watched), next(watched)] == [None, None]
    log.publish(status(1))
    assert text_of(next(watched)) == "1"


def test_only_the_last_progress_of_a_cluster_is_kept(log: EventLog) -> None:
    told = [progress(index, steps + index) for steps in range(5) for index in range(2)]
    publish(log, *told, status(9))
    assert list(map(text_of, log.watch(SILENCE))) == ["0: 4", "1: 5", "9"]


def test_long_job_drops_its_oldest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_KEPT_EVENTS", 3)
    log = EventLog()
    watched = log.watch(SILENCE)
    publish(log, *map(status, range(5)))
    assert list(map(text_of, watched)) == ["2", "3", "4"]


def test_job_with_large_events_drops_its_oldest_ones_but_never_the_last(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_KEPT_BYTES", 500)
    for number in (1, 2, 3):
        log.publish(Event(status=JobStatus(message=f"{number}", name="x" * 150)))
    assert [text_of(event) for event in log.kept()] == ["2", "3"]
    log.publish(Event(status=JobStatus(message="large", name="x" * 1000)))
    assert [text_of(event) for event in log.kept()] == ["large"]
    log.publish(status(5))
    assert [text_of(event) for event in log.kept()] == ["5"]


def test_frequent_events_displace_no_incident_and_no_warning(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_KEPT_EVENTS", 8)
    log.publish(Event(incident=Incident(message="lost")))
    log.publish(Event(warning=JobWarning(message="few rows")))
    for number in range(20):
        log.publish(status(number))
    assert [event.number for event in log.kept()] == [1, 2, *range(15, 23)]
    for _ in range(20):
        log.publish(Event(incident=Incident(message="lost")))
    assert [event.number for event in log.kept()] == [*range(15, 23), 41, 42]


def test_watcher_gets_only_some_progress(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_PROGRESS_PER_SECOND", 1e-3)
    log.publish(progress(0, 1))
    watched = log.watch(0.01)
    assert text_of(next(watched)) == "0: 1"
    log.publish(progress(0, 2))
    assert [next(watched), next(watched)] == [None, None]
    publish(log, progress(1, 3), status(4), progress(0, 5))
    assert list(map(text_of, watched)) == ["4"]
