"""`python -m collapipe.traffic_shaping`."""

import argparse
import contextlib
import logging
import os
import queue
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from collapipe.errors import CollapipeError
from collapipe.telemetry.logs import configure_logging
from collapipe.traffic_shaping.host_addresses import Found, Names, resolve
from collapipe.traffic_shaping.host_shaper import HostShaper
from collapipe.traffic_shaping.netem.interface import Interface
from collapipe.traffic_shaping.netem.status import applied_folder, read_applied

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
"""How soon a change of links.json is seen; a folder that is mounted into a container sends no events everywhere."""


def main() -> None:
    """Shapes the links of a host until it is asked to end, then takes everything away."""
    given = _parse()
    configure_logging(given.log_format, "shaper", given.host)
    status = (given.status_dir or applied_folder(given.state)) / f"{given.host}.json"
    if given.check:
        sys.exit(_check(status))
    interface = Interface(given.interface)
    names = None if given.once or given.remove else Names()
    shaper = HostShaper(
        given.host, given.state, interface, status, names.found if names else _found_now
    )
    try:
        if given.remove:
            shaper.remove()
        elif names is None:
            shaper.read()
            shaper.apply(time.time())
        else:
            _run(shaper, names)
    except CollapipeError as error:
        print(f"shaper: {error}", file=sys.stderr)
        sys.exit(2)


def _run(shaper: HostShaper, names: Names) -> None:
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.put(number)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    while True:
        shaper.read()
        names.want(shaper.peers)
        next_change = shaper.apply(time.time())
        wait = _POLL_SECONDS
        if next_change is not None:
            wait = min(wait, max(next_change - time.time(), 0.01))
        with contextlib.suppress(queue.Empty):
            signals.get(timeout=wait)
            break
    shaper.remove()


def _check(status: Path) -> int:
    """Exit code for a health check: whether the shaper beside this process has in force what it should."""
    told = read_applied(status)
    if told is None or not told.running:
        print(f"the shaper does not run: {status}")
        return 1
    if not told.in_force:
        print("; ".join(told.problems))
    return 0 if told.in_force else 1


def _found_now(name: str) -> Found | None:
    addresses = resolve(name)
    return Found(addresses, time.monotonic()) if addresses else None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m collapipe.traffic_shaping",
        description="Makes the links that leave this host what a file says, by tc and netem.",
    )
    host, state = os.environ.get("COLLAPIPE_HOST_ID"), os.environ.get("COLLAPIPE_SHAPING_STATE")
    parser.add_argument("--host", default=host, required=not host, help="id of this host")
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(state) if state else None,
        required=not state,
        help="links.json; until there is one, initial.json beside it",
    )
    parser.add_argument("--interface", default="eth0", help="by which the others are reached")
    parser.add_argument("--status-dir", type=Path, help="default: applied/ beside --state")
    log_format = os.environ.get("COLLAPIPE_LOG_FORMAT", "text")
    parser.add_argument("--log-format", choices=("text", "json"), default=log_format)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--once", action="store_true", help="apply, leave it in force, and end")
    mode.add_argument("--check", action="store_true", help="for a health check: exit code 0 or 1")
    mode.add_argument("--remove", action="store_true", help="take everything away, and end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
