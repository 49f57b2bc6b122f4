"""Repeats tests beside busy processes, and prints each test that did not always pass.

    make flaky N=10                                      the tests of `make test`
    make flaky N=5 SUITE="tests/integration tests/faults"

Two other processes compute all the time, which leaves two cores about half of their speed. The exit status is 1 if a test
failed, if it did not have the same result in all runs, or if no test ran.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
NUM_BUSY = 2


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs processes that compute without an end."""
    line = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(line) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_once(suite: Sequence[str], report: Path) -> dict[str, str]:
    """Runs tests, and returns the outcome of each: "passed", "failed" or "skipped"."""
    line = [sys.executable, "-m", "pytest", *suite, "--numprocesses=2", "--quiet"]
    report.unlink(missing_ok=True)
    ended = subprocess.run([*line, f"--junitxml={report}"], cwd=ROOT, check=False)
    if ended.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with exit status {ended.returncode}: see what it said")
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes[name] = "skipped" if "skipped" in kinds else outcome
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument(
        "suite", nargs="*", help="arguments of pytest; by default, those of `make test`"
    )
    options = parser.parse_args()
    seen: dict[str, list[str]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, busy_processes(NUM_BUSY):
        for number in range(options.runs):
            began_at = time.monotonic()
            for name, outcome in run_once(options.suite, Path(folder) / "report.xml").items():
                seen[name].append(outcome)
            print(f"run {number + 1}: {time.monotonic() - began_at:.0f} s", flush=True)
    unsteady = {
        name: outcomes
        for name, outcomes in seen.items()
        if "failed" in outcomes or len(set(outcomes)) > 1 or len(outcomes) < options.runs
    }
    for name, outcomes in unsteady.items():
        print(f"{name}: {outcomes.count('passed')} of {options.runs} passed")
    print(f"{len(unsteady)} of {len(seen)} tests were not steady in {options.runs} runs")
    return 1 if unsteady or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
