"""What a report of a job has: first the job, then its rounds, with the keys of `Records.rounds` and `Records.round`."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from collapipe.errors import NotFoundError
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.job_documents import JobDocument
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.web.job_values import (
    MOST_EVENTS,
    WatchedJob,
    config_of,
    status_of,
    trouble_of,
)
from collapipe.scheduler.web.records import Records
from collapipe.scheduler.web.values import Value, number

_MOST_EXPLAINED = 20
"""Rounds of a report that are explained because their plans are new. Each explanation takes long with many clusters."""


def events_of(
    document: JobDocument, jobs: JobStore, log: EventLog | None
) -> list[dict[str, Any]] | None:
    """Returns the last events of a job: the stored ones, then those of its log. `None` if there are neither.

    Raises:
        CorruptDataError: The stored ones are damaged.
    """
    stored = jobs.find_events(document.job_id)
    if log is None:
        return stored
    told: Any = WatchedJob.of(document, log).detail()["events"]
    began = number(log.began, 13)  # Events have their time with so many digits.
    earlier = [event for event in stored or () if event["at"] < began]
    return [*earlier, *told][-MOST_EVENTS:]


def report(
    document: JobDocument,
    records: Records,
    events: list[dict[str, Any]] | None,
    queued: Sequence[str],
) -> Iterator[Value]:
    """Yields the parts of a report. It explains the first rounds whose plans are new, and the last round.

    Args:
        events: Those of `events_of`.
        queued: Ids of the jobs that wait for their turn.

    Raises:
        CorruptDataError: A record is damaged.
    """
    yield {
        **status_of(document, queued),
        "written": time.time(),
        "settings": config_of(document).model_dump(mode="json"),
        "trouble": trouble_of(document),
        "events": events,
    }
    page: Any = {"next": 0, "done": False}
    holders, num_explained = None, 0
    while not page["done"]:
        page = records.rounds(document.job_id, page["next"])
        for summary in page["rounds"]:
            is_last = page["done"] and summary is page["rounds"][-1]
            is_new = summary.get("holders") != holders
            explained = is_last or (is_new and num_explained < _MOST_EXPLAINED)
            num_explained += explained
            holders = summary.get("holders")
            index = summary["round"] - 1
            try:
                detail = records.round(document.job_id, index, explained=explained)
            except NotFoundError:  # An older version has not recorded it.
                detail = {}
            yield {**detail, **summary, "every": page["every"]}
