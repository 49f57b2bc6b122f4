"""Options of the whole suite."""

import pytest

ALLOWED_REASONS = ("needs a CUDA device",)
"""What may be missing even in CI; the reason of a skip begins with it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails, as in CI")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
    """With --no-skips, turns a skip into a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith(ALLOWED_REASONS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped, which --no-skips forbids: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> pytest.CollectReport:
    """With --no-skips, a module that skips itself as a whole fails too."""
    report = yield
    if report.skipped and collector.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = (
            f"{collector.nodeid} skipped itself, which --no-skips forbids: {report.longrepr}"
        )
    return report
