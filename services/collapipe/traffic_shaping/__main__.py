"""`python -m collapipe.traffic_shaping`: the shaper process."""

import argparse
import logging
import os
import pwd
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collapipe.errors import CollapipeError, InvalidInputError
from collapipe.telemetry.logs import configure_logging
from collapipe.traffic_shaping.shaper_process.host_addresses import AddressBook, look_up
from collapipe.traffic_shaping.shaper_process.host_shaper import HostShaper
from collapipe.traffic_shaping.shaper_process.status import status_path
from collapipe.traffic_shaping.tc.interface import SHAPER_PROCESS_HANDLE, Interface

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
"""How often to look for a change of links.json. In a container, a mounted folder may send no events."""
_END_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def main() -> None:
    """Shapes the links of a host until a signal or the end of its service, and then removes the shaping."""
    options = _parse()
    configure_logging(options.log_format, "shaper", options.host)
    status = status_path(options.state, options.host, options.status_dir)
    interface = Interface(options.interface, SHAPER_PROCESS_HANDLE)
    try:
        if options.once or options.remove:
            shaper = HostShaper(options.host, options.state, interface, status, look_up)
            if options.remove:
                shaper.remove()
            else:
                shaper.read()
                shaper.apply(time.time())
            return
        # The service starts first, because it would inherit the mask.
        service = _start(options.command, options.user) if options.command else None
        # Threads inherit this mask, so it must be set before the first one starts.
        signal.pthread_sigmask(signal.SIG_BLOCK, {*_END_SIGNALS, signal.SIGCHLD})
        book = AddressBook()
        shaper = HostShaper(options.host, options.state, interface, status, book.find)
        _run(shaper, book, service)
    except CollapipeError as error:
        print(f"shaper: {error}", file=sys.stderr)
        sys.exit(2)
    if service is not None:  # A shell says in the same way that a signal has ended a program.
        sys.exit(service.returncode if service.returncode >= 0 else 128 - service.returncode)


def _start(command: Sequence[str], user: str) -> "subprocess.Popen[bytes]":
    """Starts a service. If a user is named, it has the rights of the user, and none of this process."""
    rights: dict[str, Any] = {}
    try:
        if user:
            entry = pwd.getpwnam(user)
            groups = os.getgrouplist(user, entry.pw_gid)
            rights = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}
        return subprocess.Popen(command, **rights)
    except KeyError:
        raise InvalidInputError(
            f"--user {user}: this machine has no such user: name one that `getent passwd` lists"
        ) from None
    except OSError as error:
        raise InvalidInputError(
            f"{shlex.join(command)} cannot be started ({error}): check the command; with --user, this process needs root "
            "with CAP_SETUID and CAP_SETGID"
        ) from None


def _run(shaper: HostShaper, book: AddressBook, service: "subprocess.Popen[bytes] | None") -> None:
    is_ended = False
    while not is_ended:
        shaper.read()
        book.follow(shaper.other_hosts)
        next_change = shaper.apply(time.time())
        wait = _POLL_SECONDS
        if next_change is not None:
            wait = min(wait, max(next_change - time.time(), 0.01))
        is_ended = _wait(wait, service)
    shaper.remove()


def _wait(seconds: float, service: "subprocess.Popen[bytes] | None") -> bool:
    """Waits, and returns whether to end. A service gets the signals, and its links stay shaped until it has ended."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        # tc is a child, too. Its end is no reason to go on earlier.
        received = signal.sigtimedwait({*_END_SIGNALS, signal.SIGCHLD}, left)
        number = received.si_signo if received else signal.SIGCHLD
        if service is None:
            if number in _END_SIGNALS:
                return True
        elif service.poll() is not None:
            return True
        elif number in _END_SIGNALS:
            service.send_signal(number)
    return False


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m collapipe.traffic_shaping",
        description="Gives the links that leave this host the conditions in links.json, with tc and netem.",
    )
    host, state = os.environ.get("COLLAPIPE_HOST_ID"), os.environ.get("COLLAPIPE_SHAPING_STATE")
    parser.add_argument("--host", default=host, required=not host, help="id of this host")
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(state) if state else None,
        required=not state,
        help="links.json; while it does not exist, initial.json beside it is used",
    )
    parser.add_argument(
        "--interface", default="eth0", help="the interface that leads to the other hosts"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND ...",
        help="the service of this host: it is started, gets the signals, and ends together with the shaper process",
    )
    parser.add_argument("--user", default="", help="the user whose rights COMMAND has")
    parser.add_argument(
        "--status-dir", type=Path, help="folder for the status; default: applied/ beside --state"
    )
    log_format = os.environ.get("COLLAPIPE_LOG_FORMAT", "text")
    parser.add_argument("--log-format", choices=("text", "json"), default=log_format)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--once", action="store_true", help="shape the links, and end without removing it"
    )
    mode.add_argument("--remove", action="store_true", help="remove all shaping, and end")
    options = parser.parse_args()
    if options.command and (options.once or options.remove):
        parser.error("--once and --remove start no service: leave out COMMAND")
    return options


if __name__ == "__main__":
    main()
