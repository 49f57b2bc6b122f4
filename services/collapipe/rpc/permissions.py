"""Who may call what: one table, and the checks of a caller's certificate against it."""

from collections.abc import Mapping
from typing import Any

import grpc

from collapipe.certificates.identity import Identity, Role
from collapipe.errors import NotPermittedError

ANYBODY = frozenset(Role)
"""Also callers without a certificate, on a server that asks for none: the method itself looks at who they are."""

_STAGE_HOSTS = frozenset({Role.CONTROL_UNIT, Role.DEVICE_AGENT, Role.EDGE_SERVER})
_SCHEDULER = frozenset({Role.SCHEDULER})
_CLIENT = frozenset({Role.CLIENT})

Permissions = Mapping[str, Mapping[str, frozenset[Role]]]

CALLERS: Permissions = {
    "collapipe.v1.BlobService": {"FetchBlob": _STAGE_HOSTS},
    "collapipe.v1.ControlUnitService": {"PrepareData": _SCHEDULER, "RunRound": _SCHEDULER},
    "collapipe.v1.DeviceAgentService": {"ProfileBlock": _SCHEDULER},
    "collapipe.v1.EdgeServerService": {
        "PrepareJob": _SCHEDULER,
        "CommitRound": _SCHEDULER,
        "ExportModel": _CLIENT,
    },
    "collapipe.v1.EnrollmentService": {"Enroll": ANYBODY, "Renew": ANYBODY},
    "collapipe.v1.LinkService": {"MeasureLink": _SCHEDULER, "ReceiveProbe": _STAGE_HOSTS},
    "collapipe.v1.SchedulerService": {
        "RegisterHost": _STAGE_HOSTS,
        "Heartbeat": _STAGE_HOSTS,
        # stage hosts too: `collapipe doctor` on a box reaches for its peers
        "ListHosts": _CLIENT | _STAGE_HOSTS,
        "SubmitJob": _CLIENT,
        "WatchJob": _CLIENT,
        "ListJobs": _CLIENT,
        "CancelJob": _CLIENT,
        "GetPlans": _CLIENT,
        "ExplainDecision": _CLIENT,
        "ReplayDecision": _CLIENT,
    },
    "collapipe.v1.StageService": {
        "RunStage": frozenset({Role.CONTROL_UNIT}),
        # of the stage before, which is never the head
        "ExchangeActivations": frozenset({Role.CONTROL_UNIT, Role.DEVICE_AGENT}),
    },
}
"""By service and method. What is not in it is nobody's: a test compares it with the protocol."""

_OF_EVERY_PEER = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
"""Tell nothing of a job, to peers that have a certificate."""


def check_permitted(method: str, context: grpc.ServicerContext, callers: Permissions) -> None:
    """Refuses a call that the caller's role may not make.

    Args:
        method: "/service/method".
        context: Of the call, on a server that speaks TLS.
        callers: The table.

    Raises:
        NotPermittedError: The role is another, or the certificate has none.
    """
    _, service, name = method.split("/", 2)
    if service in _OF_EVERY_PEER:
        return
    allowed = callers.get(service, {}).get(name, frozenset())
    if allowed == ANYBODY:
        return
    caller = _identity(context)
    if caller.role not in allowed:
        may = ", ".join(sorted(role.value for role in allowed)) or "nobody"
        raise NotPermittedError(
            f"{caller} may not call {service}/{name}: by their certificates, {may} may. Call as one of them, with a "
            "certificate of `collapipe certs`"
        )


def check_is_caller(context: grpc.ServicerContext, name: str, role: Role | None = None) -> None:
    """Refuses a message in which the caller says to be somebody else; in plain text, anybody is who they say.

    Args:
        context: Of the call.
        name: The host id that the caller says is its own.
        role: The role that it says to have; `None` where it says none.

    Raises:
        NotPermittedError: The certificate says otherwise.
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


def _is_tls(context: grpc.ServicerContext) -> bool:
    return _properties(context, "transport_security_type") == ["ssl"]


def _properties(context: grpc.ServicerContext, key: str) -> list[str]:
    # the stubs take each for one text: there may be several
    values: Any = context.auth_context().get(key, [])
    return [value.decode(errors="replace") for value in values]


def _identity(context: grpc.ServicerContext) -> Identity:
    # `peer_uri`, and not all alternative names: a DNS name could be spelt like an identity
    identity = Identity.from_uris(_properties(context, "peer_uri"))
    if identity is None:
        raise NotPermittedError(
            "the certificate of the caller has no role, which is a URI like "
            f"{Identity(Role.DEVICE_AGENT, 'device-0-0').uri} among its alternative names: make it with `collapipe "
            "certs issue`"
        )
    return identity
