"""Reads the classes of an interface from the output of tc, and makes the commands that change them."""

import ipaddress
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from collapipe.traffic_shaping.tc.disciplines import Discipline, read_discipline

_DEFAULT_KINDS = {"noqueue", "mq", "fq", "fq_codel", "pfifo_fast"}
"""Root disciplines that the kernel itself gives to an interface."""


@dataclass
class ShapedClass:
    """A class. Its address or its discipline is missing if the program that made it was killed."""

    address: str | None = None
    """IP address of the receiver."""
    discipline: Discipline | None = None


@dataclass
class Root:
    """The root discipline of an interface and its classes.

    Args:
        handle: The handle of this program's root. It distinguishes the root from those of other programs.
        is_present: Whether the interface has the root.
        other_kind: Kind of the root of another program; empty if there is none.
        other_handle: Handle of the root of another program; empty if there is none.
        classes: The classes by number.
    """

    interface: str
    handle: str
    is_present: bool = False
    other_kind: str = ""
    other_handle: str = ""
    classes: dict[int, ShapedClass] = field(default_factory=dict)

    def number_of(self, class_id: str) -> int | None:
        """Returns the number of a class, or `None` if the class does not belong to this root."""
        major, _, minor = class_id.partition(":")
        return int(minor, 16) if f"{major}:" == self.handle and minor else None

    @property
    def add_command(self) -> str:
        """The command that adds the root. Packets that belong to no class bypass it."""
        return (
            f"qdisc add dev {self.interface} root handle {self.handle} "
            "htb default 0 direct_qlen 1000"
        )

    @property
    def remove_command(self) -> str:
        """The command that removes the root with all its classes."""
        return f"qdisc del dev {self.interface} root handle {self.handle}"


def read_root(interface: str, handle: str, qdiscs: str) -> Root:
    """Reads the output of `tc -j qdisc show`, which does not contain the addresses."""
    root = Root(interface, handle)
    for qdisc in json.loads(qdiscs or "[]"):
        if qdisc.get("root"):
            root.is_present = qdisc["handle"] == handle
            if not root.is_present and qdisc["kind"] not in _DEFAULT_KINDS:
                root.other_kind, root.other_handle = qdisc["kind"], qdisc["handle"]
        elif (number := root.number_of(qdisc.get("parent", ""))) is not None:
            root.classes[number] = ShapedClass(discipline=read_discipline(qdisc))
    return root


def read_classes(root: Root, classes: str, filters: str) -> None:
    """Adds the output of `tc class show` and `tc filter show` to a root.

    Both outputs are text, because many versions of tc leave fields out of their JSON.
    """
    for class_id in re.findall(rf"^class htb ({root.handle}[0-9a-f]+)", classes, re.MULTILINE):
        root.classes.setdefault(int(class_id.partition(":")[2], 16), ShapedClass())
    for part in filters.split("\nfilter "):
        flow = re.search(rf"flowid ({root.handle}[0-9a-f]+)", part)
        words = re.findall(r"match ([0-9a-f]{8})/ffffffff at \d+", part)
        # An IPv4 address has one word, an IPv6 address has four.
        if flow is None or len(words) not in {1, 4}:
            continue
        number = root.number_of(flow[1])
        if number in root.classes:
            packed = bytes.fromhex("".join(words))
            root.classes[number].address = str(ipaddress.ip_address(packed))


def class_commands(root: Root, desired: Mapping[str, Discipline]) -> list[str]:
    """Returns the fewest commands for `tc -batch` that give a root the desired classes, and updates the root.

    Args:
        desired: The discipline for each address of a receiver.
    """
    lines: list[str] = []
    for number, present in list(root.classes.items()):
        lines += _commands_for_present(root, number, present, desired)
    kept = {present.address for present in root.classes.values()}
    free_numbers = (number for number in itertools.count(1) if number not in root.classes)
    for address in sorted(desired.keys() - kept):
        number = next(free_numbers)
        root.classes[number] = ShapedClass(address, desired[address])
        lines += _commands_for_new(root, number, address, desired[address])
    return lines


def _commands_for_present(
    root: Root, number: int, present: ShapedClass, desired: Mapping[str, Discipline]
) -> Iterator[str]:
    """Removes an incomplete, undesired or duplicate class, or changes the discipline of a class."""
    device, class_id = f"dev {root.interface}", f"{root.handle}{number:x}"
    first = next(n for n, other in root.classes.items() if other.address == present.address)
    wanted = desired.get(present.address) if present.address is not None else None
    if wanted is None or present.discipline is None or first != number:
        if present.address is not None:
            yield f"filter del {device} parent {root.handle} prio {number}"
        yield f"class del {device} parent {root.handle} classid {class_id}"
        del root.classes[number]
        return
    former, present.discipline = present.discipline, wanted
    if wanted.matches(former):
        return
    if not wanted.can_replace(former):
        yield f"qdisc del {device} parent {class_id}"
        yield f"qdisc add {device} parent {class_id} {wanted.leaf_arguments}"
    elif wanted.leaf_arguments:  # The packets in the queue stay there.
        yield f"qdisc change {device} parent {class_id} {wanted.leaf_arguments}"
    else:
        yield (
            f"class change {device} parent {root.handle} classid {class_id} "
            f"{wanted.class_arguments}"
        )


def _commands_for_new(root: Root, number: int, address: str, wanted: Discipline) -> Iterator[str]:
    device, class_id = f"dev {root.interface}", f"{root.handle}{number:x}"
    yield f"class add {device} parent {root.handle} classid {class_id} {wanted.class_arguments}"
    if wanted.leaf_arguments:
        yield f"qdisc add {device} parent {class_id} {wanted.leaf_arguments}"
    version = ipaddress.ip_address(address).version
    protocol, match = ("ip", "ip") if version == 4 else ("ipv6", "ip6")
    yield (
        f"filter add {device} parent {root.handle} protocol {protocol} prio {number} "
        f"u32 match {match} dst {address} flowid {class_id}"
    )
