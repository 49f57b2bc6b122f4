"""Gives the links of a host their conditions: with netem, or with tbf in a kernel without netem."""

from collections.abc import Mapping

from collapipe.emulation.network_profiles import LinkConditions
from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.tc.disciplines import (
    Discipline,
    Netem,
    TokenBucket,
    discipline_for,
)
from collapipe.traffic_shaping.tc.interface import Interface

_UNKNOWN_KIND = "qdisc kind is unknown"


class LinkEmulator:
    """Emulates links on one interface, which must have the handle of the shaper process."""

    def __init__(self, interface: Interface) -> None:
        self.interface = interface
        self.has_netem: bool | None = None
        """Whether the kernel has netem. `None` until the first change."""

    def emulate(self, by_address: Mapping[str, LinkConditions]) -> list[str]:
        """Gives links their conditions, by address of the receiver. Returns the commands that tc ran.

        Raises:
            InvalidInputError: Another program shapes the interface, or tc failed.
        """
        root = self.interface.read()
        if any(isinstance(known.discipline, TokenBucket) for known in root.classes.values()):
            self.has_netem = False  # An earlier process found no netem.
        desired: dict[str, Discipline] = {}
        for address, conditions in by_address.items():
            discipline = discipline_for(conditions, self.has_netem is not False)
            if discipline is not None:
                desired[address] = discipline
        if not desired:
            return self.interface.remove()
        try:
            lines = self.interface.change(root, desired)
        except InvalidInputError as error:
            if self.has_netem is False or _UNKNOWN_KIND not in str(error):
                raise
            self.has_netem = False
            return self.emulate(by_address)
        if any(isinstance(discipline, Netem) for discipline in desired.values()):
            self.has_netem = True
        return lines
