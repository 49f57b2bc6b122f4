"""The health check of deployments, against servers that serve."""

import sys
from collections.abc import Iterator

import grpc
import pytest

from collapipe import health_check
from collapipe.rpc import Security, Server, serve


@pytest.fixture
def server() -> Iterator[Server]:
    serving = serve("127.0.0.1:0", Security.insecure(), lambda server, address: None)
    yield serving
    serving.drain(0.0)


def run_probe(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str | int | None:
    """Runs `python -m collapipe.health_check` in this process; returns what it exits with."""
    monkeypatch.setattr(sys, "argv", ["probe"])
    for name, value in environment.items():
        monkeypatch.setenv(f"COLLAPIPE_{name}", value)
    try:
        health_check.main()
    except SystemExit as ended:
        return ended.code
    return 0


def test_serving_service_is_healthy_and_drained_one_is_not(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.address.rpartition(":")[2]
    # settings that only the service has are no concern of the probe
    settings = {"LISTEN": f"0.0.0.0:{port}", "INSECURE": "true", "SCHEDULER": "elsewhere:7100"}
    assert run_probe(monkeypatch, **settings) == 0
    server.drain(0.0)
    assert "probe: " in str(run_probe(monkeypatch, **settings))


def test_service_that_is_alive_but_drains_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[grpc.Server] = []
    serving = serve("127.0.0.1:0", Security.insecure(), lambda server, address: held.append(server))
    serving._health.enter_graceful_shutdown()
    said = run_probe(monkeypatch, LISTEN=serving.address, INSECURE="true")
    serving.drain(0.0)
    assert "NOT_SERVING" in str(said)


def test_probe_of_a_port_that_it_cannot_know_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--listen" in str(run_probe(monkeypatch, LISTEN="127.0.0.1:0", INSECURE="true"))


def test_probe_without_certificates_asks_for_them_or_for_plain_text_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = run_probe(monkeypatch, LISTEN="127.0.0.1:7100")
    assert "--tls-ca" in str(said) and "--insecure" in str(said)
