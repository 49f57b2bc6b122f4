"""The health check of deployments, against real servers."""

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


def run_health_check(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str | int | None:
    """Runs `python -m collapipe.health_check` in this process. Returns its exit code or message."""
    monkeypatch.setattr(sys, "argv", ["health_check"])
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
    # SCHEDULER is a setting of stage hosts. The health check ignores it.
    settings = {"LISTEN": f"0.0.0.0:{port}", "INSECURE": "true", "SCHEDULER": "elsewhere:7100"}
    assert run_health_check(monkeypatch, **settings) == 0
    server.drain(0.0)
    assert "health check: " in str(run_health_check(monkeypatch, **settings))


def test_service_that_is_alive_but_drains_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[grpc.Server] = []
    serving = serve("127.0.0.1:0", Security.insecure(), lambda server, address: held.append(server))
    serving._health.enter_graceful_shutdown()
    said = run_health_check(monkeypatch, LISTEN=serving.address, INSECURE="true")
    serving.drain(0.0)
    assert "NOT_SERVING" in str(said)


def test_port_that_is_not_fixed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--listen" in str(run_health_check(monkeypatch, LISTEN="127.0.0.1:0", INSECURE="true"))


def test_missing_certificates_are_refused_and_both_remedies_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = run_health_check(monkeypatch, LISTEN="127.0.0.1:7100")
    assert "--tls-ca" in str(said) and "--insecure" in str(said)
