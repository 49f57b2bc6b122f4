"""What a report of a job has: first the job, then its rounds, with the keys of `Records.rounds` and `Records.round`."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from collapipe.errors import NotFoundError
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.job_store import JobDocument
from collapipe.scheduler.web.job_values import WatchedJob, config_of, status_of, trouble_of
from collapipe.scheduler.web.records import Records
from collapipe.scheduler.web.values import Value


def report(
    document: JobDocument, records: Records, log: EventLog | None, queued: Sequence[str]
) -> Iterator[Value]:
    """Yields the parts of a report. It explains only the rounds whose plans are new, and the last one.

    Args:
        log: The events of the job; `None` if they are not kept any more.
        queued: Ids of the jobs that wait for their turn.

    Raises:
        CorruptDataError: A record is damaged.
    """
    yield {
        **status_of(document, queued),
        "written": time.time(),
        "settings": config_of(document).model_dump(mode="json"),
        "trouble": trouble_of(document),
        "events": None if log is None else WatchedJob.of(document, log).detail()["events"],
    }
    page: Any = {"next": 0, "done": False}
    holders = None
    while not page["done"]:
        page = records.rounds(document.job_id, page["next"])
        for summary in page["rounds"]:
            is_last = page["done"] and summary is page["rounds"][-1]
            explained = is_last or summary.get("holders") != holders
            holders = summary.get("holders")
            index = summary["round"] - 1
            try:
                detail = records.round(document.job_id, index, (), explained=explained)
            except NotFoundError:  # An older version has not recorded it.
                detail = {}
            yield {**detail, **summary, "every": page["every"]}
