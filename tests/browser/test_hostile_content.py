"""The page and the report in Chromium when every text that others choose is hostile. The page is served in this process."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs the Python package playwright")

from benchmarks.browser import PHONE, SCREEN
from planned_jobs import Rounds, hosts, job
from playwright.sync_api import Browser, Page, expect
from unit.client.test_hostile_report import hostile as hostile_records
from unit.scheduler.test_page_snapshot import World

from collapipe.documents import read_document
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_registry import SILENCE_SECONDS
from collapipe.scheduler.job_documents import RoundDocument
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.web.records import Records
from collapipe.scheduler.web.server import WebServer
from collapipe.v1 import scheduler_pb2
from collapipe.v1.job_pb2 import Evaluation, RoundProgress
from collapipe.v1.scheduler_pb2 import (
    DataNote,
    Incident,
    JobTrouble,
    JobWarning,
    MissingHost,
    RoundStarted,
)
from collapipe_client.job_plots import draw_plots
from collapipe_client.job_report import write_job_report

WAIT_MS = 120_000.0
TABS = ("now", "curves", "rounds", "jobs", "events")
WORDS = (
    "<img src=x onerror=owned=1><script>owned=1</script></script></title><svg onload=owned=1>"
    "<a href=javascript:owned=1>\"' onmouseover=owned=1 {{owned}} ${owned} &lt;b&gt; \u2028\u202e"
    "https://evil.example/ "
)
LONG = WORDS + "w" * 100_000
NAME = WORDS.rstrip("\u2028\u202e ").replace("\u2028\u202e", "")[:256]
MOST_SECONDS = 60.0
"""For a view that is drawn in a tenth of a second on an idle machine."""

pytestmark = pytest.mark.timeout(900)


def watched(browser: Browser, origin: str, **options: Any) -> tuple[Page, list[str]]:
    """Opens an empty page, and a list that gets its errors, and its requests to another site."""
    context = browser.new_context(viewport=options.pop("viewport", SCREEN), **options)
    context.set_default_timeout(WAIT_MS)
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.on("request", lambda r: None if r.url.startswith(origin) else wrong.append(r.url))
    return page, wrong


def check_nothing_ran(page: Page) -> None:
    """Fails if the page has an element or an attribute that only hostile content could bring."""
    assert page.evaluate("typeof owned") == "undefined"
    assert (
        page.locator("img, iframe, object, embed, form, a[href^=javascript], [onload]").count() == 0
    )
    assert page.locator("[onerror], [onmouseover], body script, base").count() == 0


def fits(page: Page) -> bool:
    wide: bool = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return not wide


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(JobStore(tmp_path / "jobs"))


@pytest.fixture
def served(world: World, tmp_path: Path) -> Iterator[str]:
    """The link of the page of a world."""
    channels = ChannelPool(Security.insecure())
    records = Records(world.registry, world.jobs, channels)
    server = WebServer("127.0.0.1:0", tmp_path, Security.insecure(), world.snapshots, records)
    document = read_document(tmp_path / "page.json")
    assert document is not None
    yield document["link"]
    server.close()
    channels.close()


def make_hostile(world: World, num_clusters: int, devices: int, words: str) -> str:
    """Fills a world: hosts with hostile names, and a running job all of whose texts are `words`. Returns the id of the job."""
    for cluster in range(num_clusters):
        for device in range(devices):
            world.register(f"{cluster}-{device}-{NAME}"[:256], cluster=cluster)
    document = world.jobs.create(job({"rounds": 3}, {"name": "w" * 64}), f"client:{'w' * 63}")
    document.state = scheduler_pb2.JOB_STATE_RUNNING
    world.logs[document.job_id] = EventLog()
    document.message = words
    of = hosts()
    plans, decision = Rounds(of).decide()
    for stage in plans[0].stages:
        stage.host_id = f"{stage.host_id} {NAME}"[:256]
    recorded = decision.to_json()
    recorded["kept_because"] = words
    trouble = JobTrouble(num_failures=3, failure=words, waiting=True)
    for number in range(1000):
        trouble.missing.append(MissingHost(host_id=f"{number}-{NAME}"[:256], left_out=words))
    for index in range(3):
        record = RoundDocument(attempt=0, plans=plans, decision=recorded, total_steps=1)
        world.jobs.save_round(document.job_id, index, record)
        world.publish(
            document, round_started=RoundStarted(round_index=index, plans=plans, change=words)
        )
    for number in range(1000):
        world.publish(document, incident=Incident(message=f"{number} {words}"))
        world.publish(document, data_note=DataNote(message=f"{number} {words}", is_warning=True))
    for code in scheduler_pb2.WarningCode.values():
        warning = JobWarning(code=code, message=words, advice=words)  # type: ignore[arg-type]
        world.publish(document, warning=warning)
    waits = RoundProgress(steps_done=1, local_steps=4, waiting_for=words)
    world.publish(document, progress=waits)
    document.num_rounds_committed = 2
    document.trouble = trouble
    document.evaluation = Evaluation(num_rounds=2, metric="accuracy", value=0.5, num_rows=9)
    document.evaluation.definitions["accuracy"] = words
    job_id: str = document.job_id
    return job_id


@pytest.mark.parametrize("viewport", [SCREEN, PHONE], ids=["screen", "phone"])
def test_page_shows_hostile_words_as_words(
    browser: Browser, world: World, served: str, viewport: Any
) -> None:
    job_id = make_hostile(world, 3, 4, WORDS)
    origin = served.split("#")[0]
    page, wrong = watched(browser, origin, viewport=viewport)
    page.goto(served)
    page.locator("#connection.on").wait_for()
    for tab in TABS:
        page.goto(f"{origin}#job={job_id}&tab={tab}")
        page.locator(f"#tab-{tab}[aria-selected=true]").wait_for()
        expect(page.locator(".view > *").first).to_be_visible()
        check_nothing_ran(page)
        assert fits(page), tab
    assert "onerror=owned=1" in page.locator("body").inner_text()
    page.context.close()
    assert not wrong


def test_page_with_a_thousand_hosts_and_long_words_stays_quick_and_in_sight(
    browser: Browser, world: World, served: str
) -> None:
    job_id = make_hostile(world, 100, 10, LONG)
    world.clock.now += SILENCE_SECONDS + 1  # All hosts are lost.
    origin = served.split("#")[0]
    page, wrong = watched(browser, origin)
    page.goto(served)
    page.locator("#connection.on").wait_for()
    opened = ",".join(map(str, range(12)))
    for tab in TABS:
        page.goto(f"{origin}#job={job_id}&tab={tab}&clusters={opened}")
        started = time.monotonic()
        page.locator(f"#tab-{tab}[aria-selected=true]").wait_for()
        page.locator(".view > *").first.wait_for()
        page.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        assert time.monotonic() - started < MOST_SECONDS
        check_nothing_ran(page)
        place = page.locator("#tabs").bounding_box()
        assert place is not None and place["y"] < SCREEN["height"], tab
    page.context.close()
    assert not wrong


def test_report_in_a_browser_runs_nothing_and_asks_nobody(browser: Browser, tmp_path: Path) -> None:
    path, found = tmp_path / "report.html", hostile_records(WORDS)
    write_job_report(path, found, draw_plots(found), json.dumps(WORDS))
    page, wrong = watched(browser, path.as_uri())
    page.goto(path.as_uri())
    expect(page.locator("section").first).to_be_visible()
    check_nothing_ran(page)
    assert page.title() == f"Job {' '.join(WORDS.split())}" or "onerror" in page.title()
    assert fits(page)
    page.context.close()
    assert not wrong
