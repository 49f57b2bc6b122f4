#!/usr/bin/env python3
"""Installs one role of CollaPipe on this machine, or removes it.

    sudo python3 deploy/install.py ROLE     for the whole system
    python3 deploy/install.py ROLE          for this user, without root

It makes a virtual environment with the locked packages of the role, and a service file where systemd runs. Repeat it to update.
With --join TOKEN, it then runs `collapipe join`, which gives the service its certificate and its settings, and starts it.
It needs only Python and its module venv.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

if sys.version_info < (3, 10) or sys.maxsize < 2**32:  # This program may meet an older Python.
    sys.exit(
        f"error: this is Python {platform.python_version()} with {sys.maxsize.bit_length() + 1} bits: CollaPipe needs Python 3.10 or "
        "later with 64 bits, so start this program with another one, such as python3.11"
    )

sys.dont_write_bytecode = True  # With sudo, files of root would stay in the checkout of a user.
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "services"))

from collapipe.installation import (  # noqa: E402
    LOCKS,
    WITHOUT_TORCH,
    Places,
    own_places,
    runs_systemd,
)

_SOURCES = ("LICENSE", "README.md", "pyproject.toml", "clients", "services")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,20}")  # A name of a user on Linux has 31 characters at most.
_NO_LOGIN = "/usr/sbin/nologin"


class InstallError(Exception):
    """The role cannot be installed or removed. The message says what to do."""


def pip_commands(role: str, machine: str, source: Path) -> list[list[str]]:
    """Returns the arguments of each `pip install`, in their order.

    Args:
        machine: As `platform.machine` names it.
        source: A copy of the files from which the project is built.
    """
    locks = CHECKOUT / "requirements"
    locked = ["--no-deps", "--no-build-isolation", "--use-pep517", "--require-hashes"]
    packages = ["-r", f"{locks / LOCKS[role]}.txt"]
    if role != "client":  # Every service needs it to join.
        packages += ["-r", str(locks / "client.txt")]
    commands = [[*locked, "-r", str(locks / "build.txt")]]
    if role not in WITHOUT_TORCH and machine == "aarch64":
        packages += ["-r", str(locks / "torch-arm64.txt")]
    elif role not in WITHOUT_TORCH:
        commands.append([torch_of_makefile()])
    # torch needs packages of the locks, and would bring other versions of them.
    commands.insert(1, [*locked, *packages])
    return [*commands, ["--no-deps", "--no-build-isolation", "--force-reinstall", str(source)]]


def torch_of_makefile() -> str:
    """Returns the requirement for the torch of machines without a locked one."""
    found = re.search(r"^TORCH := (\S+)$", (CHECKOUT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert found
    return found[1]


def unit_files(role: str, places: Places) -> dict[str, str]:
    """Returns the texts of the service files by their names."""
    folder = CHECKOUT / "deploy" / "systemd"
    kind = folder / ("system" if places.is_of_system else "user")
    values = {
        "name": places.name,
        "role": role,
        "module": role.replace("-", "_"),
        "user": places.user,
        # systemd replaces what follows a percent sign.
        **{
            key: str(getattr(places, key)).replace("%", "%%")
            for key in ("programs", "folder", "state")
        },
    }

    def filled(path: Path) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: values[found[1]], path.read_text("utf-8"))

    return {
        places.service: filled(kind / "collapipe.service"),
        "collapipe-renew.service": filled(kind / "collapipe-renew.service"),
        "collapipe-renew.timer": filled(folder / "collapipe-renew.timer"),
    }


def check_token(joining: list[str]) -> None:
    """Raises `InstallError` if no token follows --join, so that nobody waits for pip first."""
    token = "" if joining[:1] == [] or joining[0].startswith("-") else joining[0]
    token = token or os.environ.get("COLLAPIPE_JOIN_TOKEN", "")
    if not token.startswith("collapipe-join-"):
        raise InstallError(
            f"--join {token[:24]}: is no token: give that of `collapipe certs token`, here or in COLLAPIPE_JOIN_TOKEN"
        )


def install(
    role: str, places: Places, joining: list[str] | None = None, *, has_systemd: bool
) -> None:
    """Installs a role, or updates it.

    Args:
        joining: The token, and options for `collapipe join`, which takes the place of this process; `None` to only install.
    """
    if find_spec("ensurepip") is None:
        raise InstallError(
            "this Python has no complete module venv: run `sudo apt install python3-venv`, or install it as your system does"
        )
    if joining is not None and role != "client" and places.is_of_system and not has_systemd:
        raise InstallError("systemd does not run here, and no service runs as root: leave sudo out")
    former = os.umask(0o022)  # The user of the service reads what root installs.
    with _alone(_lock_of(places)):
        _make_programs(role, places)
        _link(places)
    print(f"installed: {role} in {places.programs}")
    if role != "client" and has_systemd:
        _add_user(places)
        places.units.mkdir(parents=True, exist_ok=True)
        for name, text in unit_files(role, places).items():
            (places.units / name).write_text(text, "utf-8")
        _run(*places.systemctl("daemon-reload"))
        print(f"service file: {places.units / places.service}")
    options = [] if places.name == role else ["--folder", str(places.folder)]
    if role != "client":
        options.append("--start")
    if joining is not None:
        options += ["--role", role]
        os.umask(former)
        command = [str(places.programs / "bin" / "collapipe"), "join", *options, *joining]
        sys.stdout.flush()
        os.execv(command[0], command)
    command = "collapipe" if _is_on_path(places) else str(places.programs / "bin" / "collapipe")
    if role == "control-unit":
        options += ["--data-root", "FOLDER"]
    sudo = "sudo " if "SUDO_USER" in os.environ else ""
    print(f"next: {sudo}{shlex.join([command, 'join', 'TOKEN', *options])}")


def _make_programs(role: str, places: Places) -> None:
    """Makes the virtual environment if it is not whole, and installs the packages of a role."""
    python = places.programs / "bin" / "python"
    # -I keeps out modules of the current folder, which may belong to another user.
    is_whole = (
        python.exists()
        and not subprocess.run(
            [python, "-I", "-m", "pip", "--version"], check=False, capture_output=True
        ).returncode
    )
    if not is_whole:  # It is new, a run was interrupted, or the system has another Python now.
        _run(sys.executable, "-I", "-m", "venv", "--clear", str(places.programs))
    with tempfile.TemporaryDirectory() as copy:
        # A build writes into its folder, and the checkout may belong to another user.
        source = Path(copy)
        for name in _SOURCES:
            path = CHECKOUT / name
            if path.is_dir():
                shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("*.egg-info"))
            else:
                shutil.copy(path, source)
        for arguments in pip_commands(role, platform.machine(), source):
            pip = ["pip", "--disable-pip-version-check", "install", "--quiet", "--no-cache-dir"]
            _run(str(python), "-I", "-m", *pip, *arguments)


def _lock_of(places: Places) -> Path:
    return places.programs.with_name(f"{places.programs.name}.lock")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until no other installation uses the same programs."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waits for another installation, which holds {lock}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove(places: Places, *, has_systemd: bool) -> None:
    """Removes a service, and the programs with the last one. Its state stays."""
    unit = places.units / places.service
    is_service = unit.exists() or places.folder.exists()
    if not is_service and not (places.name == "client" and places.programs.exists()):
        raise InstallError(
            f"nothing of {places.name} is installed for {_who(places)}: check --name"
        )
    if unit.exists():
        if has_systemd:
            _run(*places.systemctl("disable", "--now", places.service))
        unit.unlink()
    check_is_ended(places)
    for path in (places.folder / "tls", places.folder / "joined.json"):
        _delete(path)
    for path in places.folder.glob("*.toml*"):
        path.unlink()
    others = [
        path
        for path in places.units.glob("collapipe-*.service")
        if path.name != "collapipe-renew.service"
    ]
    if not others:
        for name in ("collapipe-renew.timer", "collapipe-renew.service"):
            if (places.units / name).exists():
                if has_systemd and name.endswith("timer"):
                    _run(*places.systemctl("disable", "--now", name))
                (places.units / name).unlink()
    if not any(places.folder.parent.glob("*/joined.json")) and not others:
        if _is_ours(places):
            places.command.unlink()
        _delete(places.programs)
        _lock_of(places).unlink(missing_ok=True)
    for folder in (places.folder, places.folder.parent):
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
    if has_systemd:
        _run(*places.systemctl("daemon-reload"))
    print(f"removed: {places.name}")
    if places.state.exists():
        user = f" && userdel {places.user}" if places.is_of_system and _has_user(places) else ""
        print(f"left, with what the service has kept: rm -r {shlex.quote(str(places.state))}{user}")
    elif places.is_of_system and _has_user(places):
        _run(_program("userdel"), places.user)


def check_is_ended(places: Places) -> None:
    """Raises `InstallError` if a process still uses the state of a service."""
    try:
        with open(places.state / "lock", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InstallError(
                    f"{places.name} still runs as process {file.read() or 'unknown'}: end it first"
                ) from None
    except FileNotFoundError:
        pass  # It has never run.


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"exit status {error.returncode}"
        raise InstallError(
            f"`{shlex.join(command)}` failed ({reason}): see what it printed, and repeat this command afterwards"
        ) from None


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _who(places: Places) -> str:
    names = [entry.pw_name for entry in pwd.getpwall() if entry.pw_uid == os.geteuid()]
    return (
        "the system" if places.is_of_system else f"the user {names[0] if names else os.geteuid()}"
    )


def _has_user(places: Places) -> bool:
    return any(entry.pw_name == places.user for entry in pwd.getpwall())


def _add_user(places: Places) -> None:
    if places.is_of_system and not _has_user(places):
        home = ["--home-dir", str(places.state), "--no-create-home", "--shell", _NO_LOGIN]
        _run(_program("useradd"), "--system", "--user-group", *home, places.user)


def _program(name: str) -> str:
    """Returns the path of a program for administrators, which `su` does not search for."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or name


def _link(places: Places) -> None:
    """Makes `collapipe` a command of the shell, unless another program has this name."""
    target = places.programs / "bin" / "collapipe"
    try:
        if places.command.is_symlink() and not places.command.exists():
            places.command.unlink()  # It pointed to programs that are gone.
        if not os.path.lexists(places.command):
            places.command.parent.mkdir(parents=True, exist_ok=True)
            places.command.symlink_to(target)
    except OSError as error:
        print(f"note: {places.command} cannot be made ({error.strerror})")
    if not _is_ours(places):
        print(f"note: {places.command} is not this program: run {target}")


def _is_ours(places: Places) -> bool:
    link = places.command
    return link.is_symlink() and os.readlink(link) == str(places.programs / "bin" / "collapipe")


def _is_on_path(places: Places) -> bool:
    return _is_ours(places) and shutil.which("collapipe") == str(places.command)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command, and returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("role", choices=sorted(LOCKS), help="what this machine is to do")
    parser.add_argument(
        "--name",
        help="name of the service here, for a second one of the same role (default: the role)",
    )
    parser.add_argument("--remove", action="store_true", help="remove the service; its state stays")
    parser.add_argument(
        "--join",
        nargs=argparse.REMAINDER,
        metavar="TOKEN",
        help="join with a token and start; all that follows is for `collapipe join`",
    )
    given = parser.parse_args(arguments)
    places = own_places(given.name or given.role)
    try:
        if not _NAME.fullmatch(places.name) or places.name in ("programs", "renew"):
            raise InstallError(
                f"--name {places.name} cannot be the name of a service: use up to 21 small letters, digits and hyphens, beginning with a letter"
            )
        if given.remove and given.join is not None:
            raise InstallError("--remove and --join contradict each other: leave one out")
        if given.join is not None:
            check_token(given.join)
        if not places.folder.is_absolute():
            raise InstallError(
                "this user has no home folder: set HOME, or run this with sudo for the whole system"
            )
        if given.remove:
            remove(places, has_systemd=runs_systemd(places))
        else:
            install(given.role, places, given.join, has_systemd=runs_systemd(places))
    except KeyboardInterrupt:
        print("interrupted: repeat this command", file=sys.stderr)
        return 130
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"error: {error.filename} cannot be used for {_who(places)} ({error.strerror or error}): give this user access, or run this "
            "with sudo for the whole system",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
