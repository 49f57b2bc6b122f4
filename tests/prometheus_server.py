"""A Prometheus server on loopback, for tests."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

INTERVAL_SECONDS = 1.0
LIMIT_SECONDS = 60.0


class PrometheusServer:
    """A running Prometheus server.

    Args:
        url: Its address.
        targets: The file of its targets. The server reads it again when it changes.
    """

    def __init__(self, url: str, targets: Path) -> None:
        self.url = url
        self._targets = targets

    def scrape(self, addresses: Iterable[str]) -> None:
        """Replaces the targets by these addresses, "host:port", and waits until all of them are scraped."""
        wanted = set(addresses)
        text = json.dumps([{"targets": sorted(wanted), "labels": {"site": "here"}}])
        self._targets.with_suffix(".new").write_text(text, encoding="utf-8")
        self._targets.with_suffix(".new").replace(self._targets)
        with httpx.Client(base_url=self.url, trust_env=False) as client:

            def scraped() -> bool:
                found = client.get("/api/v1/targets", params={"state": "active"}).json()
                up = [one for one in found["data"]["activeTargets"] if one["health"] == "up"]
                return {one["labels"]["instance"] for one in up} == wanted

            eventually(scraped)


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {LIMIT_SECONDS:g} s"
        time.sleep(0.05)


@contextmanager
def running_prometheus(
    directory: Path, config: Mapping[str, Any] | None = None
) -> Iterator[PrometheusServer]:
    """Starts a server without targets; skips the test if Prometheus is not installed.

    Args:
        directory: Folder for its files. Its targets are in targets.json there.
        config: Configuration, with paths relative to `directory`. By default, one job scrapes the targets.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus on this machine: apt-get install prometheus")
    targets = directory / "targets.json"
    targets.write_text("[]", encoding="utf-8")
    discovery = {"files": [str(targets)], "refresh_interval": "1s"}
    # JSON is valid YAML.
    config = config or {
        "global": {
            "scrape_interval": f"{INTERVAL_SECONDS:g}s",
            "scrape_timeout": f"{INTERVAL_SECONDS:g}s",
        },
        "scrape_configs": [{"job_name": "collapipe", "file_sd_configs": [discovery]}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    log = directory / "prometheus.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield PrometheusServer(f"http://{_served_address(log, process)}", targets)
    finally:
        process.terminate()
        process.wait(LIMIT_SECONDS)


def _served_address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    """Returns the address from the log: with port 0, nothing else shows the port."""
    found: list[str] = []

    def has_address() -> bool:
        text = log.read_text(encoding="utf-8")
        assert process.poll() is None, text
        found[:] = [
            line.split("address=")[-1].split()[0]
            for line in text.splitlines()
            if "Listening on" in line
        ]
        return bool(found)

    eventually(has_address)
    with httpx.Client(base_url=f"http://{found[0]}", trust_env=False) as client:
        eventually(lambda: client.get("/-/ready").status_code == httpx.codes.OK)
    return found[0]
