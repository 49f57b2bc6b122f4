"""Which jobs that have ended a scheduler keeps."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from collapipe.scheduler.job_store import JobDocument

_DAY_SECONDS = 86_400


@dataclass(frozen=True)
class Retention:
    """The rule by which jobs go away.

    Args:
        num_jobs: How many jobs that have ended are kept. The last to end are kept.
        days: How long after its end a job is kept. 0 means for ever.
    """

    num_jobs: int
    days: float

    def expired(self, jobs: Iterable[JobDocument], now: float) -> Iterator[tuple[str, str]]:
        """Yields the id of each job that is not kept, and the reason.

        Args:
            now: Unix time.
        """
        ended = [document for document in jobs if document.has_ended]
        ended.sort(key=lambda document: (document.ended_at, document.number), reverse=True)
        for position, document in enumerate(ended):
            if position >= self.num_jobs:
                yield (
                    document.job_id,
                    f"--keep-jobs {self.num_jobs}: {position} jobs ended after it",
                )
            elif self.days and now - document.ended_at > self.days * _DAY_SECONDS:
                yield document.job_id, f"--keep-jobs-days {self.days:g}: it ended earlier"
