"""The systemd units of boxes are valid and start existing modules."""

import configparser
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_client.cli import app
from collapipe_client.doctor import BoxSettings

_UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
_ROLES = ("device-agent", "control-unit", "edge-server", "scheduler")
_MOST_EXPOSURE = 20
"""The limit of `systemd-analyze security`, which prints it as 2.0 of 10."""

_needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="no systemd-analyze on this machine: apt-get install systemd",
)


def _template() -> str:
    return (_UNITS / "collapipe@.service").read_text(encoding="utf-8")


@pytest.fixture
def unit(tmp_path: Path) -> Callable[[str], Path]:
    """Copies a unit file, the template under the name of an instance."""

    def copy(name: str) -> Path:
        source = "collapipe@.service" if name.startswith("collapipe@") else name
        text = (_UNITS / source).read_text(encoding="utf-8")
        path = tmp_path / name
        # `systemd-analyze verify` wants a command that exists on this machine.
        path.write_text(
            text.replace("=/opt/collapipe/bin/collapipe", "=/bin/true"), encoding="utf-8"
        )
        return path

    return copy


@_needs_systemd
@pytest.mark.parametrize(
    "name",
    [*(f"collapipe@{role}.service" for role in _ROLES), "collapipe-renew.service"],
)
def test_systemd_accepts_the_unit(unit: Callable[[str], Path], name: str) -> None:
    path = unit(name)
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    # The output also contains messages about units of this machine.
    assert [line for line in verified.stderr.splitlines() if "collapipe" in line] == []
    assert verified.returncode == 0, verified.stderr


@_needs_systemd
def test_systemd_accepts_the_timer(unit: Callable[[str], Path]) -> None:
    unit("collapipe-renew.service")
    path = unit("collapipe-renew.timer")
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert "collapipe" not in verified.stderr
    assert verified.returncode == 0, verified.stderr


@_needs_systemd
@pytest.mark.parametrize("name", ["collapipe@device-agent.service", "collapipe-renew.service"])
def test_unit_is_confined(unit: Callable[[str], Path], name: str) -> None:
    rating = [
        "systemd-analyze",
        "security",
        "--no-pager",
        "--offline=true",
        f"--threshold={_MOST_EXPOSURE if '@' in name else 2 * _MOST_EXPOSURE}",
        str(unit(name)),
    ]
    rated = subprocess.run(rating, capture_output=True, text=True, check=False)
    assert "Overall exposure level" in rated.stdout, rated.stderr
    assert rated.returncode == 0, rated.stdout.splitlines()[-1]


@pytest.mark.parametrize("role", _ROLES)
def test_instance_starts_the_module_of_its_role(role: str) -> None:
    (line,) = re.findall(r"^ExecStart=/bin/sh -c '(.*)'$", _template(), re.MULTILINE)
    # systemd replaces these before it starts the shell.
    line = line.replace("%i", role).replace("%d", "/run/credentials").replace("$$", "$")
    shown = subprocess.run(
        ["/bin/sh", "-c", line.replace("exec /opt", "echo /opt")],
        capture_output=True,
        text=True,
        check=True,
    )
    words = shown.stdout.split()
    assert words[:2] == ["/opt/collapipe/bin/python", "-m"]
    assert importlib.util.find_spec(f"{words[2]}.__main__") is not None
    assert words[3:] == ["--config", "/run/credentials/settings.toml"]


def test_renewing_command_exists() -> None:
    text = (_UNITS / "collapipe-renew.service").read_text(encoding="utf-8")
    (words,) = re.findall(r"^ExecStart=/opt/collapipe/bin/collapipe ([a-z ]+)$", text, re.MULTILINE)
    assert CliRunner().invoke(app, [*words.split(), "--help"]).exit_code == 0


def test_service_gets_every_file_that_it_reads() -> None:
    handed = re.findall(r"^LoadCredential=(\S+?):(\S+)$", _template(), re.MULTILINE)
    assert dict(handed) == {
        "settings.toml": "/etc/collapipe/%i.toml",
        **{f"{name}.pem": f"/etc/collapipe/tls/{name}.pem" for name in ("ca", "key")},
    }
    read = set(re.findall(r"%d/(\S+?)[\s']", _template()))
    assert read == {name for name, _ in handed}


def test_service_sees_a_renewed_certificate() -> None:
    """A credential of systemd stays as it was at the start, and so does a single file that is mounted."""
    (mounted,) = re.findall(
        r"^BindReadOnlyPaths=/etc/collapipe/tls:(\S+)$", _template(), re.MULTILINE
    )
    assert f"COLLAPIPE_TLS_CERT={mounted}/cert.pem " in _template()


def test_variables_of_the_environment_are_settings_of_services() -> None:
    names = re.findall(r"COLLAPIPE_(\w+)=", _template())
    assert len(names) == 5
    assert {name.lower() for name in names} <= set(BoxSettings.model_fields)


def test_service_has_more_time_to_stop_than_draining_needs() -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(_template())
    # Draining takes 5 s, and closing the sensors 2 s.
    assert int(parser["Service"]["TimeoutStopSec"]) >= 20
    # `run_service` exits with 2 for bad input.
    assert parser["Service"]["RestartPreventExitStatus"] == "2"
