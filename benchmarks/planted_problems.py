"""Makes pictures of jobs with a planted problem, to test whether people who see only a picture name the problem.

    python -m benchmarks.planted_problems OUT [PROBLEM...]

The problems are a slow link, a slow device, a lost device, and a job that does not learn. Each has three pictures: the page, the page
on a phone, and the terminal. The job and the testbed are those of `benchmarks.page_pictures`, with links of 60 Mbit/s.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

from playwright.sync_api import Browser

from benchmarks.browser import PHONE, SCREEN, open_browser, open_page
from benchmarks.page_pictures import small_demo
from benchmarks.terminal_pictures import draw
from collapipe.emulation.emulation_file import Emulation
from collapipe.job import JobConfig
from collapipe_client import LocalTestbed
from collapipe_client.trouble import incident_lines
from collapipe_client.view_state import JobView, apply_event

_ROUNDS, _STEPS = 30, 8
_LINKS = {"*": {"rate_bps": 60e6}}
_SLOW_LINKS = {**_LINKS, "device-1-0>*": {"rate_bps": 4e6}}
_SLOW_DEVICE = {"device-0-1": {"profile": "laptop", "slowdown": 40.0}}
_LOST = "device-1-1"
_EMULATIONS = {
    "slow-link": Emulation.model_validate({"links": _SLOW_LINKS}),
    "slow-device": Emulation.model_validate({"links": _LINKS, "devices": _SLOW_DEVICE}),
    "lost-device": Emulation.model_validate({"links": _LINKS}),
    "no-learning": Emulation.model_validate({"links": _LINKS}),
}
_WIDTH = 100
_LIMIT_MS = 600_000.0


def main() -> None:
    """Makes the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", default=list(_EMULATIONS))
    options = parser.parse_args()
    if unknown := {*options.problems} - _EMULATIONS.keys():
        parser.error(f"no such problem: {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    with open_browser() as browser:
        for problem in options.problems:
            with tempfile.TemporaryDirectory() as folder:
                _take(browser, problem, Path(folder) / "testbed", options.out)
            print(problem, flush=True)


def _take(browser: Browser, problem: str, workspace: Path, out: Path) -> None:
    """Takes the pictures of one problem, in the middle of a round that shows it."""
    with (
        LocalTestbed([3, 3], workspace, emulation=_EMULATIONS[problem]) as testbed,
        testbed.client() as client,
    ):
        context = browser.new_context(viewport=SCREEN)
        context.set_default_timeout(_LIMIT_MS)
        page = open_page(context, testbed.workspace.page_link())
        job_id = client.submit(_job(problem))
        view, lines = JobView(), list[str]()
        # A model that does not learn is told after a quarter of the rounds.
        shown_in = 9 if problem == "no-learning" else 4
        for event in client.watch(job_id):
            view = apply_event(view, event)
            lines += incident_lines(event)
            if problem == "lost-device" and event.round_committed.num_rounds == 2:
                lost = next(p for p in testbed.processes if p.name == _LOST)
                os.kill(lost.pid, signal.SIGKILL)
            steps = [cluster.steps_done for cluster in view.clusters]
            if (view.round_index or 0) >= shown_in and steps and max(steps) >= _STEPS // 2:
                break
        page.get_by_text(f"round {view.num_rounds_committed + 1} of {_ROUNDS}").wait_for()
        page.screenshot(path=out / f"{problem}-page.png")
        phones = browser.new_context(
            viewport=PHONE, storage_state=context.storage_state(), device_scale_factor=2
        )
        phone = open_page(phones, page.url.split("#")[0])
        phone.get_by_text(f"of {_ROUNDS}").first.wait_for()
        phone.screenshot(path=out / f"{problem}-phone.png")
        terminal = context.new_page()
        terminal.set_content(draw(view, client.snapshot(job_id), _WIDTH, lines))
        terminal.screenshot(path=out / f"{problem}-terminal.png", full_page=True)
        client.cancel(job_id)
        phones.close()
        context.close()


def _job(problem: str) -> JobConfig:
    content = small_demo().model_dump()
    content["data"] |= {"max_held_out_rows": 64}
    content["training"] |= {"rounds": _ROUNDS, "local_steps": _STEPS}
    if problem == "no-learning":
        content["training"] |= {"learning_rate": 1e-9}
    return JobConfig.model_validate(content)


if __name__ == "__main__":
    main()
