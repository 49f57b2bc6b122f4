"""Deletes what a host keeps of jobs that the scheduler has deleted."""

import logging
import threading
from collections.abc import Iterable

from collapipe.errors import CollapipeError, InvalidInputError
from collapipe.weights.blob_store import JobStores

logger = logging.getLogger(__name__)


class JobDeletion:
    """Deletes the directories of jobs in a thread of its own, because many gigabytes take longer than a heartbeat may."""

    def __init__(self, stores: JobStores) -> None:
        self._stores = stores
        self._waiting: set[str] = set()
        self._told: dict[str, str] = {}
        """Why jobs could not be deleted, as the log has said."""
        self._thread: threading.Thread | None = None

    def go_on(self, job_ids: Iterable[str]) -> None:
        """Deletes these jobs, and earlier ones that were in use. Returns at once, and is called after every heartbeat."""
        self._waiting.update(job_ids)
        if self._waiting and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(
                target=self._delete, args=(sorted(self._waiting),), name="job deletion", daemon=True
            )
            self._thread.start()

    def _delete(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            try:
                if not self._stores.delete_job(job_id):
                    continue  # It is in use, and waits for the next heartbeat.
            except InvalidInputError as error:
                logger.warning("job %r cannot be deleted: %s", job_id, error)
            except (CollapipeError, OSError) as error:
                if self._told.get(job_id) != str(error):
                    logger.warning(
                        "job %s cannot be deleted yet, and each heartbeat tries it again: %s",
                        job_id,
                        error,
                    )
                self._told[job_id] = str(error)
                continue
            self._told.pop(job_id, None)
            self._waiting.discard(job_id)
