"""Runs many imitated jobs, and tells the story of each that broke a promise."""

import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from collapipe.job_life.attempt import Phase
from collapipe.job_life.job_run import JobPhase
from collapipe.job_life.tries import GivesUp

from .job import ImitatedJob

_STORY_LINES = 200


@dataclass
class Runs:
    """What came of jobs.

    Args:
        ends: How many ended for each reason; `None` for those that succeeded.
        seen: The cases of the machine that occurred.
        failures: The story of each job that broke a promise, by its seed.
    """

    ends: Counter[GivesUp | None] = field(default_factory=Counter)
    seen: set[tuple[Phase | JobPhase, type]] = field(default_factory=set)
    failures: dict[int, list[str]] = field(default_factory=dict)

    def add(self, other: "Runs") -> None:
        """Adds what came of other jobs."""
        self.ends.update(other.ends)
        self.seen |= other.seen
        self.failures |= other.failures


def run_seeds(seeds: Iterable[int], *, most_failures: int = 3) -> Runs:
    """Runs the jobs of some seeds, until so many of them have broken a promise."""
    runs = Runs()
    for seed in seeds:
        job = ImitatedJob(seed)
        try:
            runs.ends[job.run()] += 1
        except Exception:
            runs.failures[seed] = tell_story(seed)
            if len(runs.failures) >= most_failures:
                break
        runs.seen |= job.seen
    return runs


def tell_story(seed: int) -> list[str]:
    """Returns what happens in the job of a seed, in lines, up to the promise that it breaks."""
    job = ImitatedJob(seed, tells=True)
    try:
        end = f"it ends: {job.run() or 'succeeded'}"
    except Exception:
        end = traceback.format_exc()
    settings: Mapping[str, object] = vars(job.rules)
    return [f"seed {seed}: {settings}", *job.world.story[-_STORY_LINES:], end]
