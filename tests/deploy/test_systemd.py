"""The systemd units of boxes agree with the services. tests/integration/deploy asks systemd."""

import configparser
import re
from pathlib import Path

from typer.testing import CliRunner

from collapipe.service_process import MOST_OPEN_FILES
from collapipe_client.cli import app
from collapipe_client.doctor import BoxSettings

_UNITS = Path(__file__).parents[2] / "deploy" / "systemd"


def _template() -> str:
    return (_UNITS / "collapipe@.service").read_text(encoding="utf-8")


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


def test_service_may_open_as_many_files_as_it_uses() -> None:
    assert f"\nLimitNOFILE={MOST_OPEN_FILES}\n" in _template()


def test_service_has_more_time_to_stop_than_draining_needs() -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(_template())
    # Draining takes 5 s, and closing the sensors 2 s.
    assert int(parser["Service"]["TimeoutStopSec"]) >= 20
    # `run_service` exits with 2 for bad input.
    assert parser["Service"]["RestartPreventExitStatus"] == "2"
