"""What watchers of the events of a job get, and when."""

import threading

import pytest

from collapipe.scheduler import events
from collapipe.scheduler.events import Event, EventLog, progress_pause
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
    if event.batch:
        return ", ".join(map(text_of, event.batch))
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


def test_watchers_wake_each_other_for_a_new_event_and_the_end(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_PROGRESS_SHARE", 1e-9)  # None of them wakes by itself.
    got = threading.Semaphore(0)

    def watch() -> None:
        for _ in log.watch(SILENCE):
            got.release()
        got.release()

    watchers = [threading.Thread(target=watch, daemon=True) for _ in range(5)]
    for watcher in watchers:
        watcher.start()
    for tell in (lambda: log.publish(status(1)), lambda: log.publish(status(2)), log.close):
        tell()
        assert all(got.acquire(timeout=SILENCE / 2) for _ in watchers), "a watcher was not woken"


def test_silence_yields_none_and_loses_no_event(log: EventLog) -> None:
    watched = log.watch(0.01)
    assert [next(watched), next(watched)] == [None, None]
    log.publish(status(1))
    assert text_of(next(watched)) == "1"


def test_only_the_last_progress_of_a_cluster_is_kept(log: EventLog) -> None:
    told = [progress(index, steps + index) for steps in range(5) for index in range(2)]
    publish(log, *told, status(9))
    assert list(map(text_of, log.watch(SILENCE))) == ["0: 4, 1: 5", "9"]


def test_progress_of_several_clusters_comes_in_messages_of_limited_size(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [progress(index, 7) for index in range(5)]
    publish(log, status(1), *told[:2], status(2), *told[2:], status(3))
    messages = list(log.watch(SILENCE))
    assert list(map(text_of, messages)) == ["1", "0: 7, 1: 7", "2", "2: 7, 3: 7, 4: 7", "3"]
    numbers = [message.number for message in messages if message]
    assert numbers == [1, 3, 4, 7, 8]
    assert [event.number for message in messages if message for event in message.batch] == [
        *(2, 3),
        *(5, 6, 7),
    ]
    times = [message.elapsed_seconds for message in messages if message]
    assert times == sorted(times) and {message.log_id for message in messages if message} == {
        log.log_id
    }
    monkeypatch.setattr(events, "_BATCH_BYTES", 2 * told[4].ByteSize())
    texts = list(map(text_of, log.watch(SILENCE)))
    assert texts == ["1", "0: 7, 1: 7", "2", "2: 7, 3: 7", "4: 7", "3"]


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
    monkeypatch.setattr(events, "_PROGRESS_SHARE", 1e-6)
    log.publish(progress(0, 1))
    watched = log.watch(0.01)
    assert text_of(next(watched)) == "0: 1"
    log.publish(progress(0, 2))
    assert [next(watched), next(watched)] == [None, None]
    publish(log, progress(1, 3), status(4), progress(0, 5))
    assert list(map(text_of, watched)) == ["4"]


@pytest.mark.parametrize(
    ("num_watchers", "num_clusters", "seconds"),
    [(1, 1, 0.2), (1000, 1, 2.05), (200, 100, 1.4), (200, 1000, 10.4)],
)
def test_progress_comes_less_often_with_more_watchers_or_clusters(
    num_watchers: int, num_clusters: int, seconds: float
) -> None:
    assert progress_pause(num_watchers, num_clusters) == pytest.approx(seconds, rel=0.03)
