import json
import os
import socket
from pathlib import Path

import pytest

from collapipe.errors import InvalidInputError
from collapipe_client.doctor import machine, peers, read_box_settings

from .commands import run
from .fake_services import FakeServices


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment_and_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_HEARTBEAT_SECONDS", 0.0)  # No host sends heartbeats.
    monkeypatch.setattr(machine, "ask_torch", lambda: machine.TorchFacts("2.8.0"))
    for name in [each for each in os.environ if each.startswith("COLLAPIPE_")]:
        monkeypatch.delenv(name)


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def _doctor(*arguments: object) -> dict[str, dict[str, str]]:
    """Returns the checks of an examination that finds a fault, by name."""
    document = json.loads(run("doctor", "--json", *arguments, code=1).stdout)
    return {check["name"]: check for check in document["checks"]}


@pytest.fixture
def closed() -> str:
    """Returns an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_settings_of_the_service_are_read_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _write(
        tmp_path,
        "device-agent.toml",
        'listen = "0.0.0.0:7200"\nadvertise = "pi-3:7200"\ncluster_index = 1\nbusy_watts = 7.7\n'
        'device = "cuda"\nshaper = "tc"\nscheduler = "s:7100"\n',
    )
    monkeypatch.setenv("COLLAPIPE_SCHEDULER", "other:7100")
    settings = read_box_settings(config)
    assert (settings.listen, settings.advertised_host) == ("0.0.0.0:7200", "pi-3")
    assert (settings.cluster_index, settings.device) == (1, "cuda")
    assert settings.scheduler == "other:7100"  # The environment comes first.
    assert settings.metrics_listen == "127.0.0.1:0"  # the default of the service


def test_settings_without_a_file_are_those_of_a_deployment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLLAPIPE_METRICS_LISTEN", "0.0.0.0:9200")
    settings = read_box_settings(None)
    assert (settings.listen, settings.metrics_listen) == ("0.0.0.0:7100", "0.0.0.0:9200")


@pytest.mark.parametrize(
    ("text", "said"), [("listen = ", "Invalid value"), ('cluster_index = "two"', "cluster_index")]
)
def test_error_explains_settings_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    config = _write(tmp_path, "device-agent.toml", text)
    with pytest.raises(InvalidInputError, match=said):
        read_box_settings(config)
    for absent in ("none.toml", "x" * 300):  # The second cannot even be looked up.
        with pytest.raises(InvalidInputError, match=absent):
            read_box_settings(tmp_path / absent)


def test_settings_file_determines_how_a_box_is_examined(fake: FakeServices, tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        config = _write(
            tmp_path,
            "device-agent.toml",
            f'listen = "0.0.0.0:{port}"\nmetrics_listen = ""\nscheduler = "{fake.address}"\n'
            "insecure = true\n",
        )
        checks = _doctor("--config", config)
    assert checks["port: gRPC"]["result"] == "fail"  # This test holds the port.
    assert "port: metrics" not in checks
    assert checks["scheduler"]["result"] == "ok"
    # The fake scheduler has no health service.
    assert checks["peer: edge-server"]["result"] == "fail"
    assert "packages: device-agent" in checks and "packages: scheduler" not in checks


def test_scheduler_that_does_not_answer_fails_with_a_remedy_in_one_line(closed: str) -> None:
    command = ("--role", "scheduler", "--scheduler", closed, "--insecure")
    checks = _doctor(*command)
    assert checks["scheduler"]["result"] == "fail"
    assert closed in checks["scheduler"]["found"]
    below = run("doctor", *command, code=1).stdout.partition("what to do:")[2].splitlines()
    assert any("scheduler (fail): " in line and "--scheduler" in line for line in below)


def test_missing_certificate_files_fail_and_brackets_in_messages_are_not_markup() -> None:
    file = "[/red]:lock:"
    files = [part for name in ("ca", "cert", "key") for part in (f"--tls-{name}", file)]
    arguments = ("--role", "scheduler", "--scheduler", "127.0.0.1:1", *files)
    checks = _doctor(*arguments)
    assert checks["certificate"]["result"] == checks["scheduler"]["result"] == "fail"
    assert file in checks["certificate"]["found"]
    text = run("doctor", *arguments, code=1).stdout.partition("what to do:")[0]
    assert file in text


@pytest.mark.parametrize(
    "arguments",
    [["--role", "device"], ["--config", "settings.toml"], ["--config", "scheduler.toml"]],
)
def test_unknown_role_or_missing_file_is_bad_input(arguments: list[str], tmp_path: Path) -> None:
    _write(tmp_path, "settings.toml", "")
    named = [str(tmp_path / part) if part.endswith(".toml") else part for part in arguments]
    assert named[1] in run("doctor", *named, code=2).output
