"""`python -m collapipe.traffic_shaping`: the shaper process."""

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

from collapipe.errors import CollapipeError
from collapipe.telemetry.logs import configure_logging
from collapipe.traffic_shaping.shaper_process.host_addresses import AddressBook, look_up
from collapipe.traffic_shaping.shaper_process.host_shaper import HostShaper
from collapipe.traffic_shaping.shaper_process.status import read_status, status_folder
from collapipe.traffic_shaping.tc.interface import SHAPER_PROCESS_HANDLE, Interface

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
"""How often to look for a change of links.json. In a container, a mounted folder may send no events."""
_END_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def main() -> None:
    """Shapes the links of a host until a signal ends the process, and then removes the shaping."""
    options = _parse()
    configure_logging(options.log_format, "shaper", options.host)
    status = (options.status_dir or status_folder(options.state)) / f"{options.host}.json"
    if options.check:
        sys.exit(_check(status))
    interface = Interface(options.interface, SHAPER_PROCESS_HANDLE)
    try:
        if options.once or options.remove:
            shaper = HostShaper(options.host, options.state, interface, status, look_up)
            if options.remove:
                shaper.remove()
            else:
                shaper.read()
                shaper.apply(time.time())
        else:
            # Threads inherit this mask, so it must be set before the first one starts.
            signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
            book = AddressBook()
            shaper = HostShaper(options.host, options.state, interface, status, book.find)
            _run(shaper, book)
    except CollapipeError as error:
        print(f"shaper: {error}", file=sys.stderr)
        sys.exit(2)


def _run(shaper: HostShaper, book: AddressBook) -> None:
    is_ended = False
    while not is_ended:
        shaper.read()
        book.follow(shaper.other_hosts)
        next_change = shaper.apply(time.time())
        wait = _POLL_SECONDS
        if next_change is not None:
            wait = min(wait, max(next_change - time.time(), 0.01))
        is_ended = signal.sigtimedwait(_END_SIGNALS, wait) is not None
    shaper.remove()


def _check(path: Path) -> int:
    """Returns the exit code of the health check: 0 if the shaper process runs and has applied links.json."""
    status = read_status(path)
    if status is None or not status.running:
        print(f"the shaper process does not run: {path}")
        return 1
    if not status.in_force:
        print("; ".join(status.problems))
    return 0 if status.in_force else 1


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
        "--status-dir", type=Path, help="folder for the status; default: applied/ beside --state"
    )
    log_format = os.environ.get("COLLAPIPE_LOG_FORMAT", "text")
    parser.add_argument("--log-format", choices=("text", "json"), default=log_format)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--once", action="store_true", help="shape the links, and end without removing it"
    )
    mode.add_argument(
        "--check",
        action="store_true",
        help="check the health of the shaper process: exit code 0 or 1",
    )
    mode.add_argument("--remove", action="store_true", help="remove all shaping, and end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
