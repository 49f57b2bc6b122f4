"""Puts each fault into a copy of the code of its own, and reports which test finds it.

    python -m benchmarks.mutants                    all faults of benchmarks/mutants.yaml
    python -m benchmarks.mutants NAME...            some of them
    python -m benchmarks.mutants --circle ci        also tries integration, faults and e2e

A fault is one replacement in one file. The tests of its package run first, because they find most. Two faults are tried at
once, each by one process. Prints a line for each fault, then how many were found. The exit status is 1 if fewer than five sixths
were found.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
SOURCES = ("services", "clients")
LEAST_SHARE = 50 / 60
CIRCLES = {
    "test": ((),),  # the paths of pyproject.toml
    "ci": ((), ("tests/integration",), ("tests/faults",), ("tests/e2e",)),
}
"""The suites that are run until one fails."""
NUM_AT_ONCE = 2
_LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Mutant:
    """A fault, and where it is put."""

    name: str
    """What is wrong, in a few words."""
    file: str
    old: str
    """Text that occurs once in the file."""
    new: str
    concurrency: bool = False
    """Whether the fault shows only if two things happen at once."""

    @property
    def own_tests(self) -> list[str]:
        """The tests of the package, or of the module, with the fault."""
        package = Path(self.file).parts[2].removesuffix(".py")
        package = "client" if package == "collapipe_client" or "clients/" in self.file else package
        candidates = (f"tests/unit/{package}", f"tests/unit/test_{package}.py")
        return [path for path in candidates if (ROOT / path).exists()]


def read_mutants() -> list[Mutant]:
    """Reads all faults."""
    text = (ROOT / "benchmarks" / "mutants.yaml").read_text("utf-8")
    return [Mutant(**fields) for fields in yaml.safe_load(text)]


@contextmanager
def mutated(mutant: Mutant) -> Iterator[Path]:
    """Provides a copy of the sources with a fault."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for source in SOURCES:
            shutil.copytree(
                ROOT / source, copy / source, ignore=shutil.ignore_patterns("__pycache__")
            )
        path = copy / mutant.file
        text = path.read_text("utf-8")
        count = text.count(mutant.old)
        assert count == 1, (
            f"{mutant.name}: {mutant.file} has {mutant.old!r} {count} times, but must have it once: correct mutants.yaml"
        )
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        yield copy


def first_failure(copy: Path, suite: Sequence[str]) -> str | None:
    """Runs tests with the copied sources until one fails, and returns what pytest says of it."""
    line = [sys.executable, "-m", "pytest", *suite, "-x", "--quiet", "--no-header", "--tb=no"]
    line += ["-p", "no:cacheprovider"]
    paths = os.pathsep.join(str(copy / source) for source in SOURCES)
    try:
        ended = subprocess.run(
            line,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the tests did not end in {_LIMIT_SECONDS:g} s"
    if ended.returncode == 0:
        return None
    failed = [text for text in ended.stdout.splitlines() if text.startswith(("FAILED", "ERROR"))]
    if not failed:
        raise SystemExit(
            f"{' '.join(line)} failed without a failed test:\n{ended.stdout}{ended.stderr}"
        )
    return failed[0]


def find(mutant: Mutant, circle: str) -> str | None:
    """Returns which test finds a fault, or `None`."""
    with mutated(mutant) as copy:
        suites = [mutant.own_tests] if mutant.own_tests else []
        for suite in (*suites, *CIRCLES[circle]):
            if failure := first_failure(copy, suite):
                return failure
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--circle", choices=CIRCLES, default="test")
    options = parser.parse_args()
    known = {mutant.name: mutant for mutant in read_mutants()}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no fault {unknown[0]!r}: mutants.yaml has the names")
    chosen = [known[name] for name in options.names] or list(known.values())
    for suite in CIRCLES[options.circle]:
        if failure := first_failure(ROOT, suite):
            raise SystemExit(f"the tests fail without any fault, so they would find all: {failure}")
    num_found = 0
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        failures = pool.map(lambda mutant: find(mutant, options.circle), chosen)
        for mutant, failure in zip(chosen, failures, strict=True):
            num_found += failure is not None
            outcome = "found" if failure else "MISSED"
            print(f"{outcome}: {mutant.name}: {failure or ''}"[:300], flush=True)
    print(f"{num_found} of {len(chosen)} faults were found by the circle {options.circle!r}")
    return 0 if num_found >= LEAST_SHARE * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
