"""The files that describe the links of a running testbed, and how a change of them becomes effective."""

import fcntl
import time
from abc import ABC, abstractmethod
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


class Report(BaseModel):
    """The effect of a change."""

    file: Path
    """The changed file."""
    applied: dict[str, dict[str, AppliedLink]] = {}
    """The links in force now, by sender and receiver."""
    problems: dict[str, list[str]] = {}
    """Differences from the file, by sender; those with the key "" concern all senders."""
    not_confirmed: list[str] = []
    """Senders whose shaper process runs, but did not confirm the change in time."""
    not_up: list[str] = []
    """Senders without a running shaper process. They follow the file when they start."""


class LinkDescriptions(ABC):
    """The file that describes the links of one testbed.

    Args:
        file: Its path.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    @abstractmethod
    def links(self) -> Mapping[str, LinkDescription]:
        """Returns the descriptions in the file, by key."""

    def change(self, changes: Mapping[str, LinkEntry | None], wait_seconds: float) -> Report:
        """Changes the descriptions of some links.

        Args:
            changes: By key; `None` removes a description.
            wait_seconds: How long to wait for the shaper processes.

        Raises:
            InvalidInputError: The testbed lacks a host, the file cannot be used, or a link cannot be shaped like that.
        """
        self._prepare(changes)
        with _locked(self.file):
            named = {host for key in changes for host in LinkKey.parse(key).hosts}
            hosts = self._hosts()
            if unknown := sorted(named - set(hosts)):
                raise InvalidInputError(
                    f"the testbed has no {', '.join(unknown)}: it has {', '.join(hosts) or 'no hosts'}"
                )
            links = {**self.links(), **changes}
            self._write({key: link for key, link in links.items() if link is not None})
        return self._report(changes, wait_seconds)

    @abstractmethod
    def _prepare(self, changes: Mapping[str, LinkEntry | None]) -> None:
        """Checks whether the testbed can make the changes."""

    @abstractmethod
    def _hosts(self) -> Sequence[str]:
        """Returns the hosts of the testbed."""

    @abstractmethod
    def _write(self, links: Mapping[str, LinkDescription]) -> None:
        """Replaces the descriptions in the file."""

    @abstractmethod
    def _report(self, changes: Mapping[str, LinkEntry | None], wait_seconds: float) -> Report:
        """Returns the effect of changes that are in the file."""


class ShaperProcessLinks(LinkDescriptions):
    """links.json of a testbed whose hosts have shaper processes. The file need not exist yet."""

    def links(self) -> Mapping[str, LinkEntry]:
        return LinksFile.read(self.file).links

    def _prepare(self, changes: Mapping[str, LinkEntry | None]) -> None:
        if not self.file.parent.is_dir():
            raise InvalidInputError(
                f"--state {self.file}: there is no such folder: give the links.json in the folder that the shaper "
                "processes mount as /shaping"
            )
        folder = status_folder(self.file)
        if not folder.exists():
            folder.mkdir()
            # the shaper processes run as a root user that may not write into the folders of others
            folder.chmod(0o1777)

    def _hosts(self) -> Sequence[str]:
        return LinksFile.read(self.file).all_hosts

    def _write(self, links: Mapping[str, LinkDescription]) -> None:
        hosts = LinksFile.read(self.file).hosts
        replace_text(self.file, LinksFile.model_validate({"hosts": hosts, "links": links}).text)
        self.file.chmod(0o644)

    def _report(self, changes: Mapping[str, LinkEntry | None], wait_seconds: float) -> Report:
        links_file = LinksFile.read(self.file)
        keys = [LinkKey.parse(key) for key in changes]
        hosts = {*links_file.all_hosts, *(host for key in keys for host in key.hosts)}
        senders = {
            host
            for host in hosts
            if any(key.matches(host, key.receiver) and key.receiver != host for key in keys)
        }
        statuses = self._wait(sorted(senders), links_file.digest, wait_seconds)
        running = {sender: status for sender, status in statuses.items() if status is not None}
        applied = {
            sender: {
                receiver: link
                for receiver, link in status.links.items()
                if any(key.matches(sender, receiver) for key in keys)
            }
            for sender, status in running.items()
            if status.digest == links_file.digest and status.in_force
        }
        return Report(
            file=self.file,
            applied=applied,
            problems={sender: one.problems for sender, one in running.items() if one.problems},
            not_confirmed=[sender for sender in running if sender not in applied],
            not_up=[sender for sender in statuses if sender not in running],
        )

    def _wait(
        self, senders: Sequence[str], digest: str, wait_seconds: float
    ) -> dict[str, ShaperStatus | None]:
        """Returns the status of each running shaper process, once all of them have read the file."""
        deadline = time.monotonic() + wait_seconds
        while True:
            statuses = {sender: self._status(sender) for sender in senders}
            is_read = all(status is None or status.digest == digest for status in statuses.values())
            if is_read or time.monotonic() > deadline:
                return statuses
            time.sleep(_POLL_SECONDS)

    def _status(self, sender: str) -> ShaperStatus | None:
        try:
            status = read_status(status_folder(self.file) / f"{sender}.json")
        except CorruptDataError:  # another version wrote it; the process will replace it
            return None
        return status if status is not None and status.running else None


class EmulatedLinks(LinkDescriptions):
    """emulation.json of a local testbed, whose hosts pace their links.

    Args:
        file: Its path.
        hosts: The hosts of the testbed.
    """

    def __init__(self, file: Path, hosts: Sequence[str]) -> None:
        super().__init__(file)
        self._host_names = hosts

    def links(self) -> Mapping[str, LinkDescription]:
        return Emulation.read(self.file).links

    def _prepare(self, changes: Mapping[str, LinkEntry | None]) -> None:
        if any(entry is not None and entry.trace is not None for entry in changes.values()):
            raise InvalidInputError(
                "a local testbed cannot play traces: change its links step by step, or use the testbed of containers"
            )

    def _hosts(self) -> Sequence[str]:
        return self._host_names

    def _write(self, links: Mapping[str, LinkDescription]) -> None:
        emulation = Emulation.read(self.file).model_copy(update={"links": links})
        replace_text(self.file, emulation.model_dump_json(indent=1, exclude_none=True))

    def _report(self, changes: Mapping[str, LinkEntry | None], wait_seconds: float) -> Report:
        changed = {key: link for key, link in self.links().items() if key in changes}
        warnings = Emulation(links=changed).warnings()
        return Report(file=self.file, problems={"": warnings} if warnings else {})


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Makes other commands that change the file wait."""
    with open(file.with_name(f"{file.name}.lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def links_named(link: str, both: bool) -> dict[str, Direction]:
    """Returns the keys that a user means by a link, with the direction of each.

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
