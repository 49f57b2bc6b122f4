"""The health check of deployments, against real servers."""

import sys

import pytest

from collapipe import health_check
from collapipe.rpc import Security, serve


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


def test_service_is_healthy_until_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve("127.0.0.1:0", Security.insecure(), lambda server, address: None)
    port = server.address.rpartition(":")[2]
    # SCHEDULER is a setting of stage hosts. The health check ignores it.
    settings = {"LISTEN": f"0.0.0.0:{port}", "INSECURE": "true", "SCHEDULER": "elsewhere:7100"}
    assert run_health_check(monkeypatch, **settings) == 0
    server._health.enter_graceful_shutdown()
    assert "NOT_SERVING" in str(run_health_check(monkeypatch, **settings))
    server.drain(0.0)
    assert "health check: " in str(run_health_check(monkeypatch, **settings))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"LISTEN": "127.0.0.1:0", "INSECURE": "true"}, ["--listen"]),
        ({"LISTEN": "127.0.0.1:7100"}, ["--tls-ca", "--insecure"]),
    ],
    ids=["port that is not fixed", "missing certificates"],
)
def test_settings_that_reach_no_service_are_refused_with_the_remedies(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: list[str]
) -> None:
    message = str(run_health_check(monkeypatch, **environment))
    assert all(option in message for option in said)
