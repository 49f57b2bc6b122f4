import json
import math
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.rpc.authorities import Authority
from unit.telemetry.answering import Form, answering

from collapipe.certificates import Role
from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.rpc import Security
from collapipe.telemetry.sources import prometheus
from collapipe.telemetry.sources.prometheus import PrometheusSource

STEPS = "collapipe_stage_steps_total"


def row(instance: str, values: list[tuple[float, str]], **labels: str) -> dict[str, Any]:
    metric = {"__name__": STEPS, "instance": instance, "job": "hosts", **labels}
    return {"metric": metric, "values": values}


def success(*rows: dict[str, Any]) -> Callable[[Form], tuple[int, bytes]]:
    data = {"resultType": "matrix", "result": list(rows)}
    return lambda form: (200, json.dumps({"status": "success", "data": data}).encode())


def test_samples_have_the_times_of_their_scrapes_and_the_labels_of_services() -> None:
    answer = success(
        row("b:2", [(10.5, "3"), (11.5, "4")], stage="1", cluster="0"), row("a:1", [(10.25, "1")])
    )
    with answering(answer) as address:
        found = PrometheusSource(f"http://{address}/").window(10.0, 12.0)
    assert [one.instance for one in found] == ["a:1", "b:2"]
    assert found[1].name == STEPS
    assert found[1].labels == (("cluster", "0"), ("stage", "1"))
    assert found[1].points == ((10.5, 3.0), (11.5, 4.0))


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
    with answering(success(outside, across)) as address:
        (found,) = PrometheusSource(f"http://{address}").window(10.0, 12.0)
    assert found.points == ((10.0, 2.0), (12.0, 3.0))


def test_host_that_two_jobs_scrape_counts_once() -> None:
    rows = [
        row("a:1", [(10.1, "1"), (11.1, "2")], stage="1"),
        row("a:1", [(10.1, "1"), (11.1, "2")], stage="2"),
        row("a:1", [(10.5, "1")], stage="1"),
        row("a:1", [(10.5, "1"), (11.5, "2")], stage="2"),
    ]
    for again in rows[2:]:
        again["metric"]["job"] = "again"
    with answering(success(*reversed(rows))) as address:
        found = PrometheusSource(f"http://{address}").window(10.0, 12.0)
    times = [(dict(one.labels)["stage"], [at for at, _ in one.points]) for one in found]
    assert times == [("1", [10.1, 11.1]), ("2", [10.1, 11.1])]


def test_values_that_are_no_numbers_are_passed_on_as_they_are() -> None:
    values = [(10.0, "NaN"), (10.5, "+Inf"), (11.0, "-Inf"), (11.5, "-3")]
    with answering(success(row("a:1", values))) as address:
        (found,) = PrometheusSource(f"http://{address}").window(10.0, 12.0)
    assert math.isnan(found.points[0][1])
    assert [value for _, value in found.points[1:]] == [math.inf, -math.inf, -3.0]


def test_server_that_does_not_run_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so the port is taken, but nothing listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            PeerLostError, match=rf"{address}.*cannot be reached.*check that it runs"
        ):
            PrometheusSource(f"http://{address}").window(0.0, 1.0)


def test_server_that_is_too_slow_times_out() -> None:
    done = threading.Event()

    def answer(form: Form) -> tuple[int, bytes]:
        done.wait(60)
        return success()(form)

    with answering(answer) as address:
        try:
            with pytest.raises(PeerLostError, match=r"did not answer within 0\.2 s"):
                PrometheusSource(f"http://{address}", timeout_seconds=0.2).window(0.0, 1.0)
        finally:
            done.set()


def test_server_that_sends_byte_by_byte_times_out() -> None:
    """Each read takes less than the limit, but all reads together take more."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send_slowly() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not done.wait(0.02):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=send_slowly)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        try:
            with pytest.raises(PeerLostError, match=r"did not answer within 0\.3 s"):
                PrometheusSource(url, timeout_seconds=0.3).window(0.0, 1.0)
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>hello</html>", "not as Prometheus answers.*address is right"),
        (200, b'{"status": "success"}', "gave no reason"),
        (200, b'{"status": "success", "data": {"resultType": "vector", "result": []}}', "matrix"),
        (200, json.dumps({"data": []}).encode(), "status: Field required"),
        (
            422,
            b'{"status": "error", "errorType": "execution", "error": "query too long"}',
            "HTTP 422: query too long",
        ),
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


def test_value_that_is_no_number_is_refused() -> None:
    with (
        answering(success(row("a:1", [(0.5, "many")]))) as address,
        pytest.raises(PeerLostError, match="not as Prometheus answers"),
    ):
        PrometheusSource(f"http://{address}").window(0.0, 1.0)


def test_answer_that_is_too_long_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus, "_MAX_ANSWER_BYTES", 1000)
    with (
        answering(success(*(row(f"a:{port}", [(0.5, "1")]) for port in range(100)))) as address,
        pytest.raises(PeerLostError, match="sent more than 1000 bytes"),
    ):
        PrometheusSource(f"http://{address}").window(0.0, 1.0)


def test_redirect_is_not_followed() -> None:
    asked: list[Form] = []

    def answer(form: Form) -> tuple[int, bytes]:
        asked.append(form)
        return success()(form)

    with answering(answer) as elsewhere, socket.create_server(("127.0.0.1", 0)) as server:

        def redirect() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                head = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://{elsewhere}/\r\n"
                connection.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=redirect)
        thread.start()
        with pytest.raises(PeerLostError, match="HTTP 307"):
            PrometheusSource(f"http://127.0.0.1:{server.getsockname()[1]}").window(0.0, 1.0)
        thread.join()
    assert not asked


# --- mutual TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def secured(address: str, scheduler: Security) -> PrometheusSource:
    """Returns the source of a scheduler."""
    return PrometheusSource(
        f"https://{address}", scheduler.client_context, Role.PROMETHEUS.server_name
    )


def test_server_with_the_role_is_asked_by_mutual_tls(authority: Authority) -> None:
    server = authority.security("prometheus:metrics").server_context()
    scheduler = authority.security("scheduler:scheduler")
    with answering(success(row("a:1", [(0.5, "1")])), server) as address:
        (found,) = secured(address, scheduler).window(0.0, 1.0)
        assert found.instance == "a:1"
        with pytest.raises(PeerLostError, match="cannot be reached"):
            PrometheusSource(f"http://{address}").window(0.0, 1.0)


def test_server_with_another_role_is_refused(authority: Authority) -> None:
    server = authority.security("device-agent:device-0-0").server_context()
    scheduler = authority.security("scheduler:scheduler")
    with (
        answering(success(), server) as address,
        pytest.raises(PeerLostError, match="prometheus.role.collapipe.internal"),
    ):
        secured(address, scheduler).window(0.0, 1.0)


def test_server_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    server = Authority(tmp_path).security("prometheus:metrics").server_context()
    scheduler = authority.security("scheduler:scheduler")
    with (
        answering(success(), server) as address,
        pytest.raises(PeerLostError, match="certificate verify failed"),
    ):
        secured(address, scheduler).window(0.0, 1.0)


@pytest.mark.parametrize("url", ["", "prometheus:9090", "ftp://a:1", "http://", "http://a:b"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="no URL of a Prometheus server"):
        PrometheusSource(url)
