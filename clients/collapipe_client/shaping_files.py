"""The files that say what the links of a running testbed are like, and what became of a change of them."""

import fcntl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from collapipe.emulation.world import EmulatedLink, EmulationFile
from collapipe.errors import CorruptDataError, InvalidInputError
from collapipe.traffic_shaping.netem.profiles import Direction
from collapipe.traffic_shaping.netem.shaping import (
    ANY,
    LinkKey,
    LinkShape,
    Shaping,
    digest,
    read_shaping,
)
from collapipe.traffic_shaping.netem.status import (
    Applied,
    AppliedLink,
    applied_folder,
    read_applied,
)
from collapipe_client.workspace import replace_text

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Report:
    """What became of a change.

    Args:
        file: Which was changed.
        applied: By sender and receiver: what is in force now.
        problems: By sender: what is not as the file says; "" for what concerns all.
        waiting: Senders whose shaper ran once, and did not confirm the change in time.
        asleep: Senders without a shaper yet: they follow the file when they come up.
    """

    file: Path
    applied: Mapping[str, Mapping[str, AppliedLink]] = field(default_factory=dict)
    problems: Mapping[str, list[str]] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    asleep: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether a sender that is up did not do what it should."""
        return bool(self.waiting)


class Network(Protocol):
    """The network of one testbed."""

    def links(self) -> Mapping[str, LinkShape]:
        """What its file says."""

    def change(self, shapes: Mapping[str, LinkShape | None], wait_seconds: float) -> Report:
        """Changes some links; `None` removes one.

        Args:
            shapes: By key, as in `links`.
            wait_seconds: Bounds the wait for whoever has to do it.

        Raises:
            InvalidInputError: A host is not known, or the file cannot be used.
        """


class ShapedNetwork:
    """A testbed whose hosts have shapers that follow links.json.

    Args:
        state: links.json; need not exist yet.
    """

    def __init__(self, state: Path) -> None:
        self._state = state

    def links(self) -> Mapping[str, LinkShape]:
        return read_shaping(self._state).shaping.links

    def change(self, shapes: Mapping[str, LinkShape | None], wait_seconds: float) -> Report:
        if not self._state.parent.is_dir():
            raise InvalidInputError(
                f"--state {self._state}: there is no such folder: give the links.json of the folder that the shapers "
                "have as /shaping"
            )
        folder = applied_folder(self._state)
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o1777)  # shapers are root without the right to write into others' folders
        with locked(self._state):
            shaping = read_shaping(self._state).shaping
            check_known(shapes, shaping.all_hosts)
            links = {**shaping.links, **shapes}
            kept = {key: shape for key, shape in links.items() if shape is not None}
            changed = Shaping(hosts=shaping.hosts, links=kept)
            text = changed.model_dump_json(indent=1, exclude_defaults=True) + "\n"
            replace_text(self._state, text)
            self._state.chmod(0o644)
        senders = sorted(
            {host for key in shapes for host in _senders(LinkKey.parse(key), shaping.all_hosts)}
        )
        wanted = digest(text.encode())
        told = self._wait(senders, wanted, wait_seconds)
        awake = {sender: applied for sender, applied in told.items() if applied is not None}
        done = {
            sender: {to: link for to, link in applied.links.items() if _meant(shapes, sender, to)}
            for sender, applied in awake.items()
            if applied.digest == wanted and applied.in_force
        }
        return Report(
            self._state,
            done,
            {sender: applied.problems for sender, applied in awake.items() if applied.problems},
            tuple(sender for sender in awake if sender not in done),
            tuple(sender for sender in told if sender not in awake),
        )

    def _wait(
        self, senders: list[str], wanted: str, wait_seconds: float
    ) -> dict[str, Applied | None]:
        deadline = time.monotonic() + wait_seconds
        while True:
            told = {sender: self._told(sender) for sender in senders}
            late = [a for a in told.values() if a is not None and a.digest != wanted]
            if not late or time.monotonic() > deadline:
                return told
            time.sleep(_POLL_SECONDS)

    def _told(self, sender: str) -> Applied | None:
        try:
            applied = read_applied(applied_folder(self._state) / f"{sender}.json")
        except CorruptDataError:  # of another version: it is written anew
            return None
        return applied if applied is not None and applied.running else None


class EmulatedNetwork:
    """A local testbed whose hosts follow emulation.json, which has rates and delays.

    Args:
        file: emulation.json.
        hosts: Of the testbed.
    """

    def __init__(self, file: Path, hosts: Sequence[str]) -> None:
        self._file = file
        self._hosts = hosts

    def links(self) -> Mapping[str, LinkShape]:
        links = EmulationFile(self._file).current().links
        return {key: LinkShape.model_validate(link.model_dump()) for key, link in links.items()}

    def change(self, shapes: Mapping[str, LinkShape | None], wait_seconds: float) -> Report:
        problems: list[str] = []
        made: dict[str, EmulatedLink | None] = {}
        for key, shape in shapes.items():
            if shape is not None and shape.trace is not None:
                raise InvalidInputError(
                    "a local testbed plays no traces: shape its links step by step, or use the testbed of containers"
                )
            conditions = None if shape is None else shape.conditions(0.0)
            if conditions is not None and (conditions.jitter_seconds or conditions.loss_ratio):
                problems.append(
                    f"{key}: jitter and loss are not emulated: a local testbed has rates and delays"
                )
            made[key] = None
            if conditions is not None:
                rate, delay = conditions.rate_bps, conditions.delay_seconds
                made[key] = EmulatedLink(rate_bps=rate, delay_seconds=delay)
        with locked(self._file):
            world = EmulationFile(self._file).current()
            check_known(shapes, self._hosts)
            links = {**world.links, **made}
            changed = world.model_copy(
                update={"links": {key: link for key, link in links.items() if link is not None}}
            )
            replace_text(self._file, changed.model_dump_json(indent=1, exclude_none=True))
        return Report(self._file, problems={"": problems} if problems else {})


def check_known(keys: Iterable[str], hosts: Sequence[str]) -> None:
    """Refuses links of hosts that the testbed does not have; raises `InvalidInputError`."""
    named = {host for key in keys for host in LinkKey.parse(key).hosts}
    if unknown := sorted(named - set(hosts)):
        raise InvalidInputError(
            f"the testbed has no {', '.join(unknown)}: it has {', '.join(hosts) or 'no hosts'}"
        )


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Makes this the only command that changes a file; another one waits."""
    with open(file.with_name(f"{file.name}.lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _meant(keys: Iterable[str], sender: str, receiver: str) -> bool:
    return any(
        key.sender in (sender, ANY) and key.receiver in (receiver, ANY)
        for key in map(LinkKey.parse, keys)
    )


def _senders(key: LinkKey, hosts: Sequence[str]) -> set[str]:
    return {key.sender} if key.sender != ANY else set(hosts) - {key.receiver}


def links_named(link: str, both: bool) -> dict[str, Direction]:
    """The keys that a user means by a link, with the direction of each.

    Args:
        link: A host, for both directions of all of its links; or a key.
        both: The reverse of the key too.

    Raises:
        InvalidInputError: It is neither.
    """
    if ">" not in link and link != ANY:
        return {f"{link}>*": "up", f"*>{link}": "down"}
    key = LinkKey.parse(link)
    # towards a host from anywhere is down, as seen from it
    direction: Direction = "down" if key.sender == ANY != key.receiver else "up"
    named: dict[str, Direction] = {str(key): direction}
    if both and str(key.reverse) != str(key):
        named[str(key.reverse)] = "up" if direction == "down" else "down"
    return named
