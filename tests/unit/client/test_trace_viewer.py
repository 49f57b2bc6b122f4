"""The file of a trace is served on loopback until the page has fetched it, and nothing else is."""

import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from collapipe.errors import AttemptFailedError, InvalidInputError
from collapipe_client import trace_viewer
from collapipe_client.trace_viewer import show_in_browser


class Browser(threading.Thread):
    """Opens Perfetto's page: asks for another file first, and then for the trace."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.url = ""
        self.refused = 0
        self.body = b""
        self.origin: str | None = None

    def open(self, url: str) -> bool:
        self.url = url
        self.start()
        return True

    def run(self) -> None:
        served = urlsplit(self.url).fragment.partition("?url=")[2]
        try:
            urllib.request.urlopen(f"{served}.other", timeout=20)
        except urllib.error.HTTPError as error:
            self.refused = error.code
        with urllib.request.urlopen(served, timeout=20) as answer:
            self.body = answer.read()
            self.origin = answer.headers["Access-Control-Allow-Origin"]


def test_page_gets_the_trace_and_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "a round.pftrace"
    file.write_bytes(b"trace")
    (tmp_path / "a round.pftrace.other").write_bytes(b"secret")
    browser, notes = Browser(), list[str]()
    show_in_browser(file, notes.append, browser.open, port=0)
    browser.join(20)
    assert browser.url.startswith("https://ui.perfetto.dev/#!/?url=http://127.0.0.1:")
    assert (browser.refused, browser.body) == (404, b"trace")
    assert browser.origin == "https://ui.perfetto.dev"
    assert notes == [f"opened {browser.url}"]


def test_machine_without_a_browser_is_told_the_address_and_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_viewer, "_LIMIT_SECONDS", 0.2)
    file = tmp_path / "file"
    file.write_bytes(b"trace")
    notes: list[str] = []
    with pytest.raises(AttemptFailedError, match=r"within 0\.2 s: open .* by hand"):
        show_in_browser(file, notes.append, lambda url: False, port=0)
    assert notes[0].startswith("open in a browser on this machine: https://ui.perfetto.dev")


def test_port_in_use_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"trace")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInputError, match=f"port {port} of this machine is in use"):
            show_in_browser(file, print, lambda url: True, port=port)
