"""Which jobs that have ended a scheduler keeps."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from collapipe.scheduler.job_documents import JobDocument

_DAY_SECONDS = 86_400


@dataclass(frozen=True)
class Retention:
    """The rule by which jobs go away. Each owner has its own count, so nobody's jobs push out those of another.

    Args:
        num_jobs: How many jobs of one owner that have ended are kept. The last to end are kept.
        days: How long after its end a job is kept. 0 means for ever.
        num_bytes: How many bytes these jobs of one owner may take on the edge server's disk. 0 means any number. The last one
            stays in any case.
    """

    num_jobs: int
    days: float
    num_bytes: int = 0

    def expired(self, jobs: Iterable[JobDocument], now: float) -> Iterator[tuple[str, str]]:
        """Yields the id of each job that is not kept, and the reason.

        Args:
            now: Unix time.
        """
        ended = [document for document in jobs if document.has_ended]
        ended.sort(key=lambda job: (job.num_ended, job.ended_at, job.number), reverse=True)
        counted, total = Counter[str](), Counter[str]()
        for document in ended:
            position = counted[document.owner]
            counted[document.owner] += 1
            total[document.owner] += document.stored_bytes
            num_bytes = total[document.owner]
            if position >= self.num_jobs:
                yield (
                    document.job_id,
                    f"--keep-jobs {self.num_jobs}: {position} jobs of its owner ended after it",
                )
            elif self.days and now - document.ended_at > self.days * _DAY_SECONDS:
                yield document.job_id, f"--keep-jobs-days {self.days:g}: it ended earlier"
            elif position and self.num_bytes and num_bytes > self.num_bytes:
                yield (
                    document.job_id,
                    f"--keep-jobs-gb {self.num_bytes / 1e9:g}: with the jobs of its owner that ended after it, it takes {num_bytes / 1e9:.1f} GB",
                )
