"""`collapipe certs` and `collapipe join`, as operators use them."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from collapipe.authority.app import AuthoritySettings
from collapipe.certificates import pki
from collapipe.certificates.tokens import encode_token
from collapipe.device_agent.app import DeviceAgentSettings
from collapipe.errors import InvalidInputError
from collapipe.rpc import Security
from collapipe.service_process import ServiceSettings

from .conftest import SCHEDULER, Served, changed, collapipe


def joined(*arguments: Any) -> dict[str, Any]:
    result = collapipe("join", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def refused(*arguments: Any) -> str:
    result = collapipe(*arguments)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return result.stderr


# --- certs


def test_issue_can_be_repeated(
    tmp_path: Path,
) -> None:
    line = ["certs", "issue", tmp_path, "--init", "scheduler:scheduler", "device-agent:d", "--json"]
    for outcome in ("issued", "kept"):
        result = collapipe(*line)
        assert result.exit_code == 0, result.output
        entries = json.loads(result.stdout)["certificates"]
        assert [(e["name"], e["outcome"]) for e in entries] == [
            ("scheduler", outcome),
            ("d", outcome),
        ]
    for name in ("scheduler", "d"):
        folder = tmp_path / "issued" / name
        assert sorted(os.listdir(folder)) == ["ca.pem", "cert.pem", "key.pem"]
        Security.of(False, folder / "ca.pem", folder / "cert.pem", folder / "key.pem")


def test_issue_writes_to_the_folder_of_its_option(tmp_path: Path) -> None:
    out = tmp_path / "out"
    collapipe("certs", "issue", tmp_path / "a", "--init", "client:me", "--out", out, "--days", 7)
    listed = json.loads(collapipe("certs", "list", tmp_path / "a", "--json").stdout)
    (entry,) = listed["certificates"]
    assert (entry["role"], entry["name"]) == ("client", "me")
    certificate = pki.read_certificate((out / "me" / "cert.pem").read_bytes())
    assert certificate.not_valid_after_utc.isoformat() == entry["expires"]


@pytest.mark.parametrize("holder", ["device-agent:../x", "device-agent:/etc/x", "king:x", "x"])
def test_issue_with_an_invalid_holder_makes_nothing(tmp_path: Path, holder: str) -> None:
    assert "error: " in refused("certs", "issue", tmp_path / "a", "--init", "client:me", holder)
    assert not (tmp_path / "a").exists()


def test_root_is_moved_away_and_makes_the_next_issuing_authority(tmp_path: Path) -> None:
    folder, medium = tmp_path / "a", tmp_path / "medium"
    said = collapipe("certs", "init", folder, "--root", medium).output
    assert f"now move {medium}" in " ".join(said.split())
    away = medium.rename(tmp_path / "offline")
    before = (folder / "ca.pem").read_bytes()
    assert collapipe("certs", "issue", folder, "client:me").exit_code == 0
    assert "with --root" in refused("certs", "issuing", folder)
    made = collapipe("certs", "issuing", folder, "--root", away, "--revoke", "--json")
    assert json.loads(made.stdout)["file"] == str(folder / "revoked.pb")
    assert (folder / "ca.pem").read_bytes() == before
    issued = collapipe("certs", "issue", folder, "client:me", "--json")
    assert json.loads(issued.stdout)["certificates"][0]["outcome"] == "issued"


def test_init_refuses_a_second_authority(tmp_path: Path) -> None:
    assert collapipe("certs", "init", tmp_path).exit_code == 0
    assert "holds an authority" in refused("certs", "init", tmp_path)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--valid", "soon"),
        ("--valid", "0h"),
        ("--scheduler", "here"),
        ("--authority", "host:0"),
        ("--address", "a b"),
    ],
)
def test_token_refuses_invalid_options(served: Served, option: str, value: str) -> None:
    options = {"--scheduler": SCHEDULER, "--authority": served.address} | {option: value}
    flat = [word for pair in options.items() for word in pair]
    said = refused("certs", "token", served.folder, "device-agent:pi", *flat)
    assert value in said


@pytest.mark.parametrize("address", ["a b:71", "h:\u0667\u0661", "http://h:71", ":71", "h:65536"])
def test_token_refuses_an_invalid_address(served: Served, address: str) -> None:
    options = ("--scheduler", address, "--authority", served.address)
    said = refused("certs", "token", served.folder, "device-agent:pi", *options)
    assert f"--scheduler {address}: is not HOST:PORT" in said


def test_name_is_printed_without_markup(tmp_path: Path) -> None:
    result = collapipe("certs", "issue", tmp_path, "--init", "device-agent:lock")
    assert "device-agent:lock: issued" in result.stdout


def test_stdout_is_the_token_alone(served: Served) -> None:
    result = collapipe(
        *("certs", "token", served.folder, "device-agent:pi"),
        *("--scheduler", SCHEDULER, "--authority", served.address),
    )
    assert len(result.stdout.split()) == 1 and result.stdout.startswith("collapipe-join-")


# --- join


def test_box_gets_certificate_key_and_the_settings_of_its_service(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = tmp_path / "box"
    said = joined(served.token("device-agent:pi@2"), "--folder", box)
    assert said["joined_now"] and said["name"] == "pi"
    assert said["next"][1:] == [
        *("-m", "collapipe.device_agent", "--config", str(box / "device-agent.toml"))
    ]
    assert (box / "tls" / "key.pem").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("sys.argv", said["next"][2:])
    settings = DeviceAgentSettings()  # type: ignore[call-arg]
    assert (settings.host_id, settings.cluster_index, settings.scheduler) == ("pi", 2, SCHEDULER)
    assert (settings.listen, settings.metrics_listen) == ("0.0.0.0:7100", "0.0.0.0:9100")
    assert settings.advertise == "127.0.0.1:7100"
    assert settings.threads == psutil.cpu_count(logical=False)
    presented = settings.security.presented()
    assert presented is not None and str(presented.identity) == "device-agent:pi@2"


def test_box_moves_to_another_cluster_with_a_new_token(served: Served, tmp_path: Path) -> None:
    box = tmp_path / "box"
    joined(served.token("device-agent:pi"), "--folder", box)
    said = joined(served.token("device-agent:pi@1"), "--folder", box)
    assert said["joined_now"]
    assert "cluster_index = 1" in (box / "device-agent.toml").read_text()


def test_box_whose_key_was_revoked_joins_again_with_a_new_key(
    served: Served, tmp_path: Path
) -> None:
    box = tmp_path / "box"
    joined(served.token("device-agent:pi"), "--folder", box)
    key = (box / "tls" / "key.pem").read_bytes()
    collapipe("certs", "revoke", served.folder, "device-agent:pi")
    token = served.token("device-agent:pi")
    assert not joined(token, "--folder", box)["joined_now"]
    assert joined(token, "--again", "--folder", box)["joined_now"]
    assert (box / "tls" / "key.pem").read_bytes() != key


def test_list_shows_the_cluster_of_a_host_that_has_one(tmp_path: Path) -> None:
    collapipe("certs", "issue", tmp_path, "--init", "scheduler:hub", "device-agent:pi@3")
    listed = json.loads(collapipe("certs", "list", tmp_path, "--json").stdout)["certificates"]
    assert {one["name"]: one.get("cluster") for one in listed} == {"hub": None, "pi": 3}
    assert "pi@3 " in collapipe("certs", "list", tmp_path).stdout


def test_key_never_leaves_the_box(served: Served, tmp_path: Path) -> None:
    joined(served.token(), "--folder", tmp_path / "box")
    key = (tmp_path / "box" / "tls" / "key.pem").read_bytes()
    kept = [path.read_bytes() for path in served.folder.rglob("*") if path.is_file()]
    assert all(key not in data for data in kept)


@pytest.mark.parametrize(
    ("holder", "keys"),
    [
        ("scheduler:s", {"state_dir"}),
        ("edge-server:e", {"state_dir", "scheduler", "threads"}),
        ("control-unit:c", {"state_dir", "scheduler", "cluster_index", "threads"}),
        ("device-agent:d", {"state_dir", "scheduler", "cluster_index", "threads"}),
    ],
)
def test_settings_file_has_the_settings_of_its_role(
    served: Served, tmp_path: Path, holder: str, keys: set[str]
) -> None:
    joined(served.token(holder), "--folder", tmp_path, "--state-dir", "/srv/state")
    file = tmp_path / f"{holder.partition(':')[0]}.toml"
    written = {line.partition(" = ")[0] for line in file.read_text().splitlines()}
    every = {"host_id", "listen", "metrics_listen", "advertise", "tls_ca", "tls_cert", "tls_key"}
    assert written == every | keys
    assert written - keys <= set(ServiceSettings.model_fields)


def test_client_gets_a_certificate_and_a_command_that_uses_it(
    served: Served, tmp_path: Path
) -> None:
    said = joined(served.token("client:laptop"), "--folder", tmp_path)
    assert said["next"][:4] == ["collapipe", "status", "--scheduler", SCHEDULER]
    assert sorted(os.listdir(tmp_path)) == ["authority", "joined.json", "tls"]


def test_join_can_be_repeated_where_it_succeeded(served: Served, tmp_path: Path) -> None:
    token, box = served.token(), tmp_path / "box"
    joined(token, "--folder", box)
    before = {path: path.read_bytes() for path in box.rglob("*") if path.is_file()}
    assert joined(token, "--folder", box)["joined_now"] is False
    assert {path: path.read_bytes() for path in box.rglob("*") if path.is_file()} == before


def test_join_under_another_name_is_refused_where_one_has_joined(
    served: Served, tmp_path: Path
) -> None:
    joined(served.token(), "--folder", tmp_path / "box")
    other = served.token("device-agent:pi-2")
    said = refused("join", other, "--folder", tmp_path / "box")
    assert "this machine is device-agent:pi" in said
    joined(other, "--folder", tmp_path / "box-2")


def test_join_of_another_deployment_is_refused_where_one_has_joined(
    served: Served, tmp_path: Path
) -> None:
    box, other = tmp_path / "box", tmp_path / "other"
    joined(served.token(), "--folder", box)
    before = {path: path.read_bytes() for path in box.rglob("*") if path.is_file()}
    collapipe("certs", "init", other)
    certificate = pki.read_certificate((other / "ca.pem").read_bytes())
    token = encode_token(changed(served.token(), authority_certificate=pki.der(certificate)))
    assert "device-agent:pi of another deployment" in refused("join", token, "--folder", box)
    assert {path: path.read_bytes() for path in box.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("lost", ["tls/ca.pem", "tls/cert.pem", "tls/key.pem", "joined.json"])
@pytest.mark.parametrize("left", [None, ""])
def test_new_token_repairs_a_box_that_lost_a_file(
    served: Served, tmp_path: Path, lost: str, left: str | None
) -> None:
    joined(served.token(), "--folder", tmp_path)
    (tmp_path / lost).unlink()
    if left is not None and lost != "joined.json":
        (tmp_path / lost).write_text(left)
    refused("renew", "--folder", tmp_path, "--now")
    assert joined(served.token(), "--folder", tmp_path)["joined_now"]
    assert collapipe("renew", "--folder", tmp_path, "--now").exit_code == 0


def test_new_token_changes_the_advertised_host(served: Served, tmp_path: Path) -> None:
    first = served.token()
    joined(first, "--folder", tmp_path)
    to_host = ("--folder", tmp_path, "--advertise", "pi.lan:7100")
    assert "was used before" in refused("join", first, *to_host)
    second = served.token("device-agent:pi", "--address", "pi.lan")
    assert joined(second, *to_host)["joined_now"]
    assert 'advertise = "pi.lan:7100"' in (tmp_path / "device-agent.toml").read_text()
    assert joined(second, *to_host)["joined_now"] is False


def test_settings_of_a_folder_with_any_name_can_be_read(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = tmp_path / 'a box" \u00fc \U0001f600'
    said = joined(served.token(), "--folder", box)
    monkeypatch.setattr("sys.argv", said["next"][2:])
    settings = DeviceAgentSettings()  # type: ignore[call-arg]
    assert settings.tls_key == box / "tls" / "key.pem"


def test_prometheus_joins_without_a_service_and_renews(served: Served, tmp_path: Path) -> None:
    said = joined(served.token("prometheus:watch"), "--folder", tmp_path)
    assert not list(tmp_path.glob("*.toml"))
    assert said["next"] == ["collapipe", "renew", "--folder", str(tmp_path)]
    assert collapipe(*said["next"][1:], "--now").exit_code == 0


def test_token_that_was_used_elsewhere_leaves_an_empty_folder(
    served: Served, tmp_path: Path
) -> None:
    token = served.token()
    joined(token, "--folder", tmp_path / "box")
    said = refused("join", token, "--folder", tmp_path / "other")
    assert "was used before: make a new one with `collapipe certs token`" in said
    assert not list((tmp_path / "other").iterdir())


def test_expired_token_is_refused_with_the_remedy(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = served.token()
    for path in (served.folder / "tokens").iterdir():
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"expires": "2020-01-01T00:00:00+00:00"}))
    said = refused("join", token, "--folder", tmp_path / "box")
    assert "expired at 2020-01-01 00:00 UTC: make a new one" in said


def test_token_with_another_authority_certificate_is_not_sent(
    served: Served, tmp_path: Path
) -> None:
    collapipe("certs", "init", tmp_path / "other")
    other = pki.read_certificate((tmp_path / "other" / "ca.pem").read_bytes())
    token = encode_token(changed(served.token(), authority_certificate=pki.der(other)))
    said = refused("join", token, "--folder", tmp_path / "box")
    assert "its certificate is of another authority" in said
    assert not served.holders()


def test_token_with_a_changed_role_is_refused(served: Served, tmp_path: Path) -> None:
    token = encode_token(changed(served.token(), identity="spiffe://collapipe/scheduler/pi"))
    said = refused("join", token, "--folder", tmp_path / "box")
    assert "but may only be spiffe://collapipe/device-agent/pi" in said
    assert not served.holders()


def test_advertised_host_must_be_granted(served: Served, tmp_path: Path) -> None:
    token = served.token("device-agent:pi", "--address", "pi.lan")
    said = refused("join", token, "--folder", tmp_path, "--advertise", "scheduler:7100")
    assert "asks for the host 'scheduler'" in said and "--address HOST" in said
    joined(token, "--folder", tmp_path, "--advertise", "pi.lan:7300")
    assert 'advertise = "pi.lan:7300"' in (tmp_path / "device-agent.toml").read_text()


def test_token_stays_usable_if_the_authority_does_not_run(served: Served, tmp_path: Path) -> None:
    token = served.token()
    away = encode_token(changed(token, authority_address="127.0.0.1:9"))
    said = refused("join", away, "--folder", tmp_path / "box")
    assert "the authority at 127.0.0.1:9 cannot be reached" in said
    joined(token, "--folder", tmp_path / "box")


def test_token_stays_usable_if_the_folder_cannot_be_written(served: Served, tmp_path: Path) -> None:
    token = served.token()
    (tmp_path / "file").write_text("")
    said = refused("join", token, "--folder", tmp_path / "file" / "box")
    assert "cannot be used" in said
    joined(token, "--folder", tmp_path / "box")


def test_join_replaces_an_expired_certificate(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = served.token("device-agent:pi", "--days", "1")
    joined(first, "--folder", tmp_path)
    before = (tmp_path / "tls" / "key.pem").read_bytes()
    tomorrow = pki.utc_now() + datetime.timedelta(days=1)
    monkeypatch.setattr("collapipe.certificates.pki.utc_now", lambda: tomorrow)
    assert joined(served.token(), "--folder", tmp_path)["joined_now"]
    assert (tmp_path / "tls" / "key.pem").read_bytes() != before
    assert (tmp_path / "device-agent.toml.before").exists()
    assert not list(tmp_path.glob(".tls-*"))


def test_client_runs_no_service(served: Served, tmp_path: Path) -> None:
    token = served.token("client:me")
    assert "runs no service" in refused("join", token, "--folder", tmp_path / "me", "--run")
    assert not (tmp_path / "me").exists()


def test_renew_replaces_the_certificate_and_keeps_the_key(served: Served, tmp_path: Path) -> None:
    joined(served.token(), "--folder", tmp_path)
    files = {name: (tmp_path / "tls" / name).read_bytes() for name in ("cert.pem", "key.pem")}
    collapipe("renew", "--folder", tmp_path)
    assert (tmp_path / "tls" / "cert.pem").read_bytes() == files["cert.pem"]
    result = collapipe("renew", "--folder", tmp_path, "--now", "--json")
    assert json.loads(result.stdout)["renewed"] is True
    assert (tmp_path / "tls" / "cert.pem").read_bytes() != files["cert.pem"]
    assert (tmp_path / "tls" / "key.pem").read_bytes() == files["key.pem"]
    tls = tmp_path / "tls"
    Security.of(False, tls / "ca.pem", tls / "cert.pem", tls / "key.pem")


def test_renew_before_joining_names_the_remedy(tmp_path: Path) -> None:
    assert "join with a token" in refused("renew", "--folder", tmp_path)


def test_authority_refuses_tls_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["authority", "--dir", str(tmp_path), "--insecure"])
    with pytest.raises(InvalidInputError, match="always speaks TLS"):
        _ = AuthoritySettings().security  # type: ignore[call-arg]
