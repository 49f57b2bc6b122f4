"""Do memory, descriptors, threads and disk of the processes grow with the number of rounds and jobs?

    python -m benchmarks.soak --rounds 2000 --jobs 50

Every process runs on this machine, over loopback. One job with many rounds comes first, then many jobs of two rounds with a
larger model. The processes are not restarted in between. What they hold is measured at 10 %, 50 % and 100 % of the rounds,
and of the jobs. The scheduler keeps two ended jobs, so that the disks of jobs can be flat.

Prints a table in Markdown for the rounds and one for the jobs. The three values of a cell belong to the three moments. The
scheduler stores rows for each round, so its disk grows with rounds. Fails if memory, descriptors or threads grew by more
than the limits below between the first and the last moment.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from long_runs import Held, check_flat, measure, run_jobs, run_rounds  # noqa: E402

from collapipe_client import LocalTestbed  # noqa: E402

SHARES = (0.1, 0.5, 1.0)
KEPT_JOBS = 2
ALLOWED_BYTES = 24 << 20
"""13 MB were measured in 2,000 rounds, and 12 MB in 50 jobs."""
ALLOWED_HANDLES = 24
"""Control units gained 16 threads in the first 1,000 rounds."""


def main() -> None:
    """Runs the rounds and the jobs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keeping = ("--keep-jobs", str(KEPT_JOBS))
        with LocalTestbed([2, 2], folder / "testbed", scheduler_options=keeping) as testbed:
            testbed.wait_until_registered()
            rounds = run_rounds(testbed, folder, options.rounds)
            report(testbed, rounds, options.rounds, "rounds")
            report(testbed, run_jobs(testbed, folder, options.jobs), options.jobs, "jobs")


def report(testbed: LocalTestbed, numbers: Iterable[int], last: int, unit: str) -> None:
    """Measures at the shares of `last`, and prints the table."""
    started = time.monotonic()
    marks = [math.ceil(share * last) for share in SHARES]
    measured = {number: measure(testbed) for number in numbers if number in marks}
    seconds = time.monotonic() - started
    print(f"\nAfter {', '.join(map(str, measured))} {unit}, in {seconds:.0f} s:\n")
    print("| process | memory, MB | descriptors | threads | disk, kB |\n|---|---|---|---|---|")
    for name in next(iter(measured.values())):
        held = [moment[name] for moment in measured.values()]
        print(f"| {name} | {' | '.join(_cells(held))} |", flush=True)
    first, *_, latest = measured.values()
    check_flat(first, latest, ALLOWED_BYTES, ALLOWED_HANDLES)


def _cells(held: list[Held]) -> list[str]:
    columns = (
        [f"{each.memory_bytes / 1e6:.0f}" for each in held],
        [str(each.descriptors) for each in held],
        [str(each.threads) for each in held],
        [f"{each.disk_bytes / 1e3:.0f}" for each in held],
    )
    return [", ".join(column) for column in columns]


if __name__ == "__main__":
    main()
