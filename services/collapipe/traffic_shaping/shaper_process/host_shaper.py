"""Keeps the links of a host as links.json describes them."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from collapipe.documents import write_document
from collapipe.emulation.network_profiles import LinkConditions
from collapipe.errors import CorruptDataError, InvalidInputError
from collapipe.traffic_shaping.shaper_process.host_addresses import HostAddresses
from collapipe.traffic_shaping.shaper_process.links_file import (
    INITIAL,
    LinksFile,
    combine,
)
from collapipe.traffic_shaping.shaper_process.status import (
    AppliedLink,
    ShaperStatus,
    read_status,
)
from collapipe.traffic_shaping.tc.disciplines import (
    Discipline,
    Netem,
    TokenBucket,
    discipline_for,
)
from collapipe.traffic_shaping.tc.interface import Interface
from collapipe.traffic_shaping.tc.segmentation import switch_offloads_off, switch_offloads_on

logger = logging.getLogger(__name__)

_NO_NETEM = "delay, jitter and loss are not emulated, because this kernel has no netem; rates are held by tbf"
_CHECK_SECONDS = 10.0
"""How often to compare the kernel with links.json when nothing has changed."""
_RETRY_SECONDS = 2.0
_UNKNOWN_KIND = "qdisc kind is unknown"


class HostShaper:
    """Shapes the links that leave one host by the interface that leads to the other hosts."""

    def __init__(
        self,
        host: str,
        links_path: Path,
        interface: Interface,
        status_path: Path,
        find_addresses: Callable[[str], HostAddresses | None],
    ) -> None:
        self._host = host
        self._links_path = links_path
        self._interface = interface
        self._emulator = _LinkEmulator(interface)
        self._status_path = status_path
        self._find_addresses = find_addresses
        self._links_file = LinksFile()
        self._versions: object = None
        """The versions of links.json and initial.json that were read last."""
        self._read_error = ""
        self._tc_error = ""
        self._applied: tuple[int, Mapping[str, LinkConditions]] | None = None
        """The index of the interface, and the conditions by address; `None` before the first attempt."""
        self._check_at = 0.0
        self._status: ShaperStatus | None = None
        self._last_warnings: dict[str, str] = {}
        try:
            earlier = read_status(status_path)
        except CorruptDataError as error:
            logger.info("%s", error)
            earlier = None
        # An earlier process that was killed did not switch them on again.
        self._offloads_off = set(earlier.segmentation) if earlier else set[str]()

    @property
    def other_hosts(self) -> set[str]:
        """The hosts whose addresses this host needs."""
        return set(self._links_file.all_hosts) - {self._host}

    def read(self) -> None:
        """Reads links.json if it changed. After an error, the last usable content stays in force."""
        versions = [
            _version(path) for path in (self._links_path, self._links_path.with_name(INITIAL))
        ]
        if versions == self._versions:
            return
        self._versions = versions
        try:
            self._links_file = LinksFile.read(self._links_path)
            self._read_error = ""
        except InvalidInputError as error:
            self._read_error = f"{error}; the last usable content stays in force"
            logger.warning("%s", self._read_error)

    def apply(self, now: float) -> float | None:
        """Gives the links their conditions at a time in seconds since 1970, and writes the status.

        Returns:
            When a trace changes a link next, in seconds since 1970; `None` for never.
        """
        links = self._links_file.links_from(self._host)
        addresses = self._assign_addresses(links)
        applied: dict[str, AppliedLink] = {}
        by_address: dict[str, LinkConditions] = {}
        for receiver, parts in links.items():
            conditions = combine(entry.conditions_at(now) for entry in parts.values())
            by_address |= dict.fromkeys(addresses[receiver], conditions)
            applied[receiver] = AppliedLink(
                keys=list(parts), addresses=addresses[receiver], **conditions.model_dump()
            )
        self._shape(by_address)
        self._write_status(applied, running=True)
        changes = [entry.next_change(now) for parts in links.values() for entry in parts.values()]
        return min((change for change in changes if change is not None), default=None)

    def remove(self) -> None:
        """Removes all shaping, also that of a killed process; raises `InvalidInputError` if tc fails."""
        removed = self._interface.remove()
        switch_offloads_on(self._interface.name, self._offloads_off)
        self._offloads_off, self._applied, self._tc_error = set(), None, ""
        logger.info(
            "%s %s", self._interface.name, "is no longer shaped" if removed else "was not shaped"
        )
        self._write_status({}, running=False)

    def _assign_addresses(self, receivers: Iterable[str]) -> dict[str, list[str]]:
        """Returns the addresses of each receiver. If two claim one address, the last confirmed gets it."""
        found = {receiver: self._find_addresses(receiver) for receiver in receivers}
        known = {receiver: hosts for receiver, hosts in found.items() if hosts is not None}
        owners: dict[str, str] = {}
        for receiver in sorted(known, key=lambda name: (known[name].confirmed_at, name)):
            owners |= dict.fromkeys(known[receiver].addresses, receiver)
        return {
            receiver: sorted(address for address, owner in owners.items() if owner == receiver)
            for receiver in found
        }

    def _shape(self, by_address: Mapping[str, LinkConditions]) -> None:
        """Changes the kernel if the conditions changed, or if it was not checked for some time."""
        # An interface that is removed and comes back has another index, and is not shaped.
        wanted = self._interface.index, dict(by_address)
        if wanted == self._applied and time.monotonic() < self._check_at:
            return
        self._tc_error = ""
        try:
            lines = self._emulator.emulate(by_address)
            if by_address:
                self._offloads_off.update(switch_offloads_off(self._interface.name))
            for line in lines:
                logger.info("tc %s", line)
        except InvalidInputError as error:
            self._tc_error = str(error)
        self._warn_once("tc", self._tc_error)
        self._applied = wanted
        self._check_at = time.monotonic() + (_RETRY_SECONDS if self._tc_error else _CHECK_SECONDS)

    def _write_status(self, links: dict[str, AppliedLink], running: bool) -> None:
        problems = [error for error in (self._read_error, self._tc_error) if error]
        if unknown := [receiver for receiver, link in links.items() if not link.addresses]:
            problems.append(f"no address yet: {', '.join(unknown)}")
        status = ShaperStatus(
            host=self._host,
            interface=self._interface.name,
            running=running,
            digest=self._links_file.digest,
            in_force=not self._tc_error and not self._read_error,
            at=self._status.at if self._status else 0.0,
            netem=self._emulator.has_netem,
            links=links,
            problems=problems,
            segmentation=sorted(self._offloads_off),
        )
        if status.lacks_netem:
            status.problems.insert(0, _NO_NETEM)
            self._warn_once("netem", _NO_NETEM)
        if status == self._status:
            return
        status.at = time.time()
        try:
            write_document(self._status_path, status.model_dump())
        except OSError as error:  # The next call of apply tries again.
            self._warn_once("status", f"cannot write the status: {error}")
        else:
            self._status = status
            self._warn_once("status", "")

    def _warn_once(self, subject: str, text: str) -> None:
        """Logs a warning, unless it repeats the last one about the subject."""
        if text and text != self._last_warnings.get(subject):
            logger.warning("%s", text)
        self._last_warnings[subject] = text


class _LinkEmulator:
    """Gives links their conditions: with netem, or with tbf in a kernel without netem.

    The interface must have the handle of the shaper process.
    """

    def __init__(self, interface: Interface) -> None:
        self._interface = interface
        self.has_netem: bool | None = None
        """Whether the kernel has netem. `None` until the first change."""

    def emulate(self, by_address: Mapping[str, LinkConditions]) -> list[str]:
        """Gives links their conditions, by address of the receiver. Returns the commands that tc ran.

        Raises:
            InvalidInputError: Another program shapes the interface, or tc failed.
        """
        root = self._interface.read()
        if any(isinstance(known.discipline, TokenBucket) for known in root.classes.values()):
            self.has_netem = False  # An earlier process found no netem.
        desired: dict[str, Discipline] = {}
        for address, conditions in by_address.items():
            discipline = discipline_for(conditions, self.has_netem is not False)
            if discipline is not None:
                desired[address] = discipline
        if not desired:
            return self._interface.remove()
        try:
            lines = self._interface.change(root, desired)
        except InvalidInputError as error:
            if self.has_netem is False or _UNKNOWN_KIND not in str(error):
                raise
            self.has_netem = False
            return self.emulate(by_address)
        if any(isinstance(discipline, Netem) for discipline in desired.values()):
            self.has_netem = True
        return lines


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
