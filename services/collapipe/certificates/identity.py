"""The identity of a process: a role and a name. Its certificate has both in one URI."""

import ipaddress
import re
from dataclasses import dataclass
from enum import Enum

from collapipe.errors import InvalidInputError

_PREFIX = "spiffe://collapipe/"
_RESERVED = ".collapipe.internal"
"""End of the DNS names that stand for roles. No host may have a name with this end."""

_MAX_NAME = 63
_LABEL = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"


class Role(str, Enum):
    """The role of a process, which decides which methods it may call."""

    SCHEDULER = "scheduler"
    EDGE_SERVER = "edge-server"
    CONTROL_UNIT = "control-unit"
    DEVICE_AGENT = "device-agent"
    CLIENT = "client"
    AUTHORITY = "authority"

    @property
    def server_name(self) -> str:
        """A DNS name that only certificates of this role have. Clients check it instead of the host name."""
        return f"{self.value}.role{_RESERVED}"


OF_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
"""Every server certificate has these hosts, because a health check on the same machine calls the server."""

OF_OPERATORS = tuple(role for role in Role if role is not Role.AUTHORITY)
"""The roles for which an operator can issue certificates. An authority issues its own."""


@dataclass(frozen=True)
class Identity:
    """The role and the name of a process or a person.

    Args:
        name: Host id and DNS name: at most 63 lower-case letters, digits, dots and hyphens.

    Raises:
        InvalidInputError: The name is invalid.
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
        """The identity as a subject alternative name of a certificate."""
        return f"{_PREFIX}{self.role.value}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "Identity":
        """Reads "ROLE:NAME", the form in commands. Raises `InvalidInputError` for any other text."""
        role, separator, name = text.partition(":")
        if not separator or role not in {known.value for known in OF_OPERATORS}:
            raise InvalidInputError(
                f"{text!r} is not ROLE:NAME with one of the roles "
                f"{', '.join(known.value for known in OF_OPERATORS)}: for example device-agent:device-0-1"
            )
        return cls(Role(role), name)

    @classmethod
    def from_uris(cls, uris: list[str]) -> "Identity | None":
        """Returns the identity in the URIs of a certificate; `None` unless the only URI is an identity."""
        if len(uris) != 1 or not uris[0].startswith(_PREFIX):
            return None
        role, _, name = uris[0].removeprefix(_PREFIX).partition("/")
        try:
            return cls(Role(role), name)
        except (ValueError, InvalidInputError):
            return None


def is_host_name(text: str) -> bool:
    """Returns whether a host may have this DNS name, which is neither an IP address nor a name of a role."""
    if len(text) > _MAX_NAME or not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", text, re.ASCII):
        return False
    # Some resolvers also read a name such as "127.1" as an IP address.
    looks_numeric = text.rpartition(".")[2].isdigit()
    return not looks_numeric and not f".{text}".endswith(_RESERVED)


def read_host(text: str) -> str:
    """Returns a DNS name or an IP address in the form that certificates use.

    Raises:
        InvalidInputError: The text is neither.
    """
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        pass
    else:
        if "%" not in str(address):  # Other machines do not know the interface that follows "%".
            return str(address)
    host = text.lower().removesuffix(".")
    if not is_host_name(host):
        raise InvalidInputError(
            f"{text!r} is neither a DNS name nor an IP address: give for example pi-3.lan or 192.168.1.23, "
            "without a port"
        )
    return host
