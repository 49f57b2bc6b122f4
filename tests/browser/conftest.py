"""Starts one testbed with a job that has ended, and one browser, for all tests of the page."""

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="needs the Python package playwright")

from benchmarks.browser import CHROMIUM, SCREEN, open_browser, open_page
from integration.running import FinishedJob, run_job
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page
from reference.tiny_jobs import make_job

from collapipe_client import LocalTestbed

WAIT_MS = 120_000.0
ROUNDS = 4


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    with LocalTestbed([2, 2], tmp_path_factory.mktemp("testbed"), supervised=True) as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.fixture(scope="session")
def finished(testbed: LocalTestbed, tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    folder = tmp_path_factory.mktemp("finished")
    training = {"rounds": ROUNDS, "local_steps": 3}
    job = make_job(folder, num_rows=(21, 21), devices_per_cluster=2, training=training, name="done")
    return run_job(testbed, job)


@pytest.fixture(scope="session")
def visitor(browser: Browser, testbed: LocalTestbed) -> Iterator[BrowserContext]:
    """A browser that has opened the link. It fails a test whose page asks another site, or breaks its own policy."""
    context = browser.new_context(viewport=SCREEN, reduced_motion="reduce")
    context.set_default_timeout(WAIT_MS)
    open_page(context, testbed.workspace.page_link()).close()
    yield context
    context.close()


@pytest.fixture
def page(visitor: BrowserContext, testbed: LocalTestbed, finished: FinishedJob) -> Iterator[Page]:
    mistakes: list[str] = []
    page = visitor.new_page()
    page.on("pageerror", lambda error: mistakes.append(str(error)))
    page.on("console", lambda line: mistakes.append(line.text) if is_mistake(line) else None)
    page.on(
        "request",
        lambda asked: (
            None if asked.url.startswith(address(testbed)) else mistakes.append(asked.url)
        ),
    )
    show(page, testbed, f"job={finished.job_id}")
    yield page
    page.close()
    assert not mistakes


def is_mistake(line: ConsoleMessage) -> bool:
    """Returns whether a line is about more than a scheduler that does not answer at the moment."""
    return line.type == "error" and "net::ERR_" not in line.text


def address(testbed: LocalTestbed) -> str:
    return testbed.workspace.page_link().split("#")[0]


def show(page: Page, testbed: LocalTestbed, chosen: str) -> None:
    """Opens the page with a choice in its address, and waits until it follows the changes."""
    page.goto("about:blank")
    page.goto(f"{address(testbed)}#{chosen}")
    page.locator("#connection.on").wait_for()
