"""The page in Debian's Chromium, on a testbed of real processes. Every wait is for something that the page shows."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the Python package playwright")

from benchmarks.browser import PHONE, SCREEN, open_page
from benchmarks.load import started
from integration.running import FinishedJob, run_job
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect
from reference.tiny_jobs import make_job

from collapipe.documents import read_document
from collapipe.rpc import Security, open_channel, serve
from collapipe.v1.scheduler_pb2 import (
    HOST_ROLE_CONTROL_UNIT,
    HOST_ROLE_DEVICE_AGENT,
    Host,
    RegisterHostRequest,
)
from collapipe.v1.scheduler_pb2_grpc import SchedulerServiceStub
from collapipe_client import LocalTestbed

WAIT_MS = 120_000.0
ROUNDS = 4
TABS = ("Now", "Curves", "Rounds", "Jobs", "Events")

pytestmark = pytest.mark.timeout(900)
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    with LocalTestbed([2, 2], tmp_path_factory.mktemp("testbed"), supervised=True) as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.fixture(scope="session")
def finished(testbed: LocalTestbed, tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    folder = tmp_path_factory.mktemp("finished")
    training = {"rounds": ROUNDS, "local_steps": 3, "warm_up_steps": 9}
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


def open_tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()
    expect(page.get_by_role("tab", name=name)).to_have_attribute("aria-selected", "true")


def fits(page: Page) -> bool:
    """Returns whether the page is no wider than the window."""
    wide: bool = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return not wide


@pytest.fixture
def waiting_job(testbed: LocalTestbed, tmp_path: Path) -> Iterator[str]:
    """A job that waits, because no cluster has so many devices."""
    with testbed.client() as client:
        job_id = client.submit(make_job(tmp_path, devices_per_cluster=9, name="waits"))
        yield job_id
        if client.find_job(job_id).state < 4:  # It has not ended.
            client.cancel(job_id)


def test_link_opens_the_page_once_and_others_see_how_to_get_one(
    browser: Browser, testbed: LocalTestbed
) -> None:
    link = testbed.workspace.page_link()
    owner, other = browser.new_context(), browser.new_context()
    page = owner.new_page()
    page.goto(link)
    expect(page.get_by_role("tab", name="Now")).to_be_visible()
    assert "key" not in page.url
    for context in (other, browser.new_context()):
        stranger = context.new_page()
        stranger.goto(link if context is other else address(testbed))
        expect(stranger.get_by_text("This page needs its key")).to_be_visible()
        expect(stranger.get_by_text("collapipe status").first).to_be_visible()
        expect(stranger.get_by_role("tab")).to_have_count(0)
        assert "device-0-0" not in stranger.content()
        if context is other:  # A pasted address changes only what is behind the "#".
            stranger.goto(testbed.workspace.page_link())
            expect(stranger.get_by_role("tab", name="Now")).to_be_visible()
        context.close()
    cookies = owner.cookies()
    assert [(cookie["httpOnly"], cookie["sameSite"]) for cookie in cookies] == [(True, "Strict")]
    owner.close()


def test_clusters_show_every_host_and_its_memory(page: Page) -> None:
    for cluster in (0, 1):
        card = page.get_by_role("article", name=f"Cluster {cluster}")
        for host in (f"control-unit-{cluster}", f"device-{cluster}-0", f"device-{cluster}-1"):
            expect(card.locator(".host", has_text=host)).to_contain_text(re.compile(r"\d MB"))
    expect(page.get_by_role("article", name="Edge server")).to_contain_text("edge-server")
    expect(page.locator("#summary")).to_contain_text("succeeded after")


def test_pipeline_moves_while_a_job_trains(
    page: Page, testbed: LocalTestbed, tmp_path: Path
) -> None:
    # Frames of fewer rows are too small to be measured.
    training = {"rounds": 1000, "local_steps": 20, "mini_batch": 32}
    job = make_job(
        tmp_path, num_rows=(100, 100), devices_per_cluster=2, training=training, name="long"
    )
    with testbed.client() as client:
        job_id = client.submit(job)
        show(page, testbed, f"job={job_id}")
        card = page.get_by_role("article", name="Cluster 0")
        expect(card.locator(".pipeline .link").first).to_be_visible()
        expect(card.locator(".flow.forward:not(.speed-0)").first).to_be_attached()
        expect(card.locator(".host.working").first).to_contain_text(re.compile(r"\d % busy"))
        expect(card.locator(".bottleneck")).to_contain_text("holds its cluster back")
        expect(page.locator("#summary")).to_contain_text("Held back by")
        expect(page.locator("#summary")).to_contain_text(re.compile(r"about .* left"))
        page.emulate_media(reduced_motion="no-preference")
        animation = card.locator(".flow.forward:not(.speed-0)").first.evaluate(
            "line => getComputedStyle(line).animationName"
        )
        page.emulate_media(reduced_motion="reduce")
        assert animation == "flow"
        client.cancel(job_id)
        expect(page.locator("#summary")).to_contain_text("cancelled after")


def test_curves_have_the_points_of_every_round(page: Page) -> None:
    open_tab(page, "Curves")
    for name in ("Loss", "Speed", "Time of a round"):
        expect(
            page.get_by_role("group", name=re.compile(name)).first.locator("canvas")
        ).to_be_visible()
    painted = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(value => value > 0)"
    assert page.locator("#chart-loss canvas").evaluate(painted)
    expect(page.locator("#chart-time .u-legend")).to_contain_text("predicted")


def test_warnings_of_the_scheduler_are_shown(page: Page) -> None:
    warning = page.get_by_role("alert").locator(".warning").first
    expect(warning).to_contain_text("Warning: the warm-up")
    colours = "element => [getComputedStyle(element).borderColor, getComputedStyle(document.body).getPropertyValue('--lost')]"
    shown, lost = warning.evaluate(colours)
    assert shown != f"rgb{tuple(bytes.fromhex(lost[1:]))}"


def problems(page: Page, view: dict[str, object]) -> list[str]:
    """Returns the sentences of the boxes above a view of job `a`."""
    view["job"] = {"id": "a", "state": "running"}
    found = page.evaluate(
        "async view => (await import('/static/progress.js')).problems(view)", view
    )
    return [one["text"] for one in found]


@pytest.mark.parametrize("state", ["suspected", "working"])
def test_one_box_tells_of_one_host(page: Page, state: str) -> None:
    host = {"id": "device-0-1", "state": state, "suspicion": "device-0-0 could not reach it"}
    trouble = [
        "The job goes on without device-0-1: no heartbeat",
        "The round failed once and is tried again: cluster 0: device-0-1 was lost",
        "The round failed twice: device-0-10 was lost",
    ]
    sections = {
        "details": {"0": {"pipeline": [host], "others": []}},
        "job": {"id": "a", "trouble": trouble},
    }
    words = "device-0-1 is suspected, and left out for a while: device-0-0 could not reach it. The job goes on without it."
    first = words if state == "suspected" else trouble[0]
    told = problems(page, {"sections": sections})
    assert told == [first, *trouble[1:]]


def test_unshaped_links_are_told_once_and_the_host_is_marked(page: Page) -> None:
    one = {"id": "device-0-1", "state": "working", "unshaped": "this kernel has no netem"}
    edge = {"id": "edge-server", "state": "working", "unshaped": "this kernel has no netem"}
    sections = {"details": {"0": {"pipeline": [one, edge], "others": []}}, "edge": [edge]}
    (told,) = problems(page, {"sections": sections})
    assert (
        told
        == "Warning: the links of 2 hosts here are not shaped. device-0-1: this kernel has no netem"
    )
    box = "async host => (await import('/static/pipeline.js')).hostBox(host).textContent"
    assert "unshaped links" in page.evaluate(box, one)
    assert "unshaped" not in page.evaluate(box, {**one, "unshaped": None})


def test_losses_of_every_second_round_stand_within_their_rounds(page: Page) -> None:
    rounds = [{"round": 1, "losses": [4, 3]}, {"round": 3, "losses": [2, 1]}]
    found = page.evaluate(
        "async rounds => (await import('/static/progress.js')).losses(rounds)", rounds
    )
    assert found == [[0.5, 4], [1, 3], [2.5, 2], [3, 1]]


def test_open_page_has_the_metric_of_every_round(
    page: Page, testbed: LocalTestbed, tmp_path: Path
) -> None:
    rounds = 20
    training = {"rounds": rounds, "evaluate_every": 1}
    job = make_job(tmp_path, num_held_out=200, training=training, name="metrics")
    with testbed.client() as client:
        show(page, testbed, f"job={client.submit(job)}&tab=rounds")
    expect(page.locator("#summary")).to_contain_text("succeeded after")
    for number in range(rounds, 0, -1):
        expect(page.locator(".replay output")).to_have_text(f"Round {number} of {rounds}")
        expect(page.locator("[data-key=round]")).to_contain_text("; accuracy", timeout=10_000)
        page.get_by_label("Earlier round").click()


def test_replay_goes_through_the_rounds_of_an_ended_job(page: Page) -> None:
    open_tab(page, "Rounds")
    told = page.locator(".replay output")
    expect(told).to_have_text(f"Round {ROUNDS} of {ROUNDS}")
    expect(page.locator(".view")).to_contain_text("predicted")
    page.get_by_label("Earlier round").click()
    expect(told).to_have_text(f"Round {ROUNDS - 1} of {ROUNDS}")
    slider = page.get_by_role("slider", name="Round")
    slider.focus()
    page.keyboard.press("Home")
    expect(told).to_have_text(f"Round 1 of {ROUNDS}")
    expect(page.locator("article.cluster").first).to_contain_text("embedding")
    expect(page.get_by_text("Why the scheduler decided so")).to_be_visible()
    page.get_by_role("button", name="Replay").click()
    expect(told).to_have_text(f"Round {ROUNDS} of {ROUNDS}")
    expect(page.locator("table tbody tr")).to_have_count(ROUNDS)


def draw_again(page: Page) -> None:
    page.evaluate("window.dispatchEvent(new HashChangeEvent('hashchange'))")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_fold_stays_as_a_person_leaves_it(page: Page) -> None:
    open_tab(page, "Rounds")
    fold = page.locator("details[data-key=why]")
    expect(fold).to_have_attribute("open", "")
    fold.locator("summary").click()
    draw_again(page)
    expect(fold).not_to_have_attribute("open", "")


def test_link_to_the_content_keeps_the_view(page: Page) -> None:
    open_tab(page, "Rounds")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#content")).to_be_focused()
    draw_again(page)
    expect(page.get_by_role("tab", name="Rounds")).to_have_attribute("aria-selected", "true")


def test_round_shows_what_every_host_did(page: Page, finished: FinishedJob) -> None:
    open_tab(page, "Rounds")
    page.get_by_role("button", name="Show what every host did").first.click()
    gantt = page.locator(".gantt").first
    for stage in finished.plans(0)[ROUNDS - 1].stages:
        expect(gantt).to_contain_text(f"{stage.host_id} computes")
    assert gantt.locator("path.kind.forward").count() >= 2


def test_waiting_job_is_cancelled_on_the_page(
    page: Page, waiting_job: str, testbed: LocalTestbed
) -> None:
    open_tab(page, "Jobs")
    row = page.get_by_role("row", name=re.compile(waiting_job))
    expect(row).to_contain_text(re.compile("preparing|queued"))
    words = row.locator(".wide small").bounding_box()
    button = row.get_by_role("button", name="Cancel job").bounding_box()
    assert words and button and button["y"] >= words["y"] + words["height"]
    page.once("dialog", lambda dialog: dialog.dismiss())
    row.get_by_role("button", name="Cancel job").click()
    expect(row.get_by_role("button", name="Cancel job")).to_be_visible()
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Cancel job").click()
    expect(row).to_contain_text("cancelled")
    expect(row.get_by_role("button", name="Cancel job")).to_have_count(0)


def test_keyboard_reaches_everything_and_shows_where_it_is(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Go to the content")
    page.get_by_role("tab", name="Now").focus()
    for name in (*TABS[1:], TABS[0]):
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name=name)).to_be_focused()
        expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
    outline = page.locator(":focus").evaluate("element => getComputedStyle(element).outlineStyle")
    assert outline != "none"
    # What the page draws again does not take the focus away.
    draw_again(page)
    expect(page.get_by_role("tab", name="Now")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_shows_every_view_without_scrolling_sideways(
    browser: Browser,
    visitor: BrowserContext,
    testbed: LocalTestbed,
    finished: FinishedJob,
    scheme: str,
) -> None:
    dark = scheme == "dark"
    context = browser.new_context(
        viewport=PHONE,
        storage_state=visitor.storage_state(),
        color_scheme="dark" if dark else "light",
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    for name in TABS:
        show(page, testbed, f"job={finished.job_id}&tab={name.lower()}")
        expect(page.locator(".view > *").first).to_be_visible()
        assert fits(page), name
    red, green, blue = map(
        int,
        re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3],
    )
    assert (red + green + blue < 200) == dark
    context.close()


def test_lost_device_is_named_and_comes_back(page: Page, testbed: LocalTestbed) -> None:
    lost = next(process for process in testbed.processes if process.name == "device-1-1")
    os.kill(lost.pid, signal.SIGSTOP)
    try:
        expect(page.get_by_role("alert")).to_contain_text("device-1-1 is lost")
        expect(page.locator(".host.lost")).to_contain_text("device-1-1")
    finally:
        os.kill(lost.pid, signal.SIGCONT)
    expect(page.get_by_role("alert")).not_to_contain_text("device-1-1")
    expect(page.locator(".host.lost")).to_have_count(0)


def test_page_goes_on_after_a_restart_of_the_scheduler(page: Page, testbed: LocalTestbed) -> None:
    scheduler = next(process for process in testbed.processes if process.name == "scheduler")
    os.kill(scheduler.pid, signal.SIGKILL)  # The testbed starts it again.
    expect(page.locator("#connection.off")).to_be_visible()
    expect(page.locator("#connection.on")).to_be_visible()
    host = page.get_by_role("article", name="Cluster 0").locator(".host", has_text="device-0-0")
    expect(host).to_be_visible()


@contextmanager
def lone_scheduler(folder: Path) -> Iterator[tuple[str, str]]:
    """A scheduler without hosts: its address, and the link of its page."""
    state = folder / "scheduler"
    options = ["--insecure", "--listen=127.0.0.1:0", "--web=127.0.0.1:0", f"--state-dir={state}"]
    with started(folder, "collapipe.scheduler", *options) as ready:
        page = read_document(state / "page.json")
        assert page is not None
        yield ready["address"], page["link"]


def test_page_of_a_scheduler_that_has_ended_says_what_to_do(
    browser: Browser, tmp_path: Path
) -> None:
    context = browser.new_context()
    with lone_scheduler(tmp_path) as (_, link):
        page = open_page(context, link)
        expect(page.get_by_role("alert")).to_be_empty()
    expect(page.get_by_role("alert")).to_contain_text("collapipe up")
    context.close()


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[str]:
    """The link of a scheduler that 120 hosts in ten clusters have registered with. They send no heartbeats."""
    hosts = serve("0.0.0.0:0", Security.insecure(), lambda *_: None, process="first")
    port = hosts.address.rpartition(":")[2]
    with lone_scheduler(tmp_path) as (scheduler, link):
        with open_channel(scheduler, Security.insecure()) as channel:
            stub = SchedulerServiceStub(channel)
            for number in range(120):
                cluster, device = divmod(number, 12)
                role = HOST_ROLE_DEVICE_AGENT if device else HOST_ROLE_CONTROL_UNIT
                host = Host(host_id=f"host-{cluster}-{device}", role=role, cluster_index=cluster)
                host.incarnation = "first"
                host.address = f"127.0.0.{number + 1}:{port}"
                stub.RegisterHost(RegisterHostRequest(host=host))
        hosts.drain(0)
        yield link


def test_many_hosts_are_grouped_by_cluster_and_opened_on_demand(
    browser: Browser, crowded: str
) -> None:
    context = browser.new_context(viewport=PHONE)
    context.set_default_timeout(WAIT_MS)
    page = open_page(context, crowded)
    expect(page.locator(".tile")).to_have_count(10)
    expect(page.get_by_role("heading", name="10 clusters with 110 devices")).to_be_visible()
    assert page.locator(".host").count() == 0 and fits(page)
    page.get_by_role("button", name=re.compile("Cluster 7")).click()
    expect(page.get_by_role("article", name="Cluster 7").locator(".host")).to_have_count(12)
    expect(page.get_by_role("button", name=re.compile("^Cluster 7"))).to_have_attribute(
        "aria-expanded", "true"
    )
    page.get_by_role("button", name="Close cluster 7").click()
    expect(page.locator(".host")).to_have_count(0)
    # All of them count as lost after ten seconds.
    expect(page.locator(".tile.lost")).to_have_count(10)
    expect(page.get_by_role("alert")).to_contain_text("120 hosts of 10 clusters")
    context.close()
