"""Checks what a host says of itself when it registers."""

import math

import grpc

from collapipe.certificates import Role
from collapipe.certificates.identity import IN_A_CLUSTER, MAX_CLUSTER
from collapipe.errors import InvalidInputError
from collapipe.printable import printable
from collapipe.rpc import check_is_caller
from collapipe.scheduler.host_registry import ROLE_NAMES
from collapipe.v1 import scheduler_pb2

_MOST_CHARACTERS = 256
_LARGEST = {
    "cluster_index": MAX_CLUSTER,
    "memory_bytes": 1 << 50,
    "speed": 1e6,
    "energy_budget_joules": 1e12,
    "busy_watts": 1e5,
    "idle_watts": 1e5,
    "max_transmit_watts": 1e4,
}
"""Larger values are mistakes, or lies that would draw all work to the host."""


def check_claims(host: scheduler_pb2.Host, context: grpc.ServicerContext) -> None:
    """Refuses a host that claims to be what its certificate does not say, or what no host can be.

    Raises:
        InvalidInputError: A value is missing, or outside of its limits.
        NotPermittedError: The name, the role or the cluster is not in its certificate.
    """
    texts = host.host_id, host.address, host.incarnation
    needed = ("a host id", "an address", "an incarnation", "a role")
    given = (*texts, host.role)
    if missing := [name for name, value in zip(needed, given, strict=True) if not value]:
        raise InvalidInputError(
            f"host {host.host_id!r} at {host.address!r} registers without {', '.join(missing)}: a host needs {', '.join(needed)}"
        )
    if any(len(text) > _MOST_CHARACTERS for text in (*texts, host.metrics_address)):
        raise InvalidInputError(
            f"a host registers with a name or an address of more than {_MOST_CHARACTERS} characters: shorten it"
        )
    if wrong := next(
        (text for text in (*texts, host.metrics_address) if text != printable(text)), ""
    ):
        raise InvalidInputError(
            f"a host registers with a name or an address that contains control characters, {wrong!r}: correct --host-id, "
            "--advertise or --metrics-listen"
        )
    if host.role not in ROLE_NAMES:
        raise InvalidInputError(
            f"host {host.host_id} has role {host.role}, which this scheduler does not know: run the same version of "
            "CollaPipe on all machines"
        )
    for address in filter(None, (host.address, host.metrics_address)):
        port = address.rpartition(":")[2]
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise InvalidInputError(
                f"host {host.host_id} registers with the address {address}, which has no port from 1 to 65535: correct "
                "--advertise or --metrics-listen"
            )
    for name, largest in _LARGEST.items():
        value = getattr(host, name)
        if not (math.isfinite(value) and 0 <= value <= largest):
            raise InvalidInputError(
                f"host {host.host_id} registers with {name} {value:g}: it must be from 0 to {largest:g}; correct --"
                f"{name.replace('_', '-')}"
            )
    role = Role[ROLE_NAMES[host.role]]
    cluster = host.cluster_index if role in IN_A_CLUSTER else None
    check_is_caller(context, host.host_id, role, cluster)
