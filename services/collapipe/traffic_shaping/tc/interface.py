"""A network interface of this host, read and changed by running tc."""

import socket
from collections.abc import Mapping, Sequence

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.run_command import run_command
from collapipe.traffic_shaping.tc.classes import Root, class_commands, read_classes, read_root
from collapipe.traffic_shaping.tc.disciplines import Discipline

SERVICE_HANDLE = "c011:"
"""The handle of a service that shapes its own links (`TrafficControlShaper`)."""
SHAPER_PROCESS_HANDLE = "c01e:"
"""The handle of the shaper process."""

_OWNERS = {
    SERVICE_HANDLE: "a service of this host (--shaper tc)",
    SHAPER_PROCESS_HANDLE: "a shaper process (python -m collapipe.traffic_shaping)",
}
_REMEDY = (
    "tc (iproute2) needs the interface to exist, CAP_NET_ADMIN, and a kernel with sch_htb, cls_u32 and, for delay "
    "and loss, sch_netem; services also work without tc, with --shaper pacing"
)


class Interface:
    """Shapes the packets that leave by one interface.

    Args:
        handle: `SERVICE_HANDLE` or `SHAPER_PROCESS_HANDLE`.
        tc: The program tc and its first arguments.
    """

    def __init__(self, name: str, handle: str, tc: Sequence[str] = ("tc",)) -> None:
        self.name = name
        self._handle = handle
        self._tc = list(tc)

    @property
    def index(self) -> int:
        """Its number in the kernel; 0 if there is no such interface."""
        try:
            return socket.if_nametoindex(self.name)
        except OSError:
            return 0

    def read(self) -> Root:
        """Returns the root and the classes of the interface; raises `InvalidInputError` if tc fails."""
        device = ("dev", self.name)
        root = read_root(self.name, self._handle, self._run("-j", "qdisc", "show", *device))
        if root.is_present:
            of_root = (*device, "parent", self._handle)
            classes = self._run("class", "show", *of_root)
            read_classes(root, classes, self._run("filter", "show", *of_root))
        return root

    def change(self, root: Root, desired: Mapping[str, Discipline]) -> list[str]:
        """Gives the interface the desired classes, and the root if it is missing. Returns the commands.

        Args:
            root: The result of `read`, or the root of the previous change. It is updated.
            desired: The discipline for each address of a receiver.

        Raises:
            InvalidInputError: Another program shapes the interface, or tc failed. `root` is then undefined.
        """
        if root.other_kind:
            owner = _OWNERS.get(root.other_handle, f"another program ({root.other_kind})")
            raise InvalidInputError(
                f"{self.name} is already shaped by {owner}, and an interface has only one root discipline: start the "
                f"services with --shaper pacing, and remove other shaping with `tc qdisc del dev {self.name} root`"
            )
        lines = [] if root.is_present else [root.add_command]
        lines += class_commands(root, desired)
        self._run_batch(lines)
        root.is_present = True
        return lines

    def remove(self) -> list[str]:
        """Removes the root if it is there, also that of a killed process. Returns the commands.

        Raises:
            InvalidInputError: tc failed.
        """
        root = self.read()
        lines = [root.remove_command] if root.is_present else []
        self._run_batch(lines)
        return lines

    def _run_batch(self, lines: Sequence[str]) -> None:
        # One process runs all commands, because a process starts slowly on a small device.
        if lines:
            self._run("-batch", "-", standard_input="\n".join(lines) + "\n")

    def _run(self, *arguments: str, standard_input: str | None = None) -> str:
        return run_command([*self._tc, *arguments], _REMEDY, standard_input)
