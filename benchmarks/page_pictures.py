"""Makes the pictures of the page in the browser for the documents.

    python -m benchmarks.page_pictures            # all of them, into docs/pictures
    python -m benchmarks.page_pictures many       # the one with 1,000 imitated devices only

It needs Chromium (Debian's package `chromium`). A testbed of six devices trains a small model on the data of the preset
`demo` over links of 30 Mbit/s, and later loses a device. The picture with many devices shows a scheduler with the imitated hosts of
benchmarks/load.py, of which some are silent. Prints what the page costs a scheduler without hosts: the time from its start
until the page answers, and its memory with and without the page.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from PIL import Image
from playwright.sync_api import Browser, Page

from benchmarks.browser import PHONE, SCREEN, open_browser, open_page
from benchmarks.imitated_clusters import DEVICES_PER_CLUSTER, HOSTS_PER_CLUSTER
from benchmarks.load import ImitatedHost, connect_all, make_job, process_size, started
from collapipe.documents import read_document
from collapipe.emulation.emulation_file import Emulation
from collapipe.job import JobConfig
from collapipe.rpc.options import TELLS_VERSIONS
from collapipe.v1 import scheduler_pb2, scheduler_pb2_grpc
from collapipe_client import LocalTestbed, load_preset

_PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
_COLOURS = 96
_LIMIT_MS = 1_200_000.0
_TRAFFIC = ".flow.forward:not(.speed-0)"
"""A link with traffic."""
_NUM_SILENT = 9
"""Imitated hosts that send no heartbeats."""


def main() -> None:
    """Makes the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("which", nargs="?", choices=("few", "many", "cost"), help="default: all")
    which = parser.parse_args().which
    with open_browser() as browser, tempfile.TemporaryDirectory() as folder:
        if which in (None, "few"):
            few(browser, Path(folder) / "testbed")
        if which in (None, "many"):
            many(browser, Path(folder))
    if which in (None, "cost"):
        print(json.dumps(cost(), indent=2))


def take(page: Page, name: str, *, full_page: bool = True) -> None:
    """Takes a picture of what is shown, with few colours, so that the file is small."""
    path = _PICTURES / f"{name}.png"
    page.screenshot(path=path, full_page=full_page, animations="disabled")
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size // 1000} kB", flush=True)


def few(browser: Browser, workspace: Path) -> None:
    """Takes the pictures of a testbed: at rest, at work, its rounds, on a phone, and with a lost device."""
    emulation = Emulation.model_validate({"links": {"*": {"rate_bps": 30e6}}})
    with LocalTestbed([3, 3], workspace, emulation=emulation) as testbed:
        testbed.wait_until_registered()
        context = browser.new_context(viewport=SCREEN)
        context.set_default_timeout(_LIMIT_MS)
        page = open_page(context, testbed.workspace.page_link())
        page.locator(".host").nth(7).wait_for()
        take(page, "page-rest")
        with testbed.client() as client:
            job_id = client.submit(small_demo())
        page.get_by_text(re.compile("round [4-9] of 30")).wait_for()
        page.get_by_text(re.compile("step [3-9] of 10")).first.wait_for()
        page.locator(_TRAFFIC).first.wait_for(state="attached")
        take(page, "page-work")
        dark = browser.new_context(
            viewport=PHONE,
            storage_state=context.storage_state(),
            color_scheme="dark",
            device_scale_factor=2,
        )
        dark.set_default_timeout(_LIMIT_MS)
        phone = open_page(dark, page.url.split("#")[0])
        phone.locator(_TRAFFIC).first.wait_for(state="attached")
        take(phone, "page-phone", full_page=False)
        dark.close()
        page.get_by_role("tab", name="Rounds").click()
        page.get_by_role("button", name="Show what every host did").first.click()
        page.locator(".gantt").wait_for()
        take(page, "page-rounds")
        page.get_by_role("tab", name="Now").click()
        lost = next(process for process in testbed.processes if process.name == "device-1-1")
        os.kill(lost.pid, signal.SIGKILL)
        page.locator(".host.lost").first.wait_for()
        take(page, "page-lost")
        with testbed.client() as client:
            client.cancel(job_id)


def many(browser: Browser, folder: Path) -> None:
    """Takes the picture of a scheduler with 1,000 imitated devices, of which some are silent."""
    plain = ("--insecure", "--listen=127.0.0.1:0")
    with ExitStack() as stack:
        clusters = stack.enter_context(started(folder, "benchmarks.imitated_clusters"))
        state = folder / "scheduler"
        options = (*plain, f"--state-dir={state}", "--web=127.0.0.1:0")
        scheduler = stack.enter_context(started(folder, "collapipe.scheduler", *options))
        address = scheduler["address"]
        edge = (*plain, f"--scheduler={address}", f"--state-dir={folder}/edge")
        stack.enter_context(started(folder, "collapipe.edge_server", *edge))
        job = make_job(folder, 1000 // DEVICES_PER_CLUSTER)
        running = threading.Thread(
            target=asyncio.run, args=(imitate(address, clusters["port"], job),), daemon=True
        )
        running.start()
        context = browser.new_context(viewport=SCREEN)
        context.set_default_timeout(_LIMIT_MS)
        page = open_page(context, _link(state))
        page.locator(".tile .steps").nth(99).wait_for()
        page.locator(".tile.lost").nth(_NUM_SILENT - 1).wait_for()
        take(page, "page-many", full_page=False)
        print(json.dumps({"scheduler_with_1000_devices": process_size(scheduler["pid"])}))


def small_demo() -> JobConfig:
    """Returns the demo with a model that a slow machine trains, too."""
    content = load_preset("demo").model_dump()
    config = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
    content["model"] |= {
        "pretrained": None,
        "vocabulary_size": 4000,
        "config": {**config, "num_hidden_layers": 6},
    }
    content["training"] |= {"rounds": 30, "mini_batch": 16, "learning_rate": 2e-3}
    content["schedule"] |= {"num_micro_batches": 4}
    return JobConfig.model_validate(content)


async def imitate(address: str, port: int, job: JobConfig) -> None:
    """Registers all hosts, runs a job on them, and sends the heartbeats of all but some devices."""
    hosts = [
        ImitatedHost(cluster_index, position, address, port)
        for cluster_index in range(job.clusters)
        for position in range(HOSTS_PER_CLUSTER - 1)
    ]
    _, interval = await connect_all(hosts)
    spare = [
        ImitatedHost(index, HOSTS_PER_CLUSTER - 1, address, port) for index in range(_NUM_SILENT)
    ]
    await connect_all(spare)
    async with grpc.aio.insecure_channel(address, [TELLS_VERSIONS]) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await stub.SubmitJob(scheduler_pb2.SubmitJobRequest(config_json=job.to_json()))
        await asyncio.gather(*(host.run(interval) for host in hosts))


def cost() -> dict[str, Any]:
    """Measures a scheduler without hosts, with and without the page."""
    found: dict[str, Any] = {}
    for name, options in (("without_page", ()), ("with_page", ("--web=127.0.0.1:0",))):
        with tempfile.TemporaryDirectory() as each:
            folder, began = Path(each), time.monotonic()
            state = folder / "scheduler"
            own = ("--insecure", "--listen=127.0.0.1:0", f"--state-dir={state}", *options)
            with started(folder, "collapipe.scheduler", *own) as ready:
                found[f"{name}_serves_grpc_s"] = round(time.monotonic() - began, 2)
                if options:
                    # The socket takes the connection before the page answers.
                    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                    with opener.open(_link(state), timeout=60) as answer:
                        answer.read()
                    found["page_answers_s"] = round(time.monotonic() - began, 2)
                found[name] = process_size(ready["pid"])
    return found


def _link(state: Path) -> str:
    page = read_document(state / "page.json")
    assert page is not None
    return str(page["link"])


if __name__ == "__main__":
    main()
