import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe.errors import InvalidInputError
from collapipe_client.cli import app
from collapipe_client.doctor import read_box_settings

from .conftest import FakeServices


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "LISTEN",
        "METRICS_LISTEN",
        "SCHEDULER",
        "INSECURE",
        "TLS_CA",
        "TLS_CERT",
        "TLS_KEY",
    ):
        monkeypatch.delenv(f"COLLAPIPE_{name}", raising=False)


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def _doctor(*arguments: object) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *map(str, arguments)])
    document = json.loads(result.stdout)
    return result.exit_code, {check["name"]: check for check in document["checks"]}


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
        with pytest.raises(InvalidInputError, match="collapipe join"):
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
        code, checks = _doctor("--config", config)
    assert code == 1
    assert checks["port: gRPC"]["result"] == "fail"  # This test holds the port.
    assert "port: metrics" not in checks
    assert checks["scheduler"]["result"] == "ok"
    assert (
        checks["peer: edge-server"]["result"] == "fail"
    )  # The fake scheduler has no health service.
    assert "packages: device-agent" in checks and "packages: scheduler" not in checks


def test_scheduler_that_does_not_answer_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    code, checks = _doctor("--role", "scheduler", "--scheduler", address, "--insecure")
    assert (code, checks["scheduler"]["result"]) == (1, "fail")
    assert address in checks["scheduler"]["found"]


def test_missing_certificate_files_fail_for_certificate_and_scheduler(tmp_path: Path) -> None:
    files = {
        option: tmp_path / name
        for option, name in (("--tls-ca", "ca"), ("--tls-cert", "c"), ("--tls-key", "k"))
    }
    options = [part for option, path in files.items() for part in (option, path)]
    code, checks = _doctor("--role", "scheduler", "--scheduler", "127.0.0.1:1", *options)
    assert code == 1
    assert checks["certificate"]["result"] == checks["scheduler"]["result"] == "fail"
    assert str(files["--tls-ca"]) in checks["certificate"]["found"]


@pytest.mark.parametrize(
    "arguments",
    [["--role", "device"], ["--config", "settings.toml"], ["--config", "scheduler.toml"]],
)
def test_unknown_role_or_missing_file_is_bad_input(arguments: list[str], tmp_path: Path) -> None:
    _write(tmp_path, "settings.toml", "")
    named = [str(tmp_path / part) if part.endswith(".toml") else part for part in arguments]
    result = CliRunner().invoke(app, ["doctor", *named])
    assert result.exit_code == 2
    assert named[1] in result.output


def test_brackets_in_messages_are_not_markup(tmp_path: Path) -> None:
    files = [part for name in ("ca", "cert", "key") for part in (f"--tls-{name}", "[/red]:lock:")]
    arguments = ["doctor", "--role", "scheduler", "--scheduler", "127.0.0.1:1", *files]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "[/red]:lock:" in result.stdout.partition("what to do:")[0]


def test_remedies_are_printed_without_line_breaks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    result = CliRunner().invoke(
        app, ["doctor", "--role", "scheduler", "--scheduler", address, "--insecure"]
    )
    assert result.exit_code == 1
    below = result.stdout.partition("what to do:")[2].splitlines()
    assert "  scheduler (fail): start it, or correct --scheduler" in below
