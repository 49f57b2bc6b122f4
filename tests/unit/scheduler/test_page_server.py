"""The server of the page: who may see it and act on it, its limits, its headers, and what it refuses."""

import errno
import http.client
import json
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from unit.rpc.authorities import Authority

from collapipe.certificates import Identity
from collapipe.documents import read_document
from collapipe.errors import InvalidInputError, NotFoundError, NotPermittedError
from collapipe.rpc import Security
from collapipe.scheduler.web import access, routes, server
from collapipe.scheduler.web.access import LINK_FILE, Access, Links, Visitor, is_loopback
from collapipe.scheduler.web.server import WebServer

URL = "http://127.0.0.1:80/"


def present_key(folder: Path) -> str:
    page = read_document(folder / LINK_FILE)
    assert page is not None and page["url"] == URL
    key: str = page["link"].removeprefix(f"{URL}#key=")
    return key


def test_link_works_once_and_leaves_one_that_only_the_user_can_read(tmp_path: Path) -> None:
    links = Links(URL, tmp_path)
    key = present_key(tmp_path)
    assert links.exchange("guess") is None
    cookie = links.exchange(key)
    assert cookie is not None and links.knows(cookie)
    assert links.exchange(key) is None and present_key(tmp_path) != key
    assert links.exchange(present_key(tmp_path)) is not None
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600} and LINK_FILE in modes


def test_cookie_outlives_a_restart_but_neither_its_time_nor_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = Links(URL, tmp_path)
    cookie = links.exchange(present_key(tmp_path))
    assert cookie is not None
    again = Links(URL, tmp_path)
    assert again.knows(cookie)
    expires, signature = cookie.split(".")
    later, shorter = f"{int(expires) + 1}.{signature}", f"{expires}.{signature[:-1]}"
    for other in (later, shorter, "", ".", "a.b", "é.é"):
        assert not again.knows(other)
    for cut in (
        b"",
        b"a",
    ):  # The process or the disk ended before all was written. One byte could be guessed.
        (tmp_path / "page-secret").write_bytes(cut)
        assert not Links(URL, tmp_path).knows(cookie)
        assert len((tmp_path / "page-secret").read_bytes()) == 32
    now = time.time()
    monkeypatch.setattr(access.time, "time", lambda: now + 31 * 86_400)
    assert not again.knows(cookie)


def test_link_goes_on_working_after_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = Links(URL, tmp_path)
    key = present_key(tmp_path)

    def refuse(path: Path, document: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as full:
        full.setattr(access, "write_document", refuse)
        with pytest.raises(OSError, match=LINK_FILE):
            links.exchange(key)
    assert present_key(tmp_path) == key
    assert links.exchange(key) is not None


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "192.168.1.2", "::")))


def test_page_on_loopback_has_only_names_of_this_machine(tmp_path: Path) -> None:
    page = Access("127.0.0.1", Links(URL, tmp_path), Security.insecure())
    for own in ("127.0.0.1:4711", "localhost:4711", "LOCALHOST", "[::1]:4711", "[::1]"):
        assert page.is_own(own)
    for name in ("evil.example:4711", "127.0.0.1.evil.example", "192.168.1.2:4711"):
        assert not page.is_own(name)
    assert not page.is_own("") and not page.is_own("localhost.:80")


def test_page_of_a_deployment_has_the_names_in_its_certificate(tmp_path: Path) -> None:
    page = Access("0.0.0.0", None, Authority(tmp_path).security("scheduler:scheduler", "pi.lan"))
    assert all(map(page.is_own, ("192.168.1.2:4711", "pi.lan:4711", "PI.LAN")))
    assert not page.is_own("evil.example")


@pytest.mark.parametrize(
    ("identity", "owners"),
    [
        ("client:me", {"client:me", ""}),
        ("admin:root", {"client:me", "client:other", ""}),
        ("device-agent:me", set()),
        ("prometheus:me", set()),
        (None, set()),
    ],
)
def test_people_change_only_what_is_theirs(identity: str | None, owners: set[str]) -> None:
    visitor = Visitor(may_see=True, identity=Identity.parse(identity) if identity else None)
    assert set(filter(visitor.may_change, ("client:me", "client:other", ""))) == owners


def test_revoked_key_sees_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    security, person = authority.security("scheduler:scheduler"), authority.security("client:me")
    assert person.certificate is not None
    shown = person.certificate.read_bytes()
    uris = [Identity.parse("client:me").uri]
    page = Access("0.0.0.0", None, security)
    assert page.visitor("", uris, shown).may_change("client:me")
    security.learn_revoked(authority.revoke("client:me"))
    with pytest.raises(NotPermittedError, match="revoked"):
        page.visitor("", uris, shown)


LIMIT_SECONDS = 60.0
STATIC = Path(routes.__file__).parent / "static"
UPLOT = "1.6.32"


class Content:
    """What the page shows in these tests: as much as a test asks for, and each time another text."""

    def __init__(self) -> None:
        self.num_bytes = 10
        self.count = 0
        self.cancelled: list[str] = []
        self.tracing, self.held = threading.Event(), threading.Event()

    def sections(self, focus: Any) -> dict[str, Any]:
        self.count += 1
        jobs = [{"id": "one", "owner": "client:me"}]
        return {"jobs": jobs, "text": f"{self.count}" * self.num_bytes}

    def cancel(self, job_id: str, may: Callable[[str], bool]) -> None:
        assert may("client:me")
        self.cancelled.append(job_id)

    def round(self, job_id: str, index: int) -> dict[str, Any]:
        raise NotFoundError(f"there is no round {index + 1}")

    def trace(self, job_id: str, index: int, cluster: int) -> dict[str, Any]:
        self.tracing.set()
        assert self.held.wait(LIMIT_SECONDS)
        return {"index": index, "cluster": cluster}


class Page:
    """A served page, and the browser of its user."""

    def __init__(self, directory: Path, listen: str = "127.0.0.1:0") -> None:
        self.content: Any = Content()
        self.server = WebServer(listen, directory, Security.insecure(), self.content, self.content)
        self.origin = self.server.url.strip("/")
        host, port = self.origin.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.cookie = ""
        document = read_document(directory / LINK_FILE)
        assert document is not None
        self.link: str = document["link"]

    def open_link(self) -> None:
        key = self.link.split("#key=")[1]
        status, headers, _ = self.ask("POST", "/api/session", body={"key": key})
        assert status == 204
        attributes = headers["set-cookie"].lower().split("; ")
        assert {"httponly", "samesite=strict"} <= set(attributes)
        self.cookie = headers["set-cookie"].split(";")[0]

    def ask(
        self, method: str, path: str, *, body: Any = None, **headers: str | None
    ) -> tuple[int, dict[str, str], Any]:
        """Sends a request as the page itself does, unless `headers` say otherwise. Returns status, headers and content.

        Args:
            body: Text is sent as it is, and everything else as JSON.
        """
        own: dict[str, str | None] = {"Cookie": self.cookie or None}
        if method != "GET":
            own |= {"Origin": self.origin, "X-CollaPipe": "1"}
        own |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = body if body is None or isinstance(body, str) else json.dumps(body)
        connection = http.client.HTTPConnection(*self.address, timeout=LIMIT_SECONDS)
        try:
            connection.request(method, path, sent, {k: v for k, v in own.items() if v is not None})
            answer = connection.getresponse()
            text = answer.read().decode()
            found = {name.lower(): value for name, value in answer.getheaders()}
            is_json = found.get("content-type") == "application/json"
            return answer.status, found, json.loads(text) if is_json and text else text
        finally:
            connection.close()

    def status(self, method: str, path: str, **options: Any) -> int:
        return self.ask(method, path, **options)[0]

    def connect(self, request: str = "") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=LIMIT_SECONDS)
        connection.sendall(request.encode())
        return connection

    def open_stream(self) -> socket.socket:
        return self.connect(
            f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {self.cookie}\r\n\r\n"
        )

    def close(self) -> None:
        self.server.close()
        assert not self.server._thread.is_alive()


def opened(directory: Path) -> Iterator[Page]:
    page = Page(directory)
    page.open_link()
    yield page
    page.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page for all tests that leave no connection open."""
    yield from opened(tmp_path_factory.mktemp("page"))


@pytest.fixture
def own_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """A page for one test, whose streams look for changes all the time."""
    monkeypatch.setattr(routes, "_PAUSE_SECONDS", 0.01)
    yield from opened(tmp_path)


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(20).split()[1])


def test_only_the_empty_page_needs_no_link(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "cookie", "")
    for path in ("/", "/static/main.js", f"/static/vendor/uplot-{UPLOT}/uPlot.iife.min.js"):
        assert page.status("GET", path) == 200
    for path in ("state", "stream", "jobs/one/rounds", "jobs/one/rounds/1/trace"):
        status, _, answer = page.ask("GET", f"/api/{path}")
        assert status == 403 and "collapipe status" in answer["error"]
    assert page.status("POST", "/api/jobs/one/cancel") == 403
    assert page.status("POST", "/api/session", body={"key": "guess"}) == 403


def test_link_lets_its_user_read_and_cancel(own_page: Page) -> None:
    status, _, answer = own_page.ask("GET", "/api/state")
    assert status == 200 and answer["jobs"] == [{"id": "one", "owner": "client:me", "mine": True}]
    assert own_page.status("POST", "/api/jobs/one/cancel") == 204
    assert own_page.content.cancelled == ["one"]


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
def test_other_sites_cannot_use_the_cookie(page: Page, headers: dict[str, str | None]) -> None:
    assert page.status("POST", "/api/jobs/one/cancel", **headers) == 403
    assert page.content.cancelled == []
    if "Host" in headers:  # A name that points here reads nothing.
        for path in ("/", "/api/state", "/static/main.js"):
            status, _, answer = page.ask("GET", path, **headers)
            assert status == 403 and "evil.example" in answer["error"]


@pytest.mark.parametrize("path", ["/", "/static/page.css", "/api/state", "/nothing"])
def test_every_answer_forbids_scripts_of_others_and_frames(page: Page, path: str) -> None:
    _, headers, _ = page.ask("GET", path)
    parts = headers["content-security-policy"].split(";")
    policy = dict(part.strip().split(" ", 1) for part in parts)
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    is_stored = path not in ("/api/state", "/nothing")
    assert headers["cache-control"] == ("no-cache" if is_stored else "no-store")
    assert "server" not in headers


@pytest.mark.parametrize(
    ("expected", "method", "path", "body"),
    [
        *[(405, method, "/api/state", None) for method in ("PUT", "DELETE", "POST", "PATCH")],
        (404, "GET", "/static/../server.py", None),
        (404, "GET", "/static/%2e%2e/server.py", None),
        (404, "GET", "/static//etc/passwd", None),
        *[(403, "POST", "/api/session", body) for body in ("[" * 250, "null", "", "{")],
        (403, "POST", "/api/session", '{"key": "\\ud800"}'),
        (403, "POST", "/api/session", {"key": 1}),
        (400, "POST", "/api/session", {"key": "k" * 2000}),
    ],
)
def test_odd_requests_are_refused(
    page: Page, expected: int, method: str, path: str, body: Any
) -> None:
    assert page.status(method, path, body=body) == expected


def test_large_header_is_refused(page: Page) -> None:
    with page.connect(f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: {'x' * 20_000}") as connection:
        assert status_of(connection) == 400


@pytest.mark.parametrize("number", ["0", "-1", "x", "9" * 5000])
def test_odd_numbers_of_rounds_are_those_of_no_round(page: Page, number: str) -> None:
    status, _, answer = page.ask("GET", f"/api/jobs/one/rounds/{number}")
    assert (status, answer) == (404, {"error": "there is no round 0"})


def test_stream_sends_only_what_has_changed(own_page: Page) -> None:
    with own_page.open_stream() as connection, connection.makefile() as lines:
        assert "200" in lines.readline()
        sent = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
        assert json.loads(next(sent)).keys() == {"jobs", "text"}
        assert json.loads(next(sent)).keys() == {"text"}


def test_number_of_streams_is_limited(own_page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOST_STREAMS", 2)
    streams = [own_page.open_stream() for _ in range(2)]
    assert [status_of(each) for each in streams] == [200, 200]
    status, _, answer = own_page.ask("GET", "/api/stream")
    assert status == 503 and "close one" in answer["error"]
    streams.pop().close()
    for _ in range(10_000):  # The place of the closed stream becomes free.
        with own_page.open_stream() as connection:
            status = status_of(connection)
        if status == 200:
            break
    assert status == 200
    streams.pop().close()


def test_slow_reader_is_dropped(own_page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SLOW_SECONDS", 0.1)
    dropped = threading.Event()
    monkeypatch.setattr(routes.logger, "warning", lambda *_: dropped.set())
    own_page.content.num_bytes = 2_000_000
    with own_page.open_stream() as connection:
        assert dropped.wait(LIMIT_SECONDS)
        while connection.recv(1 << 20):  # What was sent before ends.
            pass
    before = own_page.content.count
    assert own_page.status("GET", "/") == 200
    assert own_page.content.count == before


def test_connections_are_limited(own_page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENCE_SECONDS", 0.1)
    with own_page.connect("GET / HTTP/1.1\r\n") as connection:
        assert connection.recv(1) == b""
    monkeypatch.setattr(server, "SILENCE_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 1)
    request = "HEAD / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with own_page.connect(request) as first:
        assert b"200" in first.recv(4096)
        with pytest.raises((ConnectionError, http.client.BadStatusLine)):
            own_page.ask("GET", "/")
        first.sendall(request.encode())
        assert b"200" in first.recv(4096)


@pytest.mark.parametrize(
    ("hosts", "advertised", "shown"),
    [
        (["pi.lan", "192.168.1.2"], "hub.lan", "https://hub.lan"),
        (["pi.lan", "192.168.1.2"], "", "https://192.168.1.2"),
        (["fd77::10"], "", "https://[fd77::10]"),
        (None, "", "http://127.0.0.1"),
    ],
)
def test_page_on_all_addresses_has_a_link_that_a_browser_can_open(
    tmp_path: Path, hosts: list[str] | None, advertised: str, shown: str
) -> None:
    security, content = Security.insecure(), Content()
    if hosts is not None:
        security = Authority(tmp_path).security("scheduler:scheduler", *hosts)
    arguments: Any = "0.0.0.0:0", tmp_path, security, content, content, advertised
    page = WebServer(*arguments)
    try:
        assert page.url.rpartition(":")[0] == shown
        assert page._access.is_own(page.url.split("/")[2])
    finally:
        page.close()


def test_connections_without_a_handshake_are_few_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SILENCE_SECONDS", 5.0)
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    security, content = Authority(tmp_path).security("scheduler:scheduler"), Content()
    page = WebServer("0.0.0.0:0", tmp_path, security, content, content)  # type: ignore[arg-type]
    address = "127.0.0.1", int(page.url.strip("/").rpartition(":")[2])
    silent = [socket.create_connection(address, timeout=LIMIT_SECONDS) for _ in range(3)]
    try:
        started = time.monotonic()
        assert silent[2].recv(1) == b""
        silent[1].setblocking(False)
        with pytest.raises(BlockingIOError):  # The others have their time.
            silent[1].recv(1)
        assert silent[0].recv(1) == b""
        assert time.monotonic() - started < 50  # By default, it would be 60 s.
        context = security.client_context()
        assert context is not None
        with (
            socket.create_connection(address, timeout=LIMIT_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname="127.0.0.1") as secured,
        ):
            secured.sendall(b"HEAD / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert secured.recv(20).startswith(b"HTTP/1.1 ")
    finally:
        for connection in silent:
            connection.close()
        page.close()


def test_one_trace_is_collected_at_a_time(own_page: Page) -> None:
    path = "/api/jobs/one/rounds/3/trace?cluster=1"
    with futures.ThreadPoolExecutor(1) as thread:
        first = thread.submit(own_page.ask, "GET", path)
        try:
            assert own_page.content.tracing.wait(LIMIT_SECONDS)
            assert own_page.status("GET", path) == 503
        finally:
            own_page.content.held.set()
        status, _, answer = first.result(LIMIT_SECONDS)
    assert (status, answer) == (200, {"index": 2, "cluster": 1})


@pytest.mark.parametrize("host", ["127.1", "localhost"])
def test_page_needs_its_link_if_only_this_machine_reaches_it(tmp_path: Path, host: str) -> None:
    page = Page(tmp_path, f"{host}:0")
    page.close()
    assert page.link.startswith(f"http://{host}:")


@pytest.mark.parametrize(
    "listen", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "300.1.1.1:0", "nothing.invalid:0"]
)
def test_wrong_addresses_are_refused_at_the_start(tmp_path: Path, listen: str) -> None:
    with pytest.raises(InvalidInputError, match="--web"):
        Page(tmp_path, listen)


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
