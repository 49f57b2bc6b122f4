"""One network interface of this host: what it shapes, read and changed by tc."""

import array
import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence

from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.traffic_shaping.commands import run_command
from collapipe.traffic_shaping.netem.disciplines import (
    HANDLE,
    Discipline,
    Present,
    TokenBucket,
    add_classes,
    commands,
    discipline_for,
    read_root,
    remove_command,
)
from collapipe.traffic_shaping.netem.profiles import LinkConditions
from collapipe.traffic_shaping.traffic_control import HANDLE as AGENT_HANDLE

_NEEDS = (
    "tc (iproute2) needs the interface to exist, CAP_NET_ADMIN, and a kernel with sch_htb, cls_u32 and, for delay "
    "and loss, sch_netem"
)
_UNKNOWN_KIND = "qdisc kind is unknown"
_SIOCETHTOOL = 0x8946
_SEGMENTATION = {"tso": (0x1E, 0x1F), "gso": (0x23, 0x24)}
"""Commands of ethtool that read and set an offload."""


class _NoNetemError(InvalidInputError):
    """The kernel has no netem."""


class Interface:
    """Shapes what leaves by one interface.

    Args:
        name: Of the interface.
        tc: How to run tc.
    """

    def __init__(self, name: str, tc: Sequence[str] = ("tc",)) -> None:
        self.name = name
        self._tc = list(tc)
        self.has_netem: bool | None = None
        """Whether the kernel has netem, found by trying; `None` before."""

    @property
    def exists(self) -> bool:
        """Whether there is such an interface."""
        try:
            return socket.if_nametoindex(self.name) > 0
        except OSError:
            return False

    def read(self) -> Present:
        """What it has.

        Raises:
            InvalidInputError: tc refused.
        """
        device = ("dev", self.name)
        present = read_root(self._run("-j", "qdisc", "show", *device))
        if present.ours:
            classes = self._run("class", "show", *device, "parent", HANDLE)
            add_classes(present, classes, self._run("filter", "show", *device, "parent", HANDLE))
        return present

    def shape(self, by_address: Mapping[str, LinkConditions]) -> list[str]:
        """Makes links be like that, by address of the receiver; returns the commands that took.

        Raises:
            InvalidInputError: tc refused.
            WrongStateError: Somebody else shapes the interface.
        """
        present = self.read()
        if self.has_netem is None:
            # what a process like this one put there instead of netem
            found = {
                known.discipline.kind for known in present.classes.values() if known.discipline
            }
            self.has_netem = False if TokenBucket.kind in found else None
        desired = self._disciplines(by_address)
        if desired:
            self._check_free(present)
        try:
            lines = self._change(present, desired)
        except _NoNetemError:
            self.has_netem = False
            return self._change(self.read(), self._disciplines(by_address))
        if any(" netem " in line for line in lines):
            self.has_netem = True
        return lines

    def remove(self) -> bool:
        """Removes all that `shape` made, also that of another process; returns whether there was something.

        Raises:
            InvalidInputError: tc refused.
        """
        if not self.read().ours:
            return False
        self._batch([remove_command(self.name)])
        return True

    def switch_segmentation_off(self) -> list[str]:
        """Makes packets leave one by one; returns the offloads that were on.

        netem would drop and count up to 64 KiB of a connection as one packet. Connections that exist keep theirs.
        """
        were_on = []
        for name, (get, put) in _SEGMENTATION.items():
            with contextlib.suppress(OSError):  # an interface that has none
                if self._ethtool(get):
                    self._ethtool(put, 0)
                    were_on.append(name)
        return were_on

    def switch_segmentation_on(self, names: Iterable[str]) -> None:
        """Puts back what `switch_segmentation_off` returned."""
        for name in names:
            with contextlib.suppress(OSError, KeyError):
                self._ethtool(_SEGMENTATION[name][1], 1)

    def _check_free(self, present: Present) -> None:
        if not present.foreign:
            return
        if present.foreign.endswith(AGENT_HANDLE):
            raise WrongStateError(
                f"{self.name} is shaped by the agent of this host itself (--shaper tc): start it with --shaper pacing, "
                "for one interface has one root"
            )
        raise WrongStateError(
            f"{self.name} is shaped by somebody else ({present.foreign}): remove that with "
            f"`tc qdisc del dev {self.name} root`"
        )

    def _disciplines(self, by_address: Mapping[str, LinkConditions]) -> dict[str, Discipline]:
        made = {
            address: discipline_for(conditions, self.has_netem is not False)
            for address, conditions in by_address.items()
        }
        return {address: what for address, what in made.items() if what is not None}

    def _change(self, present: Present, desired: Mapping[str, Discipline]) -> list[str]:
        lines = commands(self.name, present, desired)
        self._batch(lines)
        return lines

    def _batch(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        try:
            # one process for all: on a small device a process costs more than what it does here
            self._run("-batch", "-", given="\n".join(lines) + "\n")
        except InvalidInputError as error:
            if _UNKNOWN_KIND in str(error) and any(" netem " in line for line in lines):
                raise _NoNetemError(str(error)) from None
            raise

    def _run(self, *arguments: str, given: str | None = None) -> str:
        return run_command([*self._tc, *arguments], _NEEDS, given)

    def _ethtool(self, command: int, value: int = 0) -> int:
        answer = array.array("I", [command, value])
        request = struct.pack("16sP16x", self.name.encode(), answer.buffer_info()[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control.fileno(), _SIOCETHTOOL, request)
        return answer[1]
