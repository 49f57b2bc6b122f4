"""`collapipe certs` and `collapipe join`, as operators use them."""

import datetime
import json
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from collapipe.authority.app import AuthoritySettings
from collapipe.certificates import pki
from collapipe.certificates.tokens import decode_token, encode_token
from collapipe.device_agent.app import DeviceAgentSettings
from collapipe.errors import InvalidInputError
from collapipe.installation import places_of
from collapipe.rpc import Security
from collapipe.service_process import ServiceSettings
from collapipe_client import join_command
from collapipe_client.contexts import contexts_file, read_contexts
from collapipe_client.job_files import read_toml

from .conftest import SCHEDULER, Served, changed, collapipe


def joined(*arguments: Any) -> dict[str, Any]:
    result = collapipe("join", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def listed(*arguments: Any) -> list[dict[str, Any]]:
    """Returns the certificates of which a command of `certs` tells."""
    result = collapipe("certs", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return list(json.loads(result.stdout)["certificates"])


def files_in(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(*arguments: Any) -> str:
    result = collapipe(*arguments)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return result.stderr


# --- certs


def test_issue_can_be_repeated(tmp_path: Path) -> None:
    holders = ["scheduler:scheduler", "device-agent:lock"]
    for outcome in ("issued", "kept"):
        made = listed("issue", tmp_path, "--init", *holders)
        assert [(e["name"], e["outcome"]) for e in made] == [
            ("scheduler", outcome),
            ("lock", outcome),
        ]
    for name in ("scheduler", "lock"):
        folder = tmp_path / "issued" / name
        assert sorted(os.listdir(folder)) == ["ca.pem", "cert.pem", "key.pem"]
        Security.of(False, folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    # The name is printed without markup.
    assert "device-agent:lock: kept" in collapipe("certs", "issue", tmp_path, *holders).stdout


def test_issue_writes_to_the_folder_of_its_option_and_list_shows_it(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "a"
    holders = ["client:me", "device-agent:pi@3"]
    collapipe("certs", "issue", folder, "--init", *holders, "--out", out, "--days", 7)
    entries = {entry["name"]: entry for entry in listed("list", folder)}
    assert {name: entry["role"] for name, entry in entries.items()} == {
        "me": "client",
        "pi": "device-agent",
    }
    assert [entries[name].get("cluster") for name in ("me", "pi")] == [None, 3]
    assert "pi@3 " in collapipe("certs", "list", folder).stdout
    certificate = pki.read_certificate((out / "me" / "cert.pem").read_bytes())
    assert certificate.not_valid_after_utc.isoformat() == entries["me"]["expires"]


@pytest.mark.parametrize("holder", ["device-agent:../x", "device-agent:/etc/x", "king:x", "x"])
def test_issue_with_an_invalid_holder_makes_nothing(tmp_path: Path, holder: str) -> None:
    assert "error: " in refused("certs", "issue", tmp_path / "a", "--init", "client:me", holder)
    assert not (tmp_path / "a").exists()


def test_root_is_moved_away_and_makes_the_next_issuing_authority(tmp_path: Path) -> None:
    folder, medium = tmp_path / "a", tmp_path / "medium"
    said = collapipe("certs", "init", folder, "--root", medium).output
    assert f"move {medium}" in " ".join(said.split())
    away = medium.rename(tmp_path / "offline")
    before = (folder / "ca.pem").read_bytes()
    listed("issue", folder, "client:me")
    assert "--root" in refused("certs", "issuing", folder)
    made = collapipe("certs", "issuing", folder, "--root", away, "--revoke", "--json")
    assert json.loads(made.stdout)["file"] == str(folder / "revoked.pb")
    assert (folder / "ca.pem").read_bytes() == before
    assert listed("issue", folder, "client:me")[0]["outcome"] == "issued"
    assert str(folder) in refused("certs", "init", folder)  # It refuses a second authority.


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--valid", "soon"),
        ("--valid", "0h"),
        ("--authority", "host:0"),
        ("--address", "a b"),
        *(
            ("--scheduler", address)
            for address in ("here", "a b:71", "h:\u0667\u0661", "http://h:71", ":71", "h:65536")
        ),
    ],
)
def test_token_refuses_invalid_options(made: Path, option: str, value: str) -> None:
    options = {"--scheduler": SCHEDULER, "--authority": "10.0.0.1:7200"} | {option: value}
    flat = [word for pair in options.items() for word in pair]
    assert value in refused("certs", "token", made, "device-agent:pi", *flat)


def test_stdout_is_the_token_alone(made: Path) -> None:
    addresses = ("--scheduler", SCHEDULER, "--authority", "10.0.0.1:7200")
    result = collapipe("certs", "token", made, "device-agent:pi", *addresses)
    assert len(result.stdout.split()) == 1 and result.stdout.startswith("collapipe-join-")
    result = collapipe("certs", "token", made, "device-agent:pi", "scheduler:s", *addresses)
    identities = [str(decode_token(text)[1]) for text in result.stdout.split()]
    assert identities == ["device-agent:pi", "scheduler:s"]


def test_address_of_one_host_is_not_granted_to_several(made: Path) -> None:
    addresses = ("--scheduler", SCHEDULER, "--authority", "10.0.0.1:7200", "--address", "10.0.0.7")
    said = refused("certs", "token", made, "device-agent:pi", "device-agent:pi-2", *addresses)
    assert "10.0.0.7" in said and "alone" in said


def test_warns_of_a_name_that_means_this_machine_only(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(host: str, port: object) -> list[Any]:
        ips = {"pi": ["127.0.1.1", "::1"], "pi.lan": ["127.0.1.1", "10.0.0.1"]}[host]
        return [(None, None, 0, "", (ip, 0)) for ip in ips]

    monkeypatch.setattr("socket.getaddrinfo", resolved)
    holder = ("certs", "token", made, "device-agent:lock", "--authority", "10.0.0.1:7200")
    for name, is_told in (("pi", True), ("pi.lan", False)):
        result = collapipe(*holder, "--scheduler", f"{name}:7100")
        assert result.exit_code == 0 and ("127.0.1.1" in result.stderr) == is_told
    assert "0.0.0.0" in refused(*holder, "--scheduler", "0.0.0.0:7100")


def test_two_tokens_for_one_name_are_refused(made: Path) -> None:
    addresses = ("--scheduler", SCHEDULER, "--authority", "10.0.0.1:7200")
    assert "hub" in refused("certs", "token", made, "scheduler:hub", "edge-server:hub", *addresses)


def test_scheduler_joins_at_the_address_that_all_tokens_name(
    served: Served, tmp_path: Path
) -> None:
    joined(served.token("scheduler:hub"), "--folder", tmp_path / "box")
    settings = read_toml(tmp_path / "box" / "scheduler.toml", "")
    assert (settings["advertise"], settings["listen"]) == (SCHEDULER, "0.0.0.0:7100")
    certificate = pki.read_certificate((tmp_path / "box" / "tls" / "cert.pem").read_bytes())
    assert "10.0.0.1" in pki.hosts_of(certificate)


def test_service_of_the_authority_is_made_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[list[str]]()
    environments = list[dict[str, str]]()

    def execve(path: str, line: list[str], environment: dict[str, str]) -> None:
        started.append(line)
        environments.append(environment)

    monkeypatch.setattr("os.execve", execve)
    monkeypatch.setenv("COLLAPIPE_TLS_CA", "/of/commands")
    monkeypatch.setenv("COLLAPIPE_AUTHORITY_PASSPHRASE", "")
    folder = tmp_path / "authority"
    assert str(folder) in refused("certs", "serve", folder)
    for _ in range(2):
        assert collapipe("certs", "serve", folder, "--init").exit_code == 0
        assert started.pop()[1:] == [
            *("-I", "-m", "collapipe.authority", "--dir", str(folder), "--listen", "0.0.0.0:7101")
        ]
        environment = environments.pop()
        assert "COLLAPIPE_AUTHORITY_PASSPHRASE" in environment
        assert "COLLAPIPE_TLS_CA" not in environment


def test_token_for_a_name_in_use_is_made_only_if_the_same_box_joins_again(tmp_path: Path) -> None:
    made = tmp_path / "authority"
    assert collapipe("certs", "issue", "--init", made, "device-agent:pi@1").exit_code == 0
    addresses = ("--scheduler", SCHEDULER, "--authority", "10.0.0.1:7200")
    for holder, options, answer, is_made in (
        ("device-agent:pi", (), "n", False),
        ("device-agent:pi", (), "y", True),
        ("device-agent:pi", ("--yes",), "", True),
        ("device-agent:pi-2", (), "", True),
    ):
        result = collapipe("certs", "token", made, holder, *addresses, *options, answer=answer)
        assert (result.exit_code == 0) == is_made
        assert ("collapipe-join-" in result.stdout) == is_made
        assert ("device-agent:pi@1" in result.stderr) == bool(answer)


# --- join


def test_box_gets_certificate_key_and_the_settings_of_its_service(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = tmp_path / "box"
    said = joined(served.token("device-agent:pi@2"), "--folder", box)
    assert said["joined_now"] and said["name"] == "pi"
    assert said["next"][1:] == [
        *("-I", "-m", "collapipe.device_agent", "--config", str(box / "device-agent.toml"))
    ]
    assert (box / "tls" / "key.pem").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("sys.argv", said["next"][3:])
    settings = DeviceAgentSettings()  # type: ignore[call-arg]
    assert (settings.host_id, settings.cluster_index, settings.scheduler) == ("pi", 2, SCHEDULER)
    assert (settings.listen, settings.metrics_listen) == ("0.0.0.0:7100", "0.0.0.0:9100")
    assert settings.advertise == "127.0.0.1:7100"
    assert settings.threads == psutil.cpu_count(logical=False)
    presented = settings.security.presented()
    assert presented is not None and str(presented.identity) == "device-agent:pi@2"


def test_box_whose_key_was_revoked_joins_again_with_a_new_key(
    served: Served, tmp_path: Path
) -> None:
    box = tmp_path / "box"
    joined(served.token(), "--folder", box)
    key = (box / "tls" / "key.pem").read_bytes()
    assert all(key not in data for data in files_in(served.folder).values())
    collapipe("certs", "revoke", served.folder, "device-agent:pi")
    token = served.token()
    assert not joined(token, "--folder", box)["joined_now"]
    assert joined(token, "--again", "--folder", box)["joined_now"]
    assert (box / "tls" / "key.pem").read_bytes() != key


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


def test_repeated_join_changes_what_was_asked_and_keeps_the_rest(
    served: Served, tmp_path: Path
) -> None:
    token, file = served.token(), tmp_path / "device-agent.toml"
    joined(token, "--folder", tmp_path)
    assert read_toml(file, "")["state_dir"] == str(tmp_path / "state")
    with open(file, "a", encoding="utf-8") as settings:
        settings.write('# why\ndevice = "cuda" # mine\nspeeds = [1.5, true]\n')
    before = read_toml(file, "")
    assert joined(token, "--folder", tmp_path)["changed"] == {}
    said = joined(token, "--folder", tmp_path, "--listen", "0.0.0.0:7300", "--state-dir", "/srv")
    host = before["advertise"].rpartition(":")[0]
    changed = {"listen": "0.0.0.0:7300", "state_dir": "/srv", "advertise": f"{host}:7300"}
    assert said["changed"] == changed and not said["joined_now"]
    assert read_toml(file, "") == before | changed
    with open(file, "a", encoding="utf-8") as settings:
        settings.write("[table]\nkey = 1\n")
    joined(token, "--folder", tmp_path, "--state-dir", "/srv/other", "--listen", "0.0.0.0:7400")
    assert '# why\ndevice = "cuda" # mine\nspeeds' in file.read_text()
    assert read_toml(file, "")["listen"] == "0.0.0.0:7400"
    assert read_toml(file, "")["table"] == {"key": 1}
    file.write_text("listen = '0.0.0.0:1'  # on\n[table]\nkey = 1\n")
    joined(token, "--folder", tmp_path, "--listen", "0.0.0.0:7400", "--state-dir", "/srv")
    assert file.read_text() == (
        'listen = "0.0.0.0:7400"  # on\nstate_dir = "/srv"\n[table]\nkey = 1\n'
    )
    file.write_text('"listen" = "0.0.0.0:7400"\n')
    assert "by hand" in refused("join", token, "--folder", tmp_path, "--listen", "0.0.0.0:7500")


def test_token_of_another_version_serves_no_new_box_but_one_that_has_joined(
    served: Served, tmp_path: Path
) -> None:
    token = served.token()
    older = decode_token(token)[0]
    older.ClearField("protocol")
    said = refused("join", encode_token(older), "--folder", tmp_path)
    assert "update CollaPipe on the machine of the maker" in said and "certs token" in said
    joined(token, "--folder", tmp_path)
    assert not joined(encode_token(older), "--folder", tmp_path)["joined_now"]


def test_join_with_a_new_token_keeps_the_settings_of_the_owner(
    served: Served, tmp_path: Path
) -> None:
    joined(served.token(), "--folder", tmp_path, "--state-dir", "/srv")
    file = tmp_path / "device-agent.toml"
    file.write_text(f'{file.read_text()}device = "cuda"\n')
    joined(served.token(), "--folder", tmp_path, "--again", "--listen", "0.0.0.0:7300")
    settings = read_toml(file, "")
    assert (settings["device"], settings["state_dir"]) == ("cuda", "/srv")
    assert settings["listen"] == "0.0.0.0:7300" and settings["advertise"].endswith(":7300")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a user who installs services without root."""
    places = partial(places_of, is_root=False, home=tmp_path / "home")
    monkeypatch.setattr(join_command, "own_places", places)
    monkeypatch.delenv("SUDO_USER", raising=False)
    return tmp_path / "home"


def test_services_of_one_machine_have_folders_states_and_ports_of_their_own(
    served: Served, home: Path
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:  # What another program has is not taken.
        first = other.getsockname()[1]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(join_command, "_PORT", first)
            for holder in ("scheduler:hub", "edge-server:edge", "control-unit:cluster-0"):
                joined(served.token(holder))
            second = home / ".collapipe-box" / "control-unit-1"
            joined(served.token("control-unit:cluster-1@1"), "--folder", second)
    files = sorted((home / ".collapipe-box").glob("*/*.toml"))
    assert [str(file.parent.name) for file in files] == [
        *("control-unit", "control-unit-1", "edge-server", "scheduler")
    ]
    settings = [read_toml(file, "") for file in files]
    for name in ("listen", "metrics_listen", "state_dir", "advertise", "host_id"):
        assert len({each[name] for each in settings}) == 4, name
    for file, each in zip(files, settings, strict=True):
        assert each["advertise"].rpartition(":")[2] == each["listen"].rpartition(":")[2]
        assert each["state_dir"] == str(file.parent / "state")
        assert not each["listen"].endswith(f":{first}")
    before = [file.read_text() for file in files]
    again = served.token("control-unit:cluster-1@1")
    joined(again, "--folder", second, "--again")
    assert [file.read_text() for file in files] == before
    renewed = collapipe("renew", "--now")
    assert renewed.stdout.count("renewed, until") == 4
    (second / "tls" / "key.pem").unlink()
    renewed = collapipe("renew", "--now")
    assert renewed.stdout.count("renewed, until") == 3 and renewed.exit_code == 1
    assert renewed.stderr.count("error: ") == 1 and f"error: {second}: " in renewed.stderr


def test_installed_service_is_started_by_systemd_and_not_by_hand(
    served: Served, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = served.token("scheduler:hub")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "session"))
    places = places_of("scheduler", is_root=False, home=home)
    places.units.mkdir(parents=True)
    (places.units / places.service).touch()
    service = "collapipe-scheduler.service"
    assert joined(token)["next"][-2] == "--config"  # No systemd runs.
    (home / "session" / "systemd").mkdir(parents=True)
    assert joined(token)["next"] == [
        *("systemctl", "--user", "enable", "--now", service, "collapipe-renew.timer")
    ]
    (places.units / "default.target.wants").mkdir()
    (places.units / "default.target.wants" / service).touch()
    assert joined(token)["next"] == ["systemctl", "--user", "restart", service]


def test_control_unit_is_told_where_its_data_is(served: Served, home: Path) -> None:
    token = served.token("control-unit:c")
    joined(token)
    folder = home / ".collapipe-box" / "control-unit"
    assert f"only in {folder}/state/data" in collapipe("join", token).stdout
    assert joined(token, "--data-root", "/srv/texts")["changed"] == {"data_root": "/srv/texts"}
    assert read_toml(folder / "control-unit.toml", "")["data_root"] == "/srv/texts"
    said = collapipe("join", token).stdout
    assert "only in /srv/texts" in said and "warning: /srv/texts is no folder" in said
    assert "--data-root" in refused("join", served.token("scheduler:s"), "--data-root", "/srv")


def test_renewal_of_a_machine_without_services_names_the_remedy(home: Path) -> None:
    assert "collapipe join TOKEN" in refused("renew")


def test_forwarded_port_stays_when_the_listen_port_changes(served: Served, tmp_path: Path) -> None:
    joined(served.token(), "--folder", tmp_path)
    file = tmp_path / "device-agent.toml"
    host = read_toml(file, "")["advertise"].rpartition(":")[0]
    token = served.token()
    joined(token, "--folder", tmp_path, "--advertise", f"{host}:17100")
    assert joined(token, "--folder", tmp_path, "--listen", "0.0.0.0:7300")["changed"] == {
        "listen": "0.0.0.0:7300"
    }
    assert read_toml(file, "")["advertise"].endswith(":17100")


def test_person_gets_a_certificate_and_a_context_that_all_commands_use(
    served: Served, tmp_path: Path
) -> None:
    box = tmp_path / "box"
    said = joined(served.token("client:laptop"), "--folder", box)
    assert said["next"] == ["collapipe", "status"]
    assert sorted(os.listdir(box)) == ["joined.json", "tls"]
    contexts = read_contexts()
    used = contexts.find(contexts.used)
    assert used.scheduler == SCHEDULER and used.tls_key == box / "tls" / "key.pem"
    other = decode_token(served.token("admin:boss"))[0]
    other.scheduler_address = "10.0.0.1:7900"
    joined(encode_token(other), "--folder", tmp_path / "other")
    assert sorted(read_contexts().by_name) == ["10.0.0.1", "10.0.0.1:7900"]
    (box / "tls" / "key.pem").unlink()
    said = refused("status", "--context", "10.0.0.1")
    assert "key.pem" in said and "collapipe context remove" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root reads what sudo writes")
def test_person_who_joins_with_sudo_is_told_to_leave_it_out(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = served.token("client:me")
    monkeypatch.setenv("SUDO_USER", "me")
    assert "leave sudo out" in refused("join", token, "--folder", tmp_path)
    monkeypatch.delenv("SUDO_USER")
    assert joined(token, "--folder", tmp_path)["joined_now"]


def test_person_with_damaged_contexts_uses_no_token(served: Served, tmp_path: Path) -> None:
    token = served.token("client:me")
    contexts_file().parent.mkdir(parents=True)
    contexts_file().write_text("{")
    assert str(contexts_file()) in refused("join", token, "--folder", tmp_path)
    contexts_file().unlink()
    assert joined(token, "--folder", tmp_path)["joined_now"]


def test_scheduler_joins_only_if_its_port_is_free(served: Served, tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        read = decode_token(served.token("scheduler:hub"))[0]
        read.scheduler_address = f"10.0.0.1:{other.getsockname()[1]}"
        token = encode_token(read)
        said = refused("join", token, "--folder", tmp_path)
        assert read.scheduler_address in said and "--scheduler" in said
    assert joined(token, "--folder", tmp_path)["joined_now"]
    moved = decode_token(served.token("scheduler:hub"))[0]
    moved.scheduler_address = "10.0.0.1:7555"
    token = encode_token(moved)
    assert "10.0.0.1:7555" in collapipe("join", token, "--folder", tmp_path).output
    joined(token, "--folder", tmp_path, "--again")
    settings = read_toml(tmp_path / "scheduler.toml", "")
    assert (settings["advertise"], settings["listen"]) == ("10.0.0.1:7555", "0.0.0.0:7555")


def test_box_that_has_joined_can_repeat_it_but_has_no_other_name_and_no_other_deployment(
    served: Served, tmp_path: Path
) -> None:
    token, box, other = served.token(), tmp_path / "box", tmp_path / "other"
    joined(token, "--folder", box)
    before = files_in(box)
    assert joined(token, "--folder", box)["joined_now"] is False
    another_name = served.token("device-agent:pi-2")
    assert "is device-agent:pi" in refused("join", another_name, "--folder", box)
    collapipe("certs", "init", other)
    certificate = pki.read_certificate((other / "ca.pem").read_bytes())
    foreign = encode_token(changed(served.token(), authority_certificate=pki.der(certificate)))
    assert "device-agent:pi of another" in refused("join", foreign, "--folder", box)
    assert files_in(box) == before
    # Another folder neither knows of the box nor has its key, so the token is not sent or was used.
    assert "another authority" in refused("join", foreign, "--folder", tmp_path / "box-2")
    assert served.holders() == ["device-agent:pi"]
    said = refused("join", token, "--folder", tmp_path / "box-2")
    assert "used before" in said and "collapipe certs token" in said
    assert not list((tmp_path / "box-2").iterdir())
    joined(another_name, "--folder", tmp_path / "box-2")


def test_new_token_repairs_a_box_that_lost_a_file(served: Served, tmp_path: Path) -> None:
    joined(served.token(), "--folder", tmp_path)
    for lost in ("tls/ca.pem", "tls/cert.pem", "tls/key.pem", "joined.json"):
        for left in (None, "") if lost != "joined.json" else (None,):
            (tmp_path / lost).unlink()
            if left is not None:
                (tmp_path / lost).write_text(left)
            refused("renew", "--folder", tmp_path, "--now")
            assert joined(served.token(), "--folder", tmp_path)["joined_now"]
            assert collapipe("renew", "--folder", tmp_path, "--now").exit_code == 0


def test_new_token_changes_the_cluster_and_the_advertised_host_that_it_grants(
    served: Served, tmp_path: Path
) -> None:
    first = served.token()
    joined(first, "--folder", tmp_path)
    to_host = ("--folder", tmp_path, "--advertise", "pi.lan:7100")
    assert "used before" in refused("join", first, *to_host)
    second = served.token("device-agent:pi@1", "--address", "pi.lan")
    said = refused("join", second, "--folder", tmp_path, "--advertise", "scheduler:7100")
    assert "'scheduler'" in said and "--address" in said
    assert joined(second, *to_host)["joined_now"]
    settings = (tmp_path / "device-agent.toml").read_text()
    assert 'advertise = "pi.lan:7100"' in settings and "cluster_index = 1" in settings
    assert joined(second, *to_host)["joined_now"] is False


def test_settings_of_a_folder_with_any_name_can_be_read(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = tmp_path / 'a box" \u00fc \U0001f600'
    said = joined(served.token(), "--folder", box)
    monkeypatch.setattr("sys.argv", said["next"][3:])
    settings = DeviceAgentSettings()  # type: ignore[call-arg]
    assert settings.tls_key == box / "tls" / "key.pem"


def test_prometheus_joins_without_a_service_and_renews(served: Served, tmp_path: Path) -> None:
    said = joined(served.token("prometheus:watch"), "--folder", tmp_path)
    assert not list(tmp_path.glob("*.toml"))
    assert said["next"] == ["collapipe", "renew", "--folder", str(tmp_path)]
    assert collapipe(*said["next"][1:], "--now").exit_code == 0


def test_token_stays_usable_if_the_authority_does_not_run_or_the_folder_cannot_be_written(
    served: Served, tmp_path: Path
) -> None:
    token = served.token()
    away = encode_token(changed(token, authority_address="127.0.0.1:9"))
    assert "127.0.0.1:9" in refused("join", away, "--folder", tmp_path / "box")
    (tmp_path / "file").write_text("")
    assert "file/box" in refused("join", token, "--folder", tmp_path / "file" / "box")
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
    assert not list(tmp_path.glob(".tls-*"))


def test_client_runs_no_service(served: Served, tmp_path: Path) -> None:
    token = served.token("client:me")
    assert "--run" in refused("join", token, "--folder", tmp_path / "me", "--run")
    assert "--start" in refused("join", token, "--folder", tmp_path / "me", "--start")
    assert not (tmp_path / "me").exists()


def test_token_of_another_role_is_refused_before_it_is_used(served: Served, tmp_path: Path) -> None:
    token = served.token("edge-server:edge")
    said = refused("join", token, "--folder", tmp_path / "box", "--role", "scheduler")
    assert "edge-server:edge" in said and "token of the scheduler" in said
    assert "edge" in refused("join", token, "--folder", tmp_path / "box", "--role", "client")
    assert joined(token, "--folder", tmp_path / "box", "--role", "edge-server")["joined_now"]
    boss = served.token("admin:boss")
    assert joined(boss, "--folder", tmp_path / "boss", "--role", "client")["joined_now"]


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
    with pytest.raises(InvalidInputError, match="--insecure|TLS"):
        _ = AuthoritySettings().security  # type: ignore[call-arg]
