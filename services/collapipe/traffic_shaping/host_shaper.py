"""Keeps what a host's interface does equal to what links.json says."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from collapipe.documents import write_document
from collapipe.errors import CorruptDataError, InvalidInputError, WrongStateError
from collapipe.traffic_shaping.host_addresses import Found
from collapipe.traffic_shaping.netem.interface import Interface
from collapipe.traffic_shaping.netem.profiles import LinkConditions
from collapipe.traffic_shaping.netem.shaping import INITIAL, Shaping, read_shaping
from collapipe.traffic_shaping.netem.status import Applied, AppliedLink, read_applied

logger = logging.getLogger(__name__)

NO_NETEM = (
    "delay, jitter and loss are not emulated: this kernel has no netem; rates are held by tbf"
)
_CHECK_SECONDS = 10.0
"""How often the kernel is asked whether everything is still there, when nothing else happens."""
_RETRY_SECONDS = 2.0


class HostShaper:
    """Shapes the links that leave one host.

    Args:
        host: Its id, as in links.json.
        state: links.json.
        interface: By which it reaches the others.
        status: Where to tell what is in force.
        found: What the name of a host stands for.
    """

    def __init__(
        self,
        host: str,
        state: Path,
        interface: Interface,
        status: Path,
        found: Callable[[str], Found | None],
    ) -> None:
        self._host = host
        self._state = state
        self._interface = interface
        self._status = status
        self._found = found
        self._shaping = Shaping()
        self._digest = ""
        self._stamp: object = None
        self._refused = ""
        self._in_force: Mapping[str, LinkConditions] | None = None
        self._failed = ""
        self._look_again_at = 0.0
        self._told: Applied | None = None
        self._untold = ""
        self._said_no_netem = False
        self._was_there = False
        try:
            earlier = read_applied(status)
        except CorruptDataError as error:
            logger.info("%s", error)
            earlier = None
        # what a process that was killed switched off is still off
        self._segmentation = set(earlier.segmentation) if earlier else set[str]()

    @property
    def peers(self) -> set[str]:
        """The hosts whose addresses it needs, now or with the next change."""
        return set(self._shaping.all_hosts) - {self._host}

    def read(self) -> None:
        """Reads links.json if it changed; one that cannot be used leaves in force what was said before."""
        stamp = [_stamp(path) for path in (self._state, self._state.with_name(INITIAL))]
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            said = read_shaping(self._state)
        except InvalidInputError as error:
            self._refused = f"{error}; what was said before stays in force"
            logger.warning("%s", self._refused)
            return
        self._refused = ""
        self._shaping, self._digest = said.shaping, said.digest

    def apply(self, now: float) -> float | None:
        """Makes the interface do what holds at a moment; what it does already is left alone.

        Args:
            now: In seconds since 1970.

        Returns:
            When a trace changes a link next, in seconds since 1970; `None` for never.

        Raises:
            WrongStateError: The interface went away.
        """
        if self._interface.exists:
            self._was_there = True
        elif self._was_there:
            raise WrongStateError(
                f"{self._interface.name} went away: the container that had it was started anew; start this one anew "
                "too, so that it joins the new network"
            )
        ways = self._shaping.from_host(self._host)
        links, problems = {}, []
        by_address: dict[str, LinkConditions] = {}
        addresses = self._addresses(list(ways))
        for receiver, way in ways.items():
            conditions = way.conditions(now)
            about = conditions.model_dump(exclude={"queue_seconds"})
            links[receiver] = AppliedLink(
                keys=list(way.shapes), addresses=addresses[receiver], **about
            )
            by_address.update(dict.fromkeys(addresses[receiver], conditions))
        self._shape(by_address)
        if self._refused:
            problems.append(self._refused)
        if self._failed:
            problems.append(self._failed)
        if self._interface.has_netem is False and any(
            link.delay_seconds or link.loss_ratio for link in links.values()
        ):
            problems.append(NO_NETEM)
            if not self._said_no_netem:
                logger.warning("%s", NO_NETEM)
            self._said_no_netem = True
        if waiting := [receiver for receiver in ways if not addresses[receiver]]:
            problems.append(f"no address yet: {', '.join(waiting)}")
        self._tell(links, problems, running=True)
        changes = [way.next_change(now) for way in ways.values()]
        return min((change for change in changes if change is not None), default=None)

    def remove(self) -> None:
        """Takes everything away, also what another process left.

        Raises:
            InvalidInputError: tc refused.
        """
        removed = self._interface.remove()
        self._interface.switch_segmentation_on(self._segmentation)
        self._segmentation, self._in_force, self._failed = set(), None, ""
        logger.info("%s %s", self._interface.name, "is free again" if removed else "was not shaped")
        self._tell({}, [], running=False)

    def _addresses(self, receivers: list[str]) -> dict[str, list[str]]:
        """What names stand for; of two with one address, the one that was confirmed last has it."""
        owners: dict[str, tuple[float, str]] = {}
        for receiver in receivers:
            found = self._found(receiver)
            for address in found.addresses if found else ():
                assert found is not None
                owners[address] = max(owners.get(address, (0.0, "")), (found.at, receiver))
        return {
            receiver: sorted(address for address, (_, owner) in owners.items() if owner == receiver)
            for receiver in receivers
        }

    def _shape(self, by_address: Mapping[str, LinkConditions]) -> None:
        """Changes the kernel if it has to be changed, or was not asked for some time."""
        if by_address == self._in_force and time.monotonic() < self._look_again_at:
            return
        failed = ""
        try:
            lines = self._interface.shape(by_address)
            if by_address:
                self._segmentation.update(self._interface.switch_segmentation_off())
            for line in lines:
                logger.info("tc %s", line)
        except (InvalidInputError, WrongStateError) as error:
            failed = str(error)
            if failed != self._failed:
                logger.warning("%s", failed)
        self._failed = failed
        self._in_force = dict(by_address)
        self._look_again_at = time.monotonic() + (_RETRY_SECONDS if failed else _CHECK_SECONDS)

    def _tell(self, links: dict[str, AppliedLink], problems: list[str], running: bool) -> None:
        """Writes what is in force, if that is news."""
        told = Applied(
            host=self._host,
            interface=self._interface.name,
            running=running,
            digest=self._digest,
            in_force=not self._failed and not self._refused,
            at=self._told.at if self._told else 0.0,
            netem=self._interface.has_netem,
            links=links,
            problems=problems,
            segmentation=sorted(self._segmentation),
        )
        if told == self._told:
            return
        told.at = time.time()
        try:
            write_document(self._status, told.model_dump())
        except OSError as error:  # again at the next look
            if str(error) != self._untold:
                logger.warning("cannot tell what is in force: %s", error)
            self._untold = str(error)
            return
        self._told, self._untold = told, ""


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
