"""The roles that may call each method, and the checks of callers' certificates."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from collapipe.certificates.identity import (
    IN_A_CLUSTER,
    OF_THIS_MACHINE,
    PEOPLE,
    Identity,
    Role,
    read_host,
)
from collapipe.certificates.revoked_keys import RevokedKeyList
from collapipe.errors import NotPermittedError, OtherVersionError
from collapipe.protocol import why_not_understood
from collapipe.rpc.options import PROTOCOL_AGENT
from collapipe.v1.enrollment_pb2 import ProtocolVersions

ANYBODY = frozenset(Role)
"""Includes callers without a certificate, if the server asks for none. The method itself checks them."""

_FROM_THIS_MACHINE = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")
"""Beginnings of gRPC's names of peers on the same machine."""

_VERSIONS = re.compile(PROTOCOL_AGENT + r"/(\d{1,9})-(\d{1,9})(?!\d)", re.ASCII)

_STAGE_HOSTS = frozenset({Role.CONTROL_UNIT, Role.DEVICE_AGENT, Role.EDGE_SERVER})
_SCHEDULER = frozenset({Role.SCHEDULER})

Permissions = Mapping[str, Mapping[str, frozenset[Role]]]

PERMISSIONS: Permissions = {
    "collapipe.v1.BlobService": {"FetchBlob": _STAGE_HOSTS},
    "collapipe.v1.ControlUnitService": {
        "PrepareData": _SCHEDULER,
        "RunRound": _SCHEDULER,
        "EndTraining": _SCHEDULER,
        "MakeMaskingKeys": _SCHEDULER,
        "ShareMasks": _SCHEDULER,
        "RevealMasks": _SCHEDULER,
        "RunModel": _SCHEDULER,
    },
    "collapipe.v1.ProfileService": {"ProfileBlock": _SCHEDULER},
    "collapipe.v1.EdgeServerService": {
        "PrepareJob": _SCHEDULER,
        "PushUnit": frozenset({Role.CONTROL_UNIT, Role.DEVICE_AGENT}),
        "CommitRound": _SCHEDULER,
        "RollBack": _SCHEDULER,
        "ExportModel": PEOPLE,
    },
    "collapipe.v1.EnrollmentService": {"Enroll": ANYBODY, "Renew": ANYBODY},
    "collapipe.v1.LinkService": {"MeasureLink": _SCHEDULER, "ReceiveProbe": _STAGE_HOSTS},
    "collapipe.v1.SchedulerService": {
        "RegisterHost": _STAGE_HOSTS,
        "Heartbeat": _STAGE_HOSTS,
        # `collapipe doctor` on a stage host asks for the addresses of its peers.
        "ListHosts": PEOPLE | _STAGE_HOSTS,
        "SubmitJob": PEOPLE,
        "CheckResume": PEOPLE,
        "WatchJob": PEOPLE,
        "GetJobSnapshot": PEOPLE,
        "ListJobs": PEOPLE,
        "CancelJob": PEOPLE,
        "RollBackJob": PEOPLE,
        "DeleteJob": PEOPLE,
        "GetPlans": PEOPLE,
        "ExplainDecision": PEOPLE,
        "ReplayDecision": PEOPLE,
        "GetRecords": PEOPLE,
        "DumpJob": PEOPLE,
        "GetTrace": PEOPLE,
        "UseModel": PEOPLE,
    },
    "collapipe.v1.StageService": {
        "RunStage": frozenset({Role.CONTROL_UNIT}),
        # The previous stage calls this, and the stage with the head is never a previous stage.
        "ExchangeActivations": frozenset({Role.CONTROL_UNIT, Role.DEVICE_AGENT}),
    },
    "collapipe.v1.StorageService": {"DumpRows": _SCHEDULER},
    "collapipe.v1.TelemetryService": {"GetMetrics": _SCHEDULER},
    # Clients get the spans of all hosts from the scheduler, so that they need to reach no other host.
    "collapipe.v1.TraceService": {"ReadClock": _SCHEDULER, "GetSpans": _SCHEDULER},
}
"""The roles that may call each method of each service. A new RPC needs a line here and nothing else.

Nobody may call a method that is missing here. A test compares this table with the protocol.
"""

METRICS_READERS = frozenset({Role.PROMETHEUS, Role.ADMIN})
"""The roles that may read the page of metrics of a service."""


def check_permitted(method: str, context: grpc.ServicerContext, permissions: Permissions) -> None:
    """Refuses a call of "/service/method" that the caller's role may not make. The server must speak TLS.

    Raises:
        NotPermittedError: The caller has another role, or its certificate has no role.
    """
    _, service, name = method.split("/", 2)
    allowed = permissions.get(service, {}).get(name, frozenset())
    if allowed == ANYBODY:
        return
    caller = _identity(context)
    if caller.role not in allowed:
        may = ", ".join(sorted(role.value for role in allowed)) or "nobody"
        raise NotPermittedError(
            f"{caller} may not call {service}/{name}: by their certificates, {may} may. Call as one of them, with a "
            "certificate of `collapipe certs`"
        )


def check_protocol(context: grpc.ServicerContext, caller: str, service: str) -> ProtocolVersions:
    """Returns the versions of the protocol that a call tells. Raises `OtherVersionError` if this process understands none of them."""
    agents = (value for key, value in context.invocation_metadata() if key == "user-agent")
    found = _VERSIONS.search(str(next(agents, "")))
    theirs = (
        ProtocolVersions(oldest=int(found[1]), newest=int(found[2]))
        if found
        else ProtocolVersions()
    )
    if why := why_not_understood(caller, theirs, service):
        raise OtherVersionError(why)
    return theirs


def check_not_revoked(context: grpc.ServicerContext, revoked: RevokedKeyList) -> None:
    """Refuses a caller with a revoked key or issuing authority; raises `NotPermittedError`. The server must speak TLS."""
    for certificate in _properties(context, "x509_pem_cert"):
        others = "".join(_properties(context, "x509_pem_cert_chain"))
        # The certificate itself is not among the others on a server, as the TLS library of gRPC has it.
        revoked.check((certificate + others.removeprefix(certificate)).encode())


def check_reads_metrics(uris: list[str]) -> None:
    """Refuses a reader of the page of metrics, given the URIs in its certificate.

    Raises:
        NotPermittedError: The reader has another role, or its certificate has no role.
    """
    reader = _identity_in(uris)
    if reader.role not in METRICS_READERS:
        may = ", ".join(sorted(role.value for role in METRICS_READERS))
        raise NotPermittedError(
            f"{reader} may not read metrics, but the roles {may} may: make a certificate with `collapipe certs issue DIR "
            f"{Role.PROMETHEUS.value}:NAME`"
        )


def check_is_caller(
    context: grpc.ServicerContext, name: str, role: Role | None = None, cluster: int | None = None
) -> None:
    """Refuses a message whose sender claims another name, role or cluster than its certificate has.

    Plain text has no certificates, so it allows every name.

    Args:
        role: `None` if the message claims no role.
        cluster: `None` if the message claims no cluster.

    Raises:
        NotPermittedError: The certificate has another name, role or cluster.
    """
    if not _is_tls(context):
        return
    caller = _identity(context)
    if name != caller.name or role not in (None, caller.role):
        claimed = f"{role.value}:{name}" if role else repr(name)
        raise NotPermittedError(
            f"{caller} may not speak for {claimed}: the host id and the role must be those of its certificate; leave "
            "--host-id out, or get a certificate for that name with `collapipe certs`"
        )
    if cluster not in (None, caller.cluster):
        raise NotPermittedError(
            f"{caller} may not be in cluster {cluster}, because its certificate is for cluster {caller.cluster}: leave "
            f"--cluster-index out, or get a certificate for {caller.role.value}:{name}@{cluster} with `collapipe certs`"
        )


def check_addresses(context: grpc.ServicerContext, addresses: Iterable[str]) -> None:
    """Refuses addresses that are not the caller's, because others would call them. Plain text allows every address.

    Args:
        addresses: Each "host:port".

    Raises:
        NotPermittedError: The host of an address is not in the certificate. Or it is this machine, and the caller is another.
        InvalidInputError: An address has no name of a host.
    """
    if not _is_tls(context):
        return
    hosts = {*_properties(context, "peer_dns"), *_properties(context, "peer_ip")}
    if not context.peer().startswith(_FROM_THIS_MACHINE):
        hosts -= OF_THIS_MACHINE
    for address in addresses:
        host = read_host(address.rpartition(":")[0])
        if host not in hosts:
            raise NotPermittedError(
                f"{_identity(context)} may not use the address {address}: its certificate has the hosts "
                f"{', '.join(sorted(hosts))}; set --advertise and --metrics-listen to one of them, or get a certificate with --address {host}"
            )


def owner_name(context: grpc.ServicerContext) -> str:
    """Returns role and name of the caller's certificate, as the owner of what it makes; "" in plain text, where anybody owns it."""
    return str(_identity(context)) if _is_tls(context) else ""


def is_owner(context: grpc.ServicerContext, owner: str) -> bool:
    """Returns whether the caller may change what an owner has made: it is the owner or an admin, or anybody owns it."""
    if not owner or not _is_tls(context):
        return True
    return owns(_identity(context), owner)


def owns(person: Identity, owner: str) -> bool:
    """Returns whether a person may change what an owner has made: it is the owner or an admin, or anybody owns it."""
    return not owner or person.role is Role.ADMIN or str(person) == owner


def check_is_owner(context: grpc.ServicerContext, owner: str, job_id: str) -> None:
    """Refuses a call of a client whose job it is not; raises `NotPermittedError`."""
    if not is_owner(context, owner):
        raise NotPermittedError(
            f"job {job_id} belongs to {owner}, and {_identity(context)} may only look at it: ask its owner, or call with the "
            "certificate of an admin (`collapipe certs issue DIR admin:NAME`)"
        )


def is_of_cluster(context: grpc.ServicerContext, cluster: int) -> bool:
    """Returns whether the caller is a host of a cluster. Plain text has no certificates, so all callers count as such."""
    if not _is_tls(context):
        return True
    caller = _identity(context)
    return caller.role in IN_A_CLUSTER and caller.cluster == cluster


def describe_caller(context: grpc.ServicerContext) -> str:
    """Returns role and name of the caller's certificate, or the caller's address in plain text."""
    return str(_identity(context)) if _is_tls(context) else context.peer()


def caller_name(context: grpc.ServicerContext) -> str:
    """Returns who counts as one caller for limits: a certificate, a machine without a certificate, or a plain-text connection."""
    if not _is_tls(context):
        return context.peer()
    identity = Identity.from_uris(_properties(context, "peer_uri"))
    return str(identity) if identity is not None else context.peer().rpartition(":")[0]


def _is_tls(context: grpc.ServicerContext) -> bool:
    return _properties(context, "transport_security_type") == ["ssl"]


def _properties(context: grpc.ServicerContext, key: str) -> list[str]:
    # The type stubs declare one value for each key, but gRPC returns a list.
    values: Any = context.auth_context().get(key, [])
    return [value.decode(errors="replace") for value in values]


def _identity(context: grpc.ServicerContext) -> Identity:
    # Only URIs count. Among all alternative names, a DNS name could look like an identity.
    return _identity_in(_properties(context, "peer_uri"))


def _identity_in(uris: list[str]) -> Identity:
    """Returns the identity in the URIs of a caller's certificate; raises `NotPermittedError` if there is none."""
    identity = Identity.from_uris(uris)
    if identity is None:
        raise NotPermittedError(
            "the certificate of the caller has no role, which is a URI like "
            f"{Identity(Role.DEVICE_AGENT, 'device-0-0').uri} among its alternative names: make it with `collapipe "
            "certs issue`"
        )
    return identity
