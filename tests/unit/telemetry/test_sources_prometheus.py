import gzip
import json
import math
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from unit.rpc.authorities import Authority
from unit.telemetry.answering import Form, answering

from collapipe.certificates import Role
from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.telemetry.known_hosts import KnownHost, KnownHosts
from collapipe.telemetry.sources import prometheus
from collapipe.telemetry.sources.prometheus import PrometheusSource
from collapipe.telemetry.sources.samples import Series

STEPS = "collapipe_stage_steps_total"


def row(instance: str, values: list[tuple[float, str]], **labels: str) -> dict[str, Any]:
    metric = {"__name__": STEPS, "instance": instance, "job": "hosts", **labels}
    return {"metric": metric, "values": values}


def success(*rows: dict[str, Any]) -> Callable[[Form], tuple[int, bytes]]:
    data = {"resultType": "matrix", "result": list(rows)}
    return lambda form: (200, json.dumps({"status": "success", "data": data}).encode())


def window(*rows: dict[str, Any]) -> list[Series]:
    """Returns what a source reads from 10 to 12 s, if the server answers with these rows."""
    with answering(success(*rows)) as address:
        return list(PrometheusSource(f"http://{address}/").window(10.0, 12.0))


@contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Hands one connection to a function in a thread, and yields the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join()


def test_samples_have_the_times_of_their_scrapes_and_the_labels_of_services() -> None:
    first, second = window(
        row("b:2", [(10.5, "3"), (11.5, "4")], stage="1", cluster="0"), row("a:1", [(10.25, "1")])
    )
    assert first == Series("a:1", STEPS, (), ((10.25, 1.0),))
    labels = (("cluster", "0"), ("stage", "1"))
    assert second == Series("b:2", STEPS, labels, ((10.5, 3.0), (11.5, 4.0)))


def test_query_is_one_range_at_an_explicit_time() -> None:
    asked: list[Form] = []

    def answer(form: Form) -> tuple[int, bytes]:
        asked.append(form)
        return success()(form)

    with answering(answer) as address:
        assert PrometheusSource(f"http://{address}").window(100.0, 160.5) == []
    (form,) = asked
    assert form["time"] == ["160.500"]
    assert form["query"][0].startswith('{__name__=~"collapipe_')
    assert form["query"][0].endswith('"}[62s]')


def test_samples_outside_of_the_window_are_left_out() -> None:
    outside = row("a:1", [(9.999, "1"), (12.001, "5")], stage="1")
    across = row("a:1", [(9.999, "1"), (10.0, "2"), (12.0, "3"), (12.001, "4")], stage="2")
    (found,) = window(outside, across)
    assert found.points == ((10.0, 2.0), (12.0, 3.0))


def test_host_that_two_jobs_scrape_counts_once() -> None:
    once = [row("a:1", [(10.1, "1"), (11.1, "2")], stage=stage) for stage in ("1", "2")]
    again = [
        row("a:1", [(10.5, "1")], stage="1"),
        row("a:1", [(10.5, "1"), (11.5, "2")], stage="2"),
    ]
    for one in again:
        one["metric"]["job"] = "again"
    found = window(*again[::-1], *once[::-1])
    times = [(dict(one.labels)["stage"], [at for at, _ in one.points]) for one in found]
    assert times == [("1", [10.1, 11.1]), ("2", [10.1, 11.1])]


def test_series_of_unknown_hosts_and_with_labels_that_no_host_has_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def dropped() -> float:
        name = "collapipe_telemetry_dropped_samples_total"
        return REGISTRY.get_sample_value(name, {"source": "prometheus"}) or 0.0

    known = KnownHosts([KnownHost("a", "a:1", "0"), KnownHost("edge", "edge:1", None)])
    links = ["a>edge", "edge>a", "edge>b", "x" * 1000]
    rows = [row(f"{host}:1", [(10.5, "1")], link=link) for host in ("a", "b") for link in links]
    rows += [row("a:1", [(10.5, "1"), (11.5, "2")], cluster="1", stage="1"), row("", [(10.5, "1")])]
    before = dropped()
    with answering(success(*rows)) as address:
        source = PrometheusSource(f"http://{address}", known=lambda: known)
        for _ in range(2):
            found = source.window(10.0, 12.0)
            told = [(one.instance, dict(one.labels)["link"]) for one in found]
            assert told == [("a:1", "a>edge"), ("a:1", "edge>a")]
        assert dropped() - before == 4
        source.window(10.0, 11.0)
        assert dropped() - before == 4, "samples of overlapping windows count once"
    (logged,) = caplog.records
    assert "4 samples of a " in logged.getMessage()


def test_values_that_are_no_numbers_are_passed_on_as_they_are() -> None:
    (found,) = window(row("a:1", [(10.0, "NaN"), (10.5, "+Inf"), (11.0, "-Inf"), (11.5, "-3")]))
    assert math.isnan(found.points[0][1])
    assert [value for _, value in found.points[1:]] == [math.inf, -math.inf, -3.0]


def test_server_that_does_not_run_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so the port is taken, but nothing listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PeerLostError, match=address):
            PrometheusSource(f"http://{address}").window(0.0, 1.0)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("head", "piece", "pause_seconds"),
    [
        (b"", b"", 0.0),
        (HEAD, b"x", 0.02),
        (b"", HEAD.replace(b"200 OK", b"100 Continue") + b"\r\n", 0.0),
        (HEAD + b"Content-Length: 1000000000\r\n\r\n", b" ", 0.02),
        (HEAD + b"Content-Length: 1000000000\r\n\r\n", b" ", 0.0),
    ],
    ids=["silent", "slow head", "endless head", "slow body", "endless body"],
)
def test_server_that_does_not_end_its_answer_in_time_is_reported(
    head: bytes, piece: bytes, pause_seconds: float
) -> None:
    """Each read of a slow or endless answer takes less than the limit, but all reads together take more."""
    has_gone = threading.Event()

    def serve(connection: socket.socket) -> None:
        try:
            connection.sendall(head)
            while piece and not has_gone.wait(pause_seconds):
                connection.sendall(piece)
            while connection.recv(1 << 16):
                pass
        except OSError:
            return  # The client has gone.

    with raw_server(serve) as address, pytest.raises(PeerLostError, match=rf"{address}.* 0\.2 s"):
        try:
            PrometheusSource(f"http://{address}", timeout_seconds=0.2).window(0.0, 1.0)
        finally:
            has_gone.set()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>hello</html>", "HTTP 200.*body"),
        (200, b'{"status": "success"}', "HTTP 200"),
        (200, b'{"status": "success", "data": {"resultType": "vector", "result": []}}', "matrix"),
        (200, b'{"data": []}', "status"),
        pytest.param(200, b"[" * 100_000, "body.*recursion", id="deep"),
        pytest.param(
            200, b'{"status": "success", "x": ' + b"[" * 100_000, "recursion", id="deep x"
        ),
        (200, success(row("a:1", [(0.5, "many")]))({})[1], r"result\.0\.values\.0"),
        (422, b'{"status": "error", "error": "query too long"}', "HTTP 422: query too long"),
        (503, b"", "HTTP 503"),
        (500, success()({})[1], "HTTP 500"),
    ],
)
def test_invalid_answer_is_refused_and_quoted(status: int, body: bytes, message: str) -> None:
    with (
        answering(lambda form: (status, body)) as address,
        pytest.raises(PeerLostError, match=message),
    ):
        PrometheusSource(f"http://{address}").window(0.0, 1.0)


def ask_for(body: bytes, coding: str = "") -> list[Series]:
    """Returns what a source reads from 10 to 12 s, if the server sends these bytes, encoded in this way."""

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        encoding = f"Content-Encoding: {coding}\r\n" if coding else ""
        connection.sendall(HEAD + f"{encoding}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    with raw_server(serve) as address:
        return list(PrometheusSource(f"http://{address}").window(10.0, 12.0))


ANSWER = success(row("a:1", [(10.5, "1")]))({})[1]


def test_answer_that_is_compressed_is_read() -> None:
    (found,) = ask_for(gzip.compress(ANSWER), "gzip")
    assert found.points == ((10.5, 1.0),)


@pytest.mark.parametrize(
    ("body", "coding"),
    [
        (ANSWER + b" " * 1000, ""),
        (gzip.compress(ANSWER + b" " * 1000), "gzip"),
        (gzip.compress(ANSWER) + b" " * 1000, "gzip"),
    ],
    ids=["plain", "compressed", "behind the compressed end"],
)
def test_answer_that_is_too_long_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, body: bytes, coding: str
) -> None:
    monkeypatch.setattr(prometheus, "_MAX_ANSWER_BYTES", 1000)
    with pytest.raises(PeerLostError, match="1000 bytes"):
        ask_for(body, coding)


def test_answer_that_is_compressed_twice_is_refused_before_it_is_expanded() -> None:
    expanded = bytes(1 << 20)
    for coding, body in (
        ("gzip, gzip", gzip.compress(gzip.compress(expanded))),
        ("deflate", zlib.compress(expanded)),
    ):
        with pytest.raises(PeerLostError, match=f"'{coding}'"):
            ask_for(body, coding)


def test_answer_whose_compression_is_damaged_is_refused() -> None:
    with pytest.raises(PeerLostError, match="damaged"):
        ask_for(b"not gzip", "gzip")


def test_answer_with_too_many_values_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes far more memory than bytes of the answer."""
    monkeypatch.setattr(prometheus, "_MAX_ANSWER_VALUES", 1000)
    with pytest.raises(PeerLostError, match=r"\b2\d\d\d values.* 1000 "):
        window(row("a:1", [(0, "1")] * 1000))


def test_redirect_is_not_followed() -> None:
    asked: list[Form] = []

    def answer(form: Form) -> tuple[int, bytes]:
        asked.append(form)
        return success()(form)

    with answering(answer) as elsewhere:

        def redirect(connection: socket.socket) -> None:
            connection.recv(1 << 16)
            head = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://{elsewhere}/\r\n"
            connection.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())

        with raw_server(redirect) as address, pytest.raises(PeerLostError, match="HTTP 307"):
            PrometheusSource(f"http://{address}").window(0.0, 1.0)
    assert not asked


# --- mutual TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def ask_by_tls(authority: Authority, server: str, of: Authority | None = None) -> None:
    """Asks a server with the identity `server` of the authority `of` as a scheduler of `authority`."""
    scheduler = authority.security("scheduler:scheduler")
    context = (of or authority).security(server).server_context()
    with answering(success(row("a:1", [(0.5, "1")])), context) as address:
        with pytest.raises(PeerLostError, match=address):
            PrometheusSource(f"http://{address}").window(0.0, 1.0)
        url, name = f"https://{address}", Role.PROMETHEUS.server_name
        (found,) = PrometheusSource(url, scheduler.client_context, name).window(0.0, 1.0)
    assert found.instance == "a:1"


def test_server_with_the_role_is_asked_by_mutual_tls(authority: Authority) -> None:
    ask_by_tls(authority, "prometheus:metrics")


def test_server_with_another_role_or_authority_is_refused(
    authority: Authority, tmp_path: Path
) -> None:
    with pytest.raises(PeerLostError, match=Role.PROMETHEUS.server_name):
        ask_by_tls(authority, "device-agent:device-0-0")
    with pytest.raises(PeerLostError, match="CERTIFICATE_VERIFY_FAILED"):
        ask_by_tls(authority, "prometheus:metrics", of=Authority(tmp_path))


@pytest.mark.parametrize("url", ["", "prometheus:9090", "ftp://a:1", "http://", "http://a:b"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'{url}'"):
        PrometheusSource(url)


def test_answers_of_a_thousand_hosts_are_shortened_to_what_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten hosts stand for 1,000, and a hundredth of the limit for all of it. Each host has 35 series, every 2 s."""
    monkeypatch.setattr(prometheus, "_MAX_ANSWER_VALUES", prometheus._MAX_ANSWER_VALUES // 100)
    monkeypatch.setattr(prometheus, "_MAX_ANSWER_BYTES", prometheus._MAX_ANSWER_BYTES // 100)
    asked, num_hosts = list[int](), 10

    def answer(form: Form) -> tuple[int, bytes]:
        asked.append(int(form["query"][0].rpartition("[")[2].removesuffix("s]")))
        end = float(form["time"][0])
        values = [(end - age, "123456.789012") for age in range(0, asked[-1] + 1, 2)][::-1]
        series = [
            (f"host-{host}:9464", str(stage)) for host in range(num_hosts) for stage in range(35)
        ]
        rows = [row(host, values, cluster="0", stage=stage, link="a>b") for host, stage in series]
        return success(*rows)(form)

    end = 1.7e9
    with answering(answer) as address:
        source = PrometheusSource(f"http://{address}")
        for _ in range(2):
            found = source.window(end - 3600, end)
            assert len(found) == 350
            assert all(one.points[0][0] >= end - 37.5 and one.points[-1][0] == end for one in found)
        # The last answer has 350 series, each with 6 labels and 20 samples of two values: 16,000 of 20,000 values.
        assert asked == [301, 151, 76, 39, 39]
        num_hosts = 0
        for _ in range(4):
            source.window(end - 3600, end)
    assert asked[5:] == [39, 76, 151, 301]
