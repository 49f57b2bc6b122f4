"""Changes the files that describe the links of a running testbed, and reports the effect."""

import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

from collapipe.emulation.emulation_file import Emulation
from collapipe.emulation.links import ANY_HOST, LinkDescription, LinkKey
from collapipe.emulation.network_profiles import Direction
from collapipe.errors import CorruptDataError, InvalidInputError
from collapipe.traffic_shaping.shaper_process.links_file import LinkEntry, LinksFile
from collapipe.traffic_shaping.shaper_process.status import (
    AppliedLink,
    ShaperStatus,
    read_status,
    status_folder,
)
from collapipe_client.workspace import replace_text

_POLL_SECONDS = 0.1

Changes = Mapping[str, LinkEntry | None]
"""New descriptions of links, by key. `None` removes a description."""


class Report(BaseModel):
    """The effect of a change."""

    file: Path
    applied: dict[str, dict[str, AppliedLink]] = {}
    """The changed links that are in force now, by sender and receiver."""
    problems: dict[str, list[str]] = {}
    """Reasons why links differ from the file, by sender. Those with the key "" concern all senders."""
    not_confirmed: list[str] = []
    """Senders whose shaper process runs, but did not confirm the change in time."""
    not_up: list[str] = []
    """Senders without a running shaper process. They follow the file when they start."""


class ShaperProcessLinks:
    """The links of a testbed whose hosts have shaper processes.

    Args:
        file: links.json. It need not exist yet.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def links(self) -> Mapping[str, LinkEntry]:
        """Returns the descriptions in the file, by key."""
        return LinksFile.read(self._file).links

    def change(self, changes: Changes, wait_seconds: float) -> Report:
        """Changes the file, and waits at most `wait_seconds` until the change is in force.

        Raises:
            InvalidInputError: The testbed lacks a host, or its file cannot be used.
        """
        if not self._file.parent.is_dir():
            raise InvalidInputError(
                f"--state {self._file}: there is no such folder: give the links.json in the folder that the shaper "
                "processes mount as /shaping"
            )
        folder = status_folder(self._file)
        if not folder.exists():
            folder.mkdir()
            # Shaper processes run as root without the right to write into the folders of other users.
            folder.chmod(0o1777)
        with _locked(self._file):
            current = LinksFile.read(self._file)
            links = _apply(changes, current.links, current.all_hosts)
            changed = LinksFile.model_validate({"hosts": current.hosts, "links": links})
            replace_text(self._file, changed.text)
            self._file.chmod(0o644)
        keys = [LinkKey.parse(key) for key in changes]
        senders = [
            host
            for host in current.all_hosts
            if any(key.matches(host, key.receiver) and key.receiver != host for key in keys)
        ]
        statuses = self._wait(senders, changed.digest, wait_seconds)
        running = {sender: status for sender, status in statuses.items() if status is not None}
        applied = {
            sender: {
                receiver: link
                for receiver, link in status.links.items()
                if any(key.matches(sender, receiver) for key in keys)
            }
            for sender, status in running.items()
            if status.digest == changed.digest and status.in_force
        }
        return Report(
            file=self._file,
            applied=applied,
            problems={sender: one.problems for sender, one in running.items() if one.problems},
            not_confirmed=[sender for sender in running if sender not in applied],
            not_up=[sender for sender in statuses if sender not in running],
        )

    def _wait(
        self, senders: Sequence[str], digest: str, wait_seconds: float
    ) -> dict[str, ShaperStatus | None]:
        """Returns the status of each running shaper process, if possible after all have read the file."""
        deadline = time.monotonic() + wait_seconds
        while True:
            statuses = {sender: self._status(sender) for sender in senders}
            is_read = all(status is None or status.digest == digest for status in statuses.values())
            if is_read or time.monotonic() > deadline:
                return statuses
            time.sleep(_POLL_SECONDS)

    def _status(self, sender: str) -> ShaperStatus | None:
        try:
            status = read_status(status_folder(self._file) / f"{sender}.json")
        except CorruptDataError:  # Another version wrote the file. The process will replace it.
            return None
        return status if status is not None and status.running else None


class EmulatedLinks:
    """The links of a local testbed. Its hosts read `file`, an emulation.json, and pace their links."""

    def __init__(self, file: Path, hosts: Sequence[str]) -> None:
        self._file = file
        self._hosts = hosts

    def links(self) -> Mapping[str, LinkDescription]:
        """Returns the descriptions in the file, by key."""
        return Emulation.read(self._file).links

    def change(self, changes: Changes, wait_seconds: float) -> Report:
        """Changes the file. The hosts apply the change later, so that there is nothing to wait for.

        Raises:
            InvalidInputError: The testbed lacks a host, or a change contains a trace.
        """
        entries = {key: entry for key, entry in changes.items() if entry is not None}
        if any(entry.trace is not None for entry in entries.values()):
            raise InvalidInputError(
                "a local testbed cannot play traces: change its links step by step, or use the testbed of containers"
            )
        with _locked(self._file):
            current = Emulation.read(self._file)
            links = _apply(changes, current.links, self._hosts)
            changed = current.model_copy(update={"links": links})
            replace_text(self._file, changed.model_dump_json(indent=1, exclude_none=True))
        warnings = current.model_copy(update={"links": entries}).warnings()
        return Report(file=self._file, problems={"": warnings} if warnings else {})


def _apply(
    changes: Changes, links: Mapping[str, LinkDescription], hosts: Sequence[str]
) -> dict[str, LinkDescription]:
    """Returns the links after the changes.

    Raises:
        InvalidInputError: The testbed lacks a host.
    """
    named = {host for key in changes for host in LinkKey.parse(key).hosts}
    if unknown := sorted(named - set(hosts)):
        raise InvalidInputError(
            f"the testbed has no {', '.join(unknown)}: name one of its hosts ({', '.join(hosts) or 'it has none'})"
        )
    return {key: link for key, link in {**links, **changes}.items() if link is not None}


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Locks the file against other commands that change it."""
    with open(file.with_name(f"{file.name}.lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def links_named(link: str, both: bool) -> dict[str, Direction]:
    """Returns the keys of the links that a user names, with the direction of each.

    Args:
        link: A host, for its links in both directions; or a key.
        both: Whether to add the opposite direction of a key.

    Raises:
        InvalidInputError: The link is neither a host nor a key.
    """
    if ">" not in link and link != ANY_HOST:
        return {f"{link}>*": "up", f"*>{link}": "down"}
    key = LinkKey.parse(link)
    towards_host = key.sender == ANY_HOST != key.receiver
    directions: tuple[Direction, Direction] = ("down", "up") if towards_host else ("up", "down")
    named = {str(key): directions[0]}
    if both:
        named.setdefault(str(key.reverse), directions[1])
    return named
