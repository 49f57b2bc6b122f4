"""The identity of a process: a role, a name and, for some roles, a cluster. Its certificate has all of them in one URI."""

import ipaddress
import re
from dataclasses import dataclass
from enum import Enum

from collapipe.errors import InvalidInputError

_PREFIX = "spiffe://collapipe/"
_RESERVED = ".collapipe.internal"
"""End of the DNS names that stand for roles. No host may have a name with this end."""

_CLUSTER = "/cluster/"
_MAX_NAME = 63
MAX_CLUSTER = 1_000_000
"""The largest index of a cluster of hosts."""

_LABEL = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"


class Role(str, Enum):
    """The role of a process, which decides which methods it may call."""

    SCHEDULER = "scheduler"
    EDGE_SERVER = "edge-server"
    CONTROL_UNIT = "control-unit"
    DEVICE_AGENT = "device-agent"
    CLIENT = "client"
    ADMIN = "admin"
    """A client that may do everything with the jobs of others."""
    PROMETHEUS = "prometheus"
    """A Prometheus server, which reads the metrics of all services."""
    AUTHORITY = "authority"

    @property
    def server_name(self) -> str:
        """A DNS name that only certificates of this role have. Clients check it instead of the host name."""
        return f"{self.value}.role{_RESERVED}"


OF_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
"""Every server certificate has these hosts, because a health check on the same machine calls the server."""

IN_A_CLUSTER = frozenset({Role.CONTROL_UNIT, Role.DEVICE_AGENT})
"""The roles whose certificates name a cluster. Their processes may register in no other one."""

PEOPLE = frozenset({Role.CLIENT, Role.ADMIN})
"""The roles that run no service. Their certificates have no hosts."""

OF_OPERATORS = tuple(role for role in Role if role is not Role.AUTHORITY)
"""The roles for which an operator can issue certificates. An authority issues its own."""


@dataclass(frozen=True)
class Identity:
    """The role and the name of a process or a person.

    Args:
        name: Host id and DNS name: at most 63 lower-case letters, digits, dots and hyphens.
        cluster: Index of the cluster of hosts, from 0. Roles outside of `IN_A_CLUSTER` have 0.

    Raises:
        InvalidInputError: The name or the cluster is invalid.
    """

    role: Role
    name: str
    cluster: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cluster <= (MAX_CLUSTER if self.role in IN_A_CLUSTER else 0):
            raise InvalidInputError(
                f"{self.role.value}:{self.name} cannot be in cluster {self.cluster}: control units and device agents are in one "
                f"cluster from 0 to {MAX_CLUSTER}, and other roles in none"
            )
        if not is_host_name(self.name) or self.name == "localhost":
            raise InvalidInputError(
                f"{self.name!r} cannot be a host's name: it needs at most {_MAX_NAME} lower-case letters, digits, "
                "dots and hyphens, as in a DNS name, for example device-0-1"
            )

    def __str__(self) -> str:
        return f"{self.role.value}:{self.name}" + f"@{self.cluster}" * bool(self.cluster)

    @property
    def uri(self) -> str:
        """The identity as a subject alternative name of a certificate."""
        cluster = f"{_CLUSTER}{self.cluster}" if self.role in IN_A_CLUSTER else ""
        return f"{_PREFIX}{self.role.value}/{self.name}{cluster}"

    def is_same_holder(self, other: "Identity") -> bool:
        """Returns whether both are the same host. It may have been moved to another cluster."""
        return (self.role, self.name) == (other.role, other.name)

    @classmethod
    def parse(cls, text: str) -> "Identity":
        """Reads "ROLE:NAME" or "ROLE:NAME@CLUSTER", the forms in commands. Without a cluster, it is cluster 0.

        Raises:
            InvalidInputError: The text has another form.
        """
        role, separator, holder = text.partition(":")
        name, at, cluster = holder.partition("@")
        if not separator or role not in {known.value for known in OF_OPERATORS}:
            raise InvalidInputError(
                f"{text!r} is not ROLE:NAME or ROLE:NAME@CLUSTER with one of the roles "
                f"{', '.join(known.value for known in OF_OPERATORS)}: for example device-agent:device-0-1@0"
            )
        if at and not _is_index(cluster):
            raise InvalidInputError(
                f"{text!r} names no cluster after the @: give a number from 0 to {MAX_CLUSTER}, for example {role}:{name}@1"
            )
        return cls(Role(role), name, int(cluster or 0))

    @classmethod
    def from_uris(cls, uris: list[str]) -> "Identity | None":
        """Returns the identity in the URIs of a certificate; `None` unless the only URI is an identity."""
        if len(uris) != 1 or not uris[0].startswith(_PREFIX):
            return None
        role, _, holder = uris[0].removeprefix(_PREFIX).partition("/")
        name, in_cluster, cluster = holder.partition(_CLUSTER)
        try:
            identity = cls(Role(role), name, int(cluster) if in_cluster else 0)
        except (ValueError, InvalidInputError):
            return None
        # A role in a cluster needs one, and a cluster has one spelling.
        return identity if identity.uri == uris[0] else None


def _is_index(text: str) -> bool:
    return re.fullmatch(r"\d{1,7}", text, re.ASCII) is not None


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
