"""What deploy/install.py does for each role. Only pip, systemd and useradd are left out."""

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from collapipe.documents import hold_directory
from collapipe.installation import (
    LOCKS,
    PACKAGES,
    WITHOUT_TORCH,
    Places,
    one_line_for_a_missing_package,
    places_of,
    runs_systemd,
)

from .installing import CHECKOUT, installer, of_system, unit_files


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "arm64"])
@pytest.mark.parametrize("role", LOCKS)
def test_every_role_gets_locked_packages_and_the_torch_of_its_machine(
    role: str, machine: str
) -> None:
    commands = installer().pip_commands(role, machine, Path("/copy"))
    assert commands[-1][-1] == "/copy"
    locks = [word for command in commands for word in command if word.endswith(".txt")]
    assert all(Path(lock).is_file() for lock in locks)
    names = [Path(lock).stem for lock in locks]
    assert names[0] == "build" and {LOCKS[role], "client"} <= set(names)
    unlocked = [command for command in commands[:-1] if "--require-hashes" not in command]
    needs_torch = role not in WITHOUT_TORCH
    assert ("torch-arm64" in names) == (needs_torch and machine == "aarch64")
    assert bool(unlocked) == (needs_torch and machine != "aarch64")
    assert all(re.fullmatch(r"torch==[\d.]+", word) for command in unlocked for word in command)


def test_services_of_one_machine_share_only_the_programs() -> None:
    for is_root in (True, False):
        one, other = (
            places_of(name, is_root=is_root, home=Path("/home/me"))
            for name in ("control-unit", "control-unit-2")
        )
        assert one.programs == other.programs
        for place in ("folder", "state", "service", "user"):
            assert getattr(one, place) != getattr(other, place)


def _made(places: Places, role: str) -> None:
    """Makes the files of an installed service that has joined."""
    for folder in (places.folder / "tls", places.state, places.programs / "bin", places.units):
        folder.mkdir(parents=True, exist_ok=True)
    for file in ("tls/key.pem", "joined.json", f"{role}.toml"):
        (places.folder / file).touch()
    installer()._link(places)
    for name, text in unit_files(role, places).items():
        (places.units / name).write_text(text)


def test_removal_leaves_other_services_and_the_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        places_of(name, is_root=False, home=tmp_path) for name in ("edge-server", "control-unit")
    )
    for places in (first, second):
        _made(places, places.name)
    remove: Callable[..., None] = installer().remove
    remove(first, has_systemd=False)
    assert f"rm -r {first.state}" in capsys.readouterr().out
    assert os.listdir(first.folder) == ["state"]
    assert not (first.units / first.service).exists()
    assert (second.units / second.service).exists() and second.command.is_symlink()
    assert (second.folder / "tls" / "key.pem").exists() and second.programs.exists()
    remove(second, has_systemd=False)
    assert not any(path.is_file() or path.is_symlink() for path in tmp_path.rglob("*"))
    assert not second.programs.exists() and second.state.exists()
    with pytest.raises(installer().InstallError, match="edge-server-2"):
        remove(places_of("edge-server-2", is_root=False, home=tmp_path), has_systemd=False)


def test_command_of_another_program_stays(tmp_path: Path) -> None:
    places = places_of("client", is_root=False, home=tmp_path)
    places.command.parent.mkdir(parents=True)
    places.command.write_text("mine")
    _made(places, "client")
    installer().remove(places, has_systemd=False)
    assert places.command.read_text() == "mine"


@pytest.mark.parametrize("name", ["../x", "Pi", "a" * 22, "programs", "renew", "1"])
def test_name_that_cannot_be_that_of_a_service_is_refused_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installer().main(["scheduler", "--name", name]) == 1
    said = capsys.readouterr().err
    assert f"--name {name} " in said and said.count("\n") == 1


def test_folder_without_permission_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "home"
    blocked.touch()  # root may write everywhere, but no folder lies in a file.
    places = places_of("client", is_root=False, home=blocked)
    monkeypatch.setattr(installer(), "own_places", lambda name: places)
    monkeypatch.setattr(installer(), "_run", lambda *command: None)
    assert installer().main(["client"]) == 1
    said = capsys.readouterr().err
    assert str(blocked) in said and said.count("\n") == 1


@pytest.mark.parametrize("role", LOCKS)
def test_missing_package_is_one_line_that_names_the_role(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, one_line_for_a_missing_package(role):
        import no_such_package_at_all.part  # type: ignore[import-not-found]  # noqa: F401
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "no_such_package_at_all is not installed" in said and f"install.py {role}`" in said
    assert said.count("\n") == 1


def test_missing_module_of_this_project_is_a_bug_and_passes() -> None:
    with pytest.raises(ModuleNotFoundError), one_line_for_a_missing_package("client"):
        import collapipe.no_such_module  # type: ignore[import-not-found]  # noqa: F401


def test_documents_name_only_roles_that_exist() -> None:
    files = [*CHECKOUT.glob("deploy/**/*.md"), *CHECKOUT.glob("docs/*.md"), CHECKOUT / "README.md"]
    named = [
        (file.name, role)
        for file in files
        for role in re.findall(r"deploy/install\.py ([a-zA-Z-]+)", file.read_text("utf-8"))
    ]
    assert {role for _, role in named} >= {"device-agent", "client"}
    assert [each for each in named if each[1] not in {*LOCKS, "ROLE"}] == []


def test_user_without_a_session_of_systemd_gets_no_service_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = places_of("scheduler", is_root=False, home=tmp_path)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert not runs_systemd(places)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert not runs_systemd(places)
    (tmp_path / "systemd").mkdir()
    assert runs_systemd(places)


@pytest.mark.parametrize(
    ("joining", "said"),
    [
        (["--join"], "collapipe certs token"),
        (["--join", "letmein"], "letmein"),
        (["--join", "--data-root", "/srv"], "COLLAPIPE_JOIN_TOKEN"),
        (["--remove", "--join", "collapipe-join-x"], "--remove"),
    ],
)
def test_wrong_join_is_refused_before_pip_runs(
    joining: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLLAPIPE_JOIN_TOKEN", raising=False)
    monkeypatch.setattr(installer(), "_run", lambda *command: pytest.fail("pip runs"))
    assert installer().main(["device-agent", *joining]) == 1
    assert said in capsys.readouterr().err


def test_installed_service_joins_with_the_options_of_the_user_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[list[str]]()
    places = places_of("control-unit-1", is_root=False, home=tmp_path)
    monkeypatch.setattr(installer(), "_run", lambda *command: None)

    def execv(path: str, line: list[str]) -> None:
        started.append(line)

    monkeypatch.setattr("os.execv", execv)
    token = ["collapipe-join-x", "--data-root", "/srv"]
    installer().install("control-unit", places, token, has_systemd=False)
    folder = str(places.folder)
    assert started == [
        [
            *(str(places.programs / "bin" / "collapipe"), "join", "--folder", folder, "--start"),
            *("--role", "control-unit", *token),
        ]
    ]
    system = of_system("control-unit")
    with pytest.raises(installer().InstallError, match="leave sudo out"):
        installer().install("control-unit", system, token, has_systemd=False)


def test_service_that_still_runs_is_not_removed(tmp_path: Path) -> None:
    places = places_of("scheduler", is_root=False, home=tmp_path)
    _made(places, "scheduler")
    with hold_directory(places.state):
        with pytest.raises(installer().InstallError, match=f"process {os.getpid()}"):
            installer().remove(places, has_systemd=False)
        assert (places.folder / "tls" / "key.pem").exists() and places.programs.exists()
    installer().remove(places, has_systemd=False)
    assert not places.programs.exists()


def test_command_whose_programs_are_gone_is_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = places_of("client", is_root=False, home=tmp_path)
    places.command.parent.mkdir(parents=True)
    places.command.symlink_to(tmp_path / "gone")
    installer()._link(places)
    assert os.readlink(places.command) == str(places.programs / "bin" / "collapipe")
    places.command.unlink()
    places.command.write_text("mine")
    installer()._link(places)
    assert str(places.programs) in capsys.readouterr().out


@pytest.mark.parametrize("role", PACKAGES)
def test_package_that_a_job_needs_later_is_missed_at_the_start(
    role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(PACKAGES) == set(LOCKS)
    assert [name for name in PACKAGES[role] if find_spec(name) is None] == []
    last = PACKAGES[role][-1]
    monkeypatch.setattr(
        "collapipe.installation.find_spec", lambda name: None if name == last else find_spec(name)
    )
    with pytest.raises(SystemExit), one_line_for_a_missing_package(role):
        pytest.fail("it starts")
    assert f"{last} is not installed" in capsys.readouterr().err
