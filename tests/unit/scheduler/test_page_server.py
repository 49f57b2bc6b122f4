"""The server of the page: its limits, its headers, and what it refuses. Real connections, with made-up content."""

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collapipe.documents import read_document
from collapipe.errors import InvalidInputError, NotFoundError
from collapipe.rpc import Security
from collapipe.scheduler.web import routes, server
from collapipe.scheduler.web.access import LINK_FILE
from collapipe.scheduler.web.server import WebServer

LIMIT_SECONDS = 60.0
STATIC = Path(routes.__file__).parent / "static"
UPLOT = "1.6.32"


class Content:
    """What the page shows in these tests: as much as a test asks for, and each time another text."""

    def __init__(self) -> None:
        self.num_bytes = 10
        self.count = 0
        self.cancelled: list[str] = []
        self.held = threading.Event()
        self.held.set()

    def sections(self, focus: Any) -> dict[str, Any]:
        self.count += 1
        return {
            "jobs": [{"id": "one", "owner": "client:me"}],
            "text": f"{self.count}" * self.num_bytes,
        }

    def cancel(self, job_id: str, may: Callable[[str], bool]) -> None:
        assert may("client:me")
        self.cancelled.append(job_id)

    def rounds(self, job_id: str, after: int) -> dict[str, Any]:
        raise NotFoundError(f"there is no job {job_id!r}")

    def round(self, job_id: str, index: int) -> dict[str, Any]:
        raise NotFoundError(f"there is no round {index + 1}")

    def trace(self, job_id: str, index: int, cluster: int) -> dict[str, Any]:
        assert self.held.wait(LIMIT_SECONDS)
        return {"index": index, "cluster": cluster}


@pytest.fixture
def content() -> Content:
    return Content()


@pytest.fixture
def page(content: Content, tmp_path: Path) -> Iterator[WebServer]:
    shown: Any = content
    page = WebServer("127.0.0.1:0", tmp_path, Security.insecure(), shown, shown)
    yield page
    page.close()
    assert not page._thread.is_alive()


@pytest.fixture
def cookie(page: WebServer, tmp_path: Path) -> str:
    link = read_document(tmp_path / LINK_FILE)
    assert link is not None
    key = link["link"].split("#key=")[1]
    status, headers, _ = ask(page, "POST", "/api/session", body={"key": key})
    assert status == 204
    attributes = headers["set-cookie"].lower().split("; ")
    assert {"httponly", "samesite=strict"} <= set(attributes)
    return headers["set-cookie"].split(";")[0]


def address(page: WebServer) -> tuple[str, int]:
    host, port = page.url.removeprefix("http://").strip("/").split(":")
    return host, int(port)


def ask(
    page: WebServer,
    method: str,
    path: str,
    *,
    cookie: str = "",
    body: Any = None,
    **headers: str | None,
) -> tuple[int, dict[str, str], Any]:
    """Sends a request as the page itself does, unless `headers` say otherwise. Returns status, headers and content."""
    own: dict[str, str | None] = {"Cookie": cookie or None}
    if method != "GET":
        own |= {"Origin": page.url.strip("/"), "X-CollaPipe": "1"}
    own |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(*address(page), timeout=LIMIT_SECONDS)
    try:
        sent = json.dumps(body) if body is not None else None
        connection.request(method, path, sent, {k: v for k, v in own.items() if v is not None})
        answer = connection.getresponse()
        text = answer.read().decode()
        found = {name.lower(): value for name, value in answer.getheaders()}
        is_json = found.get("content-type") == "application/json"
        return answer.status, found, json.loads(text) if is_json and text else text
    finally:
        connection.close()


def open_stream(page: WebServer, cookie: str) -> socket.socket:
    connection = socket.create_connection(address(page), timeout=LIMIT_SECONDS)
    connection.sendall(
        f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\n\r\n".encode()
    )
    return connection


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(20).split()[1])


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_without_the_link_only_the_empty_page_is_there(page: WebServer) -> None:
    for path in ("/", "/static/main.js", f"/static/vendor/uplot-{UPLOT}/uPlot.iife.min.js"):
        assert ask(page, "GET", path)[0] == 200
    for path in (
        "/api/state",
        "/api/stream",
        "/api/jobs/one/rounds",
        "/api/jobs/one/rounds/1/trace",
    ):
        status, _, answer = ask(page, "GET", path)
        assert status == 403 and "collapipe status" in answer["error"]
    assert ask(page, "POST", "/api/jobs/one/cancel")[0] == 403
    assert ask(page, "POST", "/api/session", body={"key": "guess"})[0] == 403


def test_link_lets_its_user_read_and_cancel(page: WebServer, cookie: str, content: Content) -> None:
    status, _, answer = ask(page, "GET", "/api/state", cookie=cookie)
    assert status == 200 and answer["jobs"] == [{"id": "one", "owner": "client:me", "mine": True}]
    assert ask(page, "POST", "/api/jobs/one/cancel", cookie=cookie)[0] == 204
    assert content.cancelled == ["one"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": None},
        {"X_CollaPipe": None},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
    ids=str,
)
def test_other_sites_can_do_nothing_with_the_cookie(
    page: WebServer, cookie: str, content: Content, headers: dict[str, str | None]
) -> None:
    assert ask(page, "POST", "/api/jobs/one/cancel", cookie=cookie, **headers)[0] == 403
    assert content.cancelled == []


def test_name_that_points_here_reads_nothing(page: WebServer, cookie: str) -> None:
    for path in ("/", "/api/state", "/static/main.js"):
        status, _, answer = ask(
            page, "GET", path, cookie=cookie, Host=f"evil.example:{address(page)[1]}"
        )
        assert status == 403 and "evil.example" in answer["error"]


@pytest.mark.parametrize("path", ["/", "/static/page.css", "/api/state", "/nothing"])
def test_every_answer_forbids_scripts_of_others_and_frames(
    page: WebServer, cookie: str, path: str
) -> None:
    _, headers, _ = ask(page, "GET", path, cookie=cookie)
    policy = dict(
        part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert (
        headers["x-content-type-options"] == "nosniff"
        and headers["referrer-policy"] == "no-referrer"
    )
    assert headers["cache-control"] == (
        "no-store" if path in ("/api/state", "/nothing") else "no-cache"
    )
    assert "server" not in headers


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST", "PATCH"])
def test_only_reading_and_the_two_actions_are_served(
    page: WebServer, cookie: str, method: str
) -> None:
    assert ask(page, method, "/api/state", cookie=cookie)[0] == 405


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd"]
)
def test_no_other_file_is_served(page: WebServer, cookie: str, path: str) -> None:
    assert ask(page, "GET", path, cookie=cookie)[0] == 404


def test_errors_are_sentences(page: WebServer, cookie: str) -> None:
    status, _, answer = ask(page, "GET", "/api/jobs/none/rounds", cookie=cookie)
    assert status == 404 and answer == {"error": "there is no job 'none'"}


@pytest.mark.parametrize("sent", ["[" * 250, '{"key": "\\ud800"}', '{"key": 1}', "null", "", "{"])
def test_odd_bodies_are_refused_like_wrong_keys(page: WebServer, sent: str) -> None:
    connection = http.client.HTTPConnection(*address(page), timeout=LIMIT_SECONDS)
    connection.request(
        "POST", "/api/session", sent, {"Origin": page.url.strip("/"), "X-CollaPipe": "1"}
    )
    assert connection.getresponse().status == 403
    connection.close()


@pytest.mark.parametrize("number", ["0", "-1", "x", "9" * 5000])
def test_odd_numbers_of_rounds_are_those_of_no_round(
    page: WebServer, cookie: str, number: str
) -> None:
    status, _, answer = ask(page, "GET", f"/api/jobs/one/rounds/{number}", cookie=cookie)
    assert (status, answer["error"]) == (404, "there is no round 0")


def test_large_requests_are_refused(page: WebServer, cookie: str) -> None:
    assert ask(page, "POST", "/api/session", body={"key": "k" * 2000})[0] == 400
    with socket.create_connection(address(page), timeout=LIMIT_SECONDS) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 20_000)
        assert status_of(connection) == 400


def test_stream_sends_only_what_has_changed(
    page: WebServer, cookie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_PAUSE_SECONDS", 0.01)
    with open_stream(page, cookie) as connection, connection.makefile() as lines:
        assert "200" in lines.readline()
        data = (
            json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")
        )
        assert next(data).keys() == {"jobs", "text"}
        assert next(data).keys() == {"text"}


def test_no_more_pages_follow_than_the_limit(
    page: WebServer, cookie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MOST_STREAMS", 2)
    monkeypatch.setattr(routes, "_PAUSE_SECONDS", 0.01)
    streams = [open_stream(page, cookie) for _ in range(2)]
    assert [status_of(each) for each in streams] == [200, 200]
    status, _, answer = ask(page, "GET", "/api/stream", cookie=cookie)
    assert status == 503 and "close one" in answer["error"]
    streams.pop().close()

    def has_room() -> bool:
        with open_stream(page, cookie) as connection:
            return status_of(connection) == 200

    wait_for(has_room, "the place of a closed stream is free")
    streams.pop().close()


def test_reader_that_does_not_read_is_dropped(
    page: WebServer, cookie: str, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(routes, "SLOW_SECONDS", 0.5)
    content.num_bytes = 2_000_000
    with open_stream(page, cookie) as connection:
        connections = page._server.server_state.connections  # type: ignore[union-attr]
        wait_for(lambda: content.count > 1, "the stream has begun")
        wait_for(lambda: not connections, "the connection of the slow reader is closed")
        while connection.recv(1 << 20):  # What was sent before ends.
            pass
    before = content.count
    assert ask(page, "GET", "/", cookie=cookie)[0] == 200
    assert content.count == before


def test_silent_connections_are_closed_and_others_are_limited(
    page: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SILENCE_SECONDS", 0.3)
    with socket.create_connection(address(page), timeout=LIMIT_SECONDS) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        assert connection.recv(1) == b""
    monkeypatch.setattr(server, "SILENCE_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 1)
    with socket.create_connection(address(page), timeout=LIMIT_SECONDS) as first:
        wait_for(lambda: len(page._server.server_state.connections) == 1, "the first is there")  # type: ignore[union-attr]
        with pytest.raises((ConnectionError, http.client.BadStatusLine)):
            ask(page, "GET", "/")
        first.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert status_of(first) == 200


def test_one_trace_is_collected_at_a_time(page: WebServer, cookie: str, content: Content) -> None:
    content.held.clear()
    answers: list[Any] = []
    path = "/api/jobs/one/rounds/3/trace?cluster=1"
    threads: list[threading.Thread] = []

    def is_refused() -> bool:
        threads.append(
            threading.Thread(target=lambda: answers.append(ask(page, "GET", path, cookie=cookie)))
        )
        threads[-1].start()
        threads[-1].join(0.5)
        return bool(answers)

    wait_for(is_refused, "a second trace is refused while the first is collected")
    assert answers[0][0] == 503
    content.held.set()
    for thread in threads:
        thread.join()
    assert (200, {"index": 2, "cluster": 1}) in [(each[0], each[2]) for each in answers]


@pytest.mark.parametrize("host", ["127.1", "localhost"])
def test_page_needs_its_link_if_only_this_machine_reaches_it(
    tmp_path: Path, content: Content, host: str
) -> None:
    shown: Any = content
    page = WebServer(f"{host}:0", tmp_path, Security.insecure(), shown, shown)
    page.close()
    found = read_document(tmp_path / LINK_FILE)
    assert found is not None and found["link"].startswith(f"http://{host}:")


@pytest.mark.parametrize(
    "listen", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "300.1.1.1:0", "nothing.invalid:0"]
)
def test_wrong_addresses_are_refused_at_the_start(
    tmp_path: Path, content: Content, listen: str
) -> None:
    shown: Any = content
    with pytest.raises(InvalidInputError, match="--web"):
        WebServer(listen, tmp_path, Security.insecure(), shown, shown)


def test_plot_library_is_the_version_of_its_folder_with_its_licence() -> None:
    [folder] = (STATIC / "vendor").iterdir()
    assert folder.name == f"uplot-{UPLOT}"
    assert f"(v{UPLOT})" in (folder / "uPlot.iife.min.js").read_text("utf-8")[:100]
    assert "MIT License" in (folder / "LICENSE").read_text("utf-8")
    assert f"/vendor/{folder.name}/" in (STATIC / "index.html").read_text("utf-8")


def test_files_of_the_page_ask_no_other_site_and_have_no_inline_scripts() -> None:
    for path in STATIC.iterdir():
        if path.is_file():
            text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?://|//[a-z]+\.[a-z]", text), path
    index = (STATIC / "index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", index)
