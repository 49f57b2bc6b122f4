"""Defines options and checks for all tests."""

import itertools
import os
import subprocess
from collections import Counter
from collections.abc import Generator, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # As the services set it, before anything imports `peft`.

ROOT = Path(__file__).parents[1]
ALLOWED_REASONS = (
    # Debian has no suitable package of these.
    "no kustomize 5 on this machine",
    "no npm on this machine",
    "atheris has no wheel for this machine",
)
"""Beginnings of the reasons for which a test may be skipped in CI, too."""

SHARED_BY_FILES = {
    "a Docker Engine": (
        *("containers/test_compose.py", "containers/test_images.py"),
        "containers/test_shaped_hosts.py",
    ),
    "an emulated testbed": (
        *("integration/test_late_clusters.py", "integration/test_secure_averaging.py"),
        "integration/test_uploads.py",
    ),
}
"""Resources that start slowly, so files of tests share them. One worker process gets all tests of these files."""
LONGEST_FILES = (
    "containers/test_compose.py",
    *("faults/test_versions.py", "e2e/test_readme.py", "faults/test_namespaces.py"),
    *("faults/test_fuzz.py", "faults/test_private.py", "e2e/test_slow_links.py"),
    *("faults/test_deaths.py", "faults/test_lying_control_unit.py", "faults/test_chaos.py"),
    *("faults/test_kill.py", "faults/test_secure_averaging.py", "e2e/test_three_boxes.py"),
    *("e2e/test_observability.py", "e2e/test_wheel.py", "e2e/test_load.py"),
    *("e2e/test_notebook.py", "faults/test_client.py", "faults/test_full_disk.py"),
    *("integration/test_exact.py", "integration/test_late_clusters.py"),
)
"""Files that take minutes. They start first, because one that starts last leaves the other workers without tests."""

# The machine may be busy, so examples have no deadline. Tests of the same commit draw the same examples.
# The campaign draws new ones.
settings.register_profile("quick", deadline=None, max_examples=25, derandomize=True, database=None)
settings.register_profile("campaign", deadline=None, max_examples=300)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="treat a skipped test as failed, as in CI"
    )
    parser.addoption(
        "--data", metavar="DIR", help="folder with the data sets (default: COLLAPIPE_DATA)"
    )
    parser.addoption(
        "--changed",
        action="store_true",
        help="run only the tests of packages with uncommitted changes, and changed tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Sets what test modules and fixtures need from the beginning."""
    torch.set_num_threads(1)  # as in every service by default
    for file in (*LONGEST_FILES, *itertools.chain(*SHARED_BY_FILES.values())):
        if not (ROOT / "tests" / file).exists():
            raise pytest.UsageError(f"tests/conftest.py names tests/{file}, which does not exist")
    os.environ["XDG_CONFIG_HOME"] = "/nonexistent"  # No test uses the contexts of the user.
    if data := config.getoption("--data"):
        os.environ["COLLAPIPE_DATA"] = str(Path(data).resolve())


class _Scheduling(LoadFileScheduling):
    """Gives all tests of a file, or of files that share something, to one worker process."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        path = file.removeprefix("tests/")
        return next((what for what, files in SHARED_BY_FILES.items() if path in files), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling:
    # xdist would begin with the files that have the most tests.
    config.option.loadscopereorder = False
    return _Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts files by how long they take: the longest ones first, then those with the most tests."""
    num_tests = Counter(item.path for item in items)

    def rank(item: pytest.Item) -> tuple[int, int]:
        path = item.path.relative_to(ROOT / "tests").as_posix()
        known = LONGEST_FILES.index(path) if path in LONGEST_FILES else len(LONGEST_FILES)
        return known, -num_tests[item.path]

    items.sort(key=rank)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --changed, leaves out the tests of what has not changed."""
    if not config.getoption("--changed"):
        return None
    wanted = any(
        collection_path.is_relative_to(tests) or tests.is_relative_to(collection_path)
        for tests in tests_of_changes()
    )
    return None if wanted else True


@cache
def tests_of_changes() -> set[Path]:
    """Returns the folders and files of tests for what differs from the last commit."""
    return tests_of(changed_files())


def changed_files() -> list[str]:
    """Returns the paths of files that differ from the last commit, and of new files, relative to the checkout."""
    asked = (["diff", "--name-only", "HEAD"], ["ls-files", "--others", "--exclude-standard"])
    found: list[str] = []
    for arguments in asked:
        found += subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).splitlines()
    return found


def tests_of(changed: Iterable[str]) -> set[Path]:
    """Returns the folders and files of tests for changed files: tests/unit/NAME for services/collapipe/NAME."""
    tests = set()
    for path in map(Path, changed):
        if path.parts[0] == "tests":
            tests.add(ROOT / (path if path.name.startswith("test_") else path.parent))
        elif path.parts[:2] == ("services", "collapipe") and len(path.parts) > 2:
            package = path.parts[2].removesuffix(".py")
            tests |= {ROOT / "tests/unit" / package, ROOT / f"tests/unit/test_{package}.py"}
        elif path.parts[0] == "clients":
            tests.add(ROOT / "tests/unit/client")
        elif path.parts[0] in ("docs", "deploy"):
            tests.add(ROOT / "tests" / path.parts[0])
    return tests


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With --no-skips, turns a skip into a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith(ALLOWED_REASONS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped, which --no-skips forbids: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """With --no-skips, turns the skip of a whole module into a failure."""
    report = yield
    if report.skipped and collector.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = (
            f"{collector.nodeid} skipped itself, which --no-skips forbids: {report.longrepr}"
        )
    return report
