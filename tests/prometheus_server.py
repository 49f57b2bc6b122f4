"""A Prometheus server on loopback, for tests."""

import json
import shutil
import ssl
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
        tls: What a client needs for https; `None` for plain HTTP.
    """

    def __init__(self, url: str, targets: Path, tls: ssl.SSLContext | None) -> None:
        self.url = url
        self._targets = targets
        self._tls = tls

    def client(self) -> httpx.Client:
        """Opens a client of its interface."""
        return httpx.Client(
            base_url=self.url, trust_env=False, verify=True if self._tls is None else self._tls
        )

    def active_targets(self) -> list[dict[str, Any]]:
        """Returns what the server says of each target that it scrapes."""
        with self.client() as client:
            answer = client.get("/api/v1/targets", params={"state": "active"}).json()
        found: list[dict[str, Any]] = answer["data"]["activeTargets"]
        return found

    def scrape(self, addresses: Iterable[str]) -> None:
        """Replaces the targets by these addresses, "host:port", and waits until all of them are scraped."""
        wanted = set(addresses)
        text = json.dumps([{"targets": sorted(wanted), "labels": {"site": "here"}}])
        self._targets.with_suffix(".new").write_text(text, encoding="utf-8")
        self._targets.with_suffix(".new").replace(self._targets)

        def scraped() -> bool:
            up = [one for one in self.active_targets() if one["health"] == "up"]
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
    directory: Path,
    config: Mapping[str, Any] | None = None,
    web_config: Path | None = None,
    tls: ssl.SSLContext | None = None,
    certificate: Path | None = None,
) -> Iterator[PrometheusServer]:
    """Starts a server without targets; skips the test if Prometheus is not installed.

    Args:
        directory: Folder for its files. Its targets are in targets.json there.
        config: Configuration, with paths relative to `directory`. By default, one job scrapes the targets.
        web_config: File that makes the server speak https.
        tls: What its clients need then.
        certificate: Folder of the certificate with which it scrapes by https. By default it scrapes by http.
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
        "scrape_configs": [
            {"job_name": "collapipe", "file_sd_configs": [discovery], **_by_https(certificate)}
        ],
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
                *([] if web_config is None else [f"--web.config.file={web_config}"]),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        scheme = "http" if web_config is None else "https"
        server = PrometheusServer(f"{scheme}://{_served_address(log, process)}", targets, tls)
        with server.client() as client:
            eventually(lambda: client.get("/-/ready").status_code == httpx.codes.OK)
        yield server
    finally:
        process.terminate()
        process.wait(LIMIT_SECONDS)


def _by_https(certificate: Path | None) -> dict[str, Any]:
    if certificate is None:
        return {}
    files = {f"{name}_file": f"{certificate}/{name}.pem" for name in ("ca", "cert", "key")}
    return {"scheme": "https", "tls_config": files}


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
    return found[0]
