"""Runs imitated jobs whose hosts die, restart, lie and get lost, through the real decisions about jobs.

    python -m benchmarks.disturbed_jobs --seeds 20000          the jobs of the seeds 0 to 19999
    python -m benchmarks.disturbed_jobs --seeds 5 --first 900  those of the seeds 900 to 904
    python -m benchmarks.disturbed_jobs --story 902            what happens in one job
    python -m benchmarks.disturbed_jobs --mutations            the seed that finds each fault of mutations.yaml
    python -m benchmarks.disturbed_jobs --mutations masked     only of those with this word in the name

The seeds are divided among as many processes as there are cores. Prints how the jobs ended and how many ran in a second of one core. The
exit status is 1 if a promise was broken, or if a fault was not found.
"""

import argparse
import os
import sys
import time
import types
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import yaml

from benchmarks.mutants import Mutant

ROOT = Path(__file__).parents[1]
MUTATIONS = ROOT / "tests" / "disturbed_jobs" / "mutations.yaml"
MOST_SEEDS = 10_000
"""Seeds within which each fault has to be found."""
_PART = 500
sys.path.insert(0, str(ROOT / "tests"))


def read_mutations() -> list[Mutant]:
    """Returns the faults of mutations.yaml."""
    return [Mutant(**each) for each in yaml.safe_load(MUTATIONS.read_text(encoding="utf-8"))]


def find(mutation: Mutant) -> tuple[int | None, str]:
    """Returns the first seed that finds a fault, and how; `None` if none of `MOST_SEEDS` does. Call it in a process of its own."""
    name = mutation.file.removeprefix("services/").removesuffix(".py").replace("/", ".")
    package, _, short = name.rpartition(".")
    __import__(package)
    module = types.ModuleType(name)
    sys.modules[name] = module
    setattr(sys.modules[package], short, module)
    source = (ROOT / mutation.file).read_text(encoding="utf-8").replace(mutation.old, mutation.new)
    exec(compile(source, mutation.file, "exec"), module.__dict__)
    from disturbed_jobs.runs import run_seeds

    for first in range(0, MOST_SEEDS, _PART):
        failures = run_seeds(range(first, first + _PART), most_failures=1).failures
        for seed, story in failures.items():
            return seed, story[-1].strip().splitlines()[-1]
    return None, ""


def run_mutations(word: str) -> int:
    """Prints the seed that finds each fault with a word in its name. Returns how many were not found."""
    mutations, lost = [each for each in read_mutations() if word in each.name], 0
    with get_context("spawn").Pool(maxtasksperchild=1) as processes:
        for mutation, (seed, how) in zip(mutations, processes.imap(find, mutations), strict=True):
            lost += seed is None
            print(
                f"{'LOST' if seed is None else f'seed {seed}':10}  {mutation.name}  {how}",
                flush=True,
            )
    print(f"{len(mutations) - lost} of {len(mutations)} faults are found within {MOST_SEEDS} seeds")
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--story", type=int)
    parser.add_argument("--mutations", nargs="?", const="", metavar="WORD")
    arguments = parser.parse_args()
    if arguments.mutations is not None:
        sys.exit(1 if run_mutations(arguments.mutations) else 0)
    from disturbed_jobs.runs import Runs, run_seeds, tell_story

    if arguments.story is not None:
        print("\n".join(tell_story(arguments.story)))
        return
    last = arguments.first + arguments.seeds
    parts = [range(at, min(at + _PART, last)) for at in range(arguments.first, last, _PART)]
    runs, began, cores = Runs(), time.monotonic(), min(os.cpu_count() or 1, len(parts))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as processes:
        for part in processes.map(run_seeds, parts):
            runs.add(part)
    seconds = time.monotonic() - began
    for seed, story in sorted(runs.failures.items())[:3]:
        print(
            "\n".join(chain(story, [f"again: python -m benchmarks.disturbed_jobs --story {seed}"]))
        )
    ends = ", ".join(
        f"{end.name if end else 'SUCCEEDED'} {n}" for end, n in runs.ends.most_common()
    )
    print(
        f"{arguments.seeds} jobs in {seconds:.0f} s: {ends}; {len(runs.failures)} broke a promise"
    )
    print(f"{arguments.seeds / seconds / cores:.0f} jobs in a second of one core")
    sys.exit(1 if runs.failures else 0)


if __name__ == "__main__":
    main()
