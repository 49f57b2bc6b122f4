"""Defines options and checks for all tests."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

ALLOWED_REASONS = (
    "needs a CUDA device",
    # Debian has no suitable package of these two.
    "no kustomize 5 on this machine",
    "no npm on this machine",
    "atheris has no wheel for this machine",
)
"""Beginnings of the reasons for which a test may be skipped in CI, too."""
HEAVY_SUITES = ("faults", "e2e", "browser", "containers")
"""The suites that `.ci/run` runs with `-m heavy`."""

# The machine may be busy, so examples have no deadline. `.ci/run` also uses the second profile.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=60)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="treat a skipped test as failed, as in CI"
    )
    parser.addoption(
        "--data", metavar="DIR", help="folder with the data sets (default: COLLAPIPE_DATA)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Sets variables of the environment, because test modules read them when they are imported."""
    os.environ["XDG_CONFIG_HOME"] = "/nonexistent"  # No test uses the contexts of the user.
    if data := config.getoption("--data"):
        os.environ["COLLAPIPE_DATA"] = str(Path(data).resolve())


class _OneTestbed(LoadFileScheduling):
    """Gives all tests of a file to one worker process, and all of tests/integration, which share a testbed."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "integration" if file.startswith("tests/integration/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _OneTestbed:
    return _OneTestbed(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rejects heavy tests in a suite that .ci/run does not run with `-m heavy`."""
    for item in items:
        suite = item.path.relative_to(Path(__file__).parent).parts[0]
        if item.get_closest_marker("heavy") and suite not in HEAVY_SUITES:
            raise pytest.UsageError(
                f"{item.nodeid} is heavy in tests/{suite}, where .ci/run does not run it: "
                f"move it to one of {', '.join(HEAVY_SUITES)}"
            )


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
