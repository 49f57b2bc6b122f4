"""What a certificate says about its holder: a role and a name, as one URI."""

import ipaddress
import re
from dataclasses import dataclass
from enum import Enum

from collapipe.errors import InvalidInputError

_PREFIX = "spiffe://collapipe/"
_RESERVED = ".collapipe.internal"
"""Ends the names that stand for roles; nobody may have a name or an address that ends so."""

_MAX_NAME = 63
_LABEL = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"


class Role(str, Enum):
    """What a process is, which decides what it may call."""

    SCHEDULER = "scheduler"
    EDGE_SERVER = "edge-server"
    CONTROL_UNIT = "control-unit"
    DEVICE_AGENT = "device-agent"
    CLIENT = "client"
    AUTHORITY = "authority"

    @property
    def server_name(self) -> str:
        """A DNS name that only certificates of this role have: what a caller checks who knows no host, but a role."""
        return f"{self.value}.role{_RESERVED}"


OF_OPERATORS = tuple(role for role in Role if role is not Role.AUTHORITY)
"""The roles that one can ask certificates for; the authority makes its own."""


@dataclass(frozen=True)
class Identity:
    """Who somebody is.

    Args:
        role: What it is.
        name: Its host id, which is also its DNS name: at most 63 lower-case letters, digits, dots and hyphens.

    Raises:
        InvalidInputError: The name is none.
    """

    role: Role
    name: str

    def __post_init__(self) -> None:
        if not is_host_name(self.name) or self.name == "localhost":
            raise InvalidInputError(
                f"{self.name!r} cannot be a host's name: it needs at most {_MAX_NAME} lower-case letters, digits, "
                "dots and hyphens, as in a DNS name, for example device-0-1"
            )

    def __str__(self) -> str:
        return f"{self.role.value}:{self.name}"

    @property
    def uri(self) -> str:
        """The subject alternative name that says it."""
        return f"{_PREFIX}{self.role.value}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "Identity":
        """Reads "ROLE:NAME", as operators write it; raises `InvalidInputError`."""
        role, separator, name = text.partition(":")
        if not separator or role not in {known.value for known in OF_OPERATORS}:
            raise InvalidInputError(
                f"{text!r} is not ROLE:NAME with one of the roles "
                f"{', '.join(known.value for known in OF_OPERATORS)}: for example device-agent:device-0-1"
            )
        return cls(Role(role), name)

    @classmethod
    def from_uris(cls, uris: list[str]) -> "Identity | None":
        """Reads the URIs of a certificate; `None` where they are not exactly one identity."""
        if len(uris) != 1 or not uris[0].startswith(_PREFIX):
            return None
        role, _, name = uris[0].removeprefix(_PREFIX).partition("/")
        try:
            return cls(Role(role), name)
        except (ValueError, InvalidInputError):
            return None


def is_host_name(text: str) -> bool:
    """Whether a text is a DNS name that a host may have: no address, and none of the names that stand for roles."""
    if len(text) > _MAX_NAME or not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", text, re.ASCII):
        return False
    # an address, or what some resolvers take for one ("127.1")
    looks_numeric = text.rpartition(".")[2].isdigit()
    return not looks_numeric and not f".{text}".endswith(_RESERVED)


def read_host(text: str) -> str:
    """Reads a DNS name or an IP address, and returns the form that certificates have.

    Raises:
        InvalidInputError: It is neither.
    """
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        pass
    else:
        if "%" not in str(address):  # the name of an interface means nothing elsewhere
            return str(address)
    host = text.lower().removesuffix(".")
    if not is_host_name(host):
        raise InvalidInputError(
            f"{text!r} is neither a DNS name nor an IP address: give for example pi-3.lan or 192.168.1.23, "
            "without a port"
        )
    return host
