"""What many tests of the scheduler need: the store of jobs, one job with its events, and channels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from planned_jobs import Clock, job

from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.job_documents import JobDocument
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path)


@pytest.fixture
def document(store: JobStore) -> JobDocument:
    """One job in the store."""
    return store.create(job())


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture
def progress(document: JobDocument, store: JobStore, events: EventLog) -> JobProgress:
    return JobProgress(document, store, events)


@pytest.fixture
def channels() -> Iterator[ChannelPool]:
    pool = ChannelPool(Security.insecure())
    yield pool
    pool.close()
