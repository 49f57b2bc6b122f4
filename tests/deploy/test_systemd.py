"""The service files of boxes agree with the services. tests/integration/deploy asks systemd."""

import configparser
import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe.installation import places_of
from collapipe.service_process import MOST_OPEN_FILES
from collapipe_client.cli import app
from collapipe_client.doctor import BoxSettings

from .installing import SERVICES, of_system, unit_files


def _service(name: str = "device-agent", role: str = "device-agent") -> str:
    return unit_files(role, of_system(name))[f"collapipe-{name}.service"]


@pytest.mark.parametrize("is_root", [True, False], ids=["system", "user"])
@pytest.mark.parametrize("role", SERVICES)
def test_service_starts_the_module_of_its_role_with_the_settings_of_join(
    role: str, is_root: bool
) -> None:
    places = places_of(f"{role}-2", is_root=is_root, home=Path("/home/me & you"))
    text = unit_files(role, places)[f"collapipe-{role}-2.service"]
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, module, settings = re.split(r" -m | --config ", line)
    assert program.strip('"') == f"{places.programs}/bin/python"
    assert importlib.util.find_spec(f"{module}.__main__") is not None
    file = f"{places.folder}/{role}.toml"
    assert f"ConditionPathExists={file}\n" in text
    if is_root:
        assert settings == "%d/settings.toml" and f"LoadCredential=settings.toml:{file}\n" in text
        assert f"User=collapipe-{role}-2\nStateDirectory=collapipe/{role}-2\n" in text
    else:
        assert settings == f'"{file}"' and "User=" not in text
    assert "{" not in text


@pytest.mark.parametrize("is_root", [True, False], ids=["system", "user"])
def test_renewing_command_exists(is_root: bool) -> None:
    places = places_of("scheduler", is_root=is_root, home=Path("/home/me"))
    text = unit_files("scheduler", places)["collapipe-renew.service"]
    (words,) = re.findall(r'^ExecStart="?/\S+/bin/collapipe"? ([a-z ]+)$', text, re.MULTILINE)
    assert CliRunner().invoke(app, [*words.split(), "--help"]).exit_code == 0


def test_service_gets_every_file_that_it_reads() -> None:
    text = _service()
    handed = re.findall(r"^LoadCredential=(\S+?):(\S+)$", text, re.MULTILINE)
    folder = "/etc/collapipe/device-agent"
    assert dict(handed) == {
        "settings.toml": f"{folder}/device-agent.toml",
        **{f"{name}.pem": f"{folder}/tls/{name}.pem" for name in ("ca", "key")},
    }
    read = set(re.findall(r"%d/(\S+?)\s", text))
    assert read == {name for name, _ in handed}


def test_service_sees_a_renewed_certificate() -> None:
    """A credential of systemd stays as it was at the start, and so does a single file that is mounted."""
    (mounted,) = re.findall(
        r"^BindReadOnlyPaths=/etc/collapipe/device-agent/tls:(\S+)$", _service(), re.MULTILINE
    )
    assert f"COLLAPIPE_TLS_CERT={mounted}/cert.pem " in _service()


def test_environment_overrides_only_what_join_does_not_ask_for() -> None:
    names = {name.lower() for name in re.findall(r"COLLAPIPE_(\w+)=", _service())}
    assert names == {"tls_ca", "tls_cert", "tls_key", "log_format"} <= set(BoxSettings.model_fields)


def test_service_may_open_as_many_files_as_it_uses() -> None:
    assert f"\nLimitNOFILE={MOST_OPEN_FILES}\n" in _service()


@pytest.mark.parametrize("is_root", [True, False], ids=["system", "user"])
def test_service_has_more_time_to_stop_than_draining_needs(is_root: bool) -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    places = places_of("scheduler", is_root=is_root, home=Path("/home/me"))
    parser.read_string(unit_files("scheduler", places)["collapipe-scheduler.service"])
    # Draining takes 5 s, and closing the sensors 2 s.
    assert int(parser["Service"]["TimeoutStopSec"]) >= 20
    # `run_service` exits with 2 for bad input.
    assert parser["Service"]["RestartPreventExitStatus"] == "2"
