"""The table of permissions is complete, and servers enforce it."""

import importlib
import pkgutil
import re
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collapipe import v1
from collapipe.certificates import Role
from collapipe.errors import PeerLostError
from collapipe.rpc import Security, check_is_caller, check_is_owner, owner_name
from collapipe.rpc.options import COMMON_OPTIONS
from collapipe.rpc.permissions import PERMISSIONS

from .authorities import Authority
from .serving import ARITIES, ECHO, SECONDS, SERVICE, CallContext, refusal, secured, serving

ALL_BUT_ONE = frozenset(Role) - {Role.AUTHORITY}
ONLY_CLIENTS = {SERVICE: dict.fromkeys(ARITIES, frozenset({Role.CLIENT, Role.SCHEDULER}))}


def test_table_has_exactly_the_methods_of_the_protocol() -> None:
    protocol: dict[str, set[str]] = {}
    for module in pkgutil.iter_modules(v1.__path__):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(f"collapipe.v1.{module.name}").DESCRIPTOR
            for service in descriptor.services_by_name.values():
                protocol[service.full_name] = set(service.methods_by_name)
    assert {service: set(methods) for service, methods in PERMISSIONS.items()} == protocol
    assert len(protocol) >= 8


def test_only_clients_may_change_jobs() -> None:
    scheduler = PERMISSIONS["collapipe.v1.SchedulerService"]
    for method in ("SubmitJob", "CancelJob", "UseModel"):
        assert scheduler[method] == {Role.CLIENT, Role.ADMIN}
    hosts = {Role.CONTROL_UNIT, Role.DEVICE_AGENT, Role.EDGE_SERVER}
    assert scheduler["RegisterHost"] == hosts


def test_role_in_the_table_may_call(authority: Authority) -> None:
    with secured(authority, ECHO, "client:me", permissions=ONLY_CLIENTS) as served:
        for arity in ARITIES:
            assert served.call(arity)


def test_other_role_is_refused_before_the_method_begins_and_the_log_tells_it_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[Any] = []
    methods = {arity: lambda request, context: begun.append(request) for arity in ARITIES}
    with secured(authority, methods, "device-agent:d", permissions=ONLY_CLIENTS) as served:
        for arity in ARITIES * 2:
            said = served.refusal(arity)
            assert said.startswith(f"device-agent:d may not call {SERVICE}/{arity}")
            assert "client, scheduler" in said
    assert not begun
    told = [record.getMessage() for record in caplog.records]
    calls = [f"a call of device-agent:d to /{SERVICE}/{arity}:" for arity in ARITIES]
    assert [sum(call in line for line in told) for call in calls] == [1, 1, 1, 1]


def test_caller_cannot_write_lines_into_the_log(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    def claim(request: bytes, context: grpc.ServicerContext) -> bytes:
        check_is_caller(context, request.decode(), Role.DEVICE_AGENT)
        return request

    with secured(authority, {"unary_unary": claim}, "device-agent:d") as served:
        served.failure("unary_unary", b"x\nscheduler: all is well\x1b[2J")
    (record,) = [each for each in caplog.records if "refused a call" in each.getMessage()]
    assert "x\\nscheduler: all is well\\x1b[2J" in record.getMessage()


def test_method_outside_the_table_is_refused(authority: Authority) -> None:
    with secured(authority, ECHO, "client:me", permissions={}) as served:
        assert "nobody" in served.refusal()


LOOKALIKES = {
    "none": [],
    "in a DNS name": [x509.DNSName("spiffe://collapipe/client/me")],
    "of another deployment": [x509.UniformResourceIdentifier("spiffe://other/client/me")],
    "two": [
        x509.UniformResourceIdentifier("spiffe://collapipe/client/me"),
        x509.UniformResourceIdentifier("spiffe://collapipe/scheduler/me"),
    ],
    "unknown": [x509.UniformResourceIdentifier("spiffe://collapipe/emperor/me")],
    "with a path": [x509.UniformResourceIdentifier("spiffe://collapipe/client/me/../you")],
}


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_certificate_without_exactly_one_role_may_only_check_the_health(
    authority: Authority, kind: str
) -> None:
    nobody = authority.without_role("nobody", *LOOKALIKES[kind])
    with serving(ECHO, authority.security("scheduler:server"), nobody) as served:
        said = served.refusal()
        assert "no role" in said and "collapipe certs issue" in said
        stub = health_pb2_grpc.HealthStub(served.channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("role", "name", "cluster", "refused"),
    [
        (Role.DEVICE_AGENT, "d", None, ""),
        (None, "d", None, ""),
        (Role.DEVICE_AGENT, "d", 1, ""),
        (Role.EDGE_SERVER, "d", None, "may not speak for"),
        (Role.DEVICE_AGENT, "other", None, "may not speak for"),
        (None, "other", None, "may not speak for"),
        (None, "", None, "may not speak for"),
        (Role.DEVICE_AGENT, "d", 0, "may not be in cluster 0, .* cluster 1"),
    ],
)
def test_caller_may_speak_for_itself_and_its_cluster_only(
    role: Role | None, name: str, cluster: int | None, refused: str
) -> None:
    said = refusal(check_is_caller, CallContext("device-agent:d@1"), name, role, cluster)
    assert re.match(f"device-agent:d@1 {refused}" if refused else "$", said)
    assert not refusal(check_is_caller, CallContext(""), name, role, cluster)


@pytest.mark.parametrize(
    ("caller", "owner", "may"),
    [
        ("client:me", "client:me", True),
        ("client:me", "client:other", False),
        ("client:me", "", True),
        ("admin:boss", "client:other", True),
        ("client:root", "admin:root", False),
    ],
)
def test_job_belongs_to_its_owner_and_to_admins(caller: str, owner: str, may: bool) -> None:
    said = refusal(check_is_owner, CallContext(caller), owner, "job-1")
    assert said == "" if may else f"job-1 belongs to {owner}, and {caller}" in said
    assert not refusal(check_is_owner, CallContext(""), owner, "job-1")


def test_owner_is_the_caller_and_nobody_in_plain_text(authority: Authority) -> None:
    def owner(request: bytes, context: grpc.ServicerContext) -> bytes:
        return owner_name(context).encode()

    with secured(authority, {"unary_unary": owner}, "client:me") as served:
        assert served.call("unary_unary") == [b"client:me"]
    with serving({"unary_unary": owner}) as plain:
        assert plain.call("unary_unary") == [b""]


def test_plain_text_knows_no_roles() -> None:
    with serving(ECHO, permissions={}) as served:
        assert served.call("unary_unary") == [b"ask"]


def test_public_server_serves_callers_without_a_certificate_small_messages_of_public_methods(
    authority: Authority,
) -> None:
    own = authority.security("scheduler:server")
    public = Security(own.ca, own.certificate, own.key, asks_callers=False)
    permissions = {SERVICE: {"unary_unary": frozenset(Role), "stream_unary": ALL_BUT_ONE}}
    stranger = grpc.ssl_channel_credentials(authority.path.read_bytes())
    with serving(ECHO, public, permissions=permissions) as served:
        served.channel.close()
        served.channel = grpc.secure_channel(served.server.address, stranger, COMMON_OPTIONS)
        assert served.call("unary_unary", b"hello") == [b"hello"]
        failure = served.failure("unary_unary", bytes(100_000))
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no role" in served.refusal("stream_unary")
        served.channel.close()


@pytest.mark.parametrize(
    "agent", ["", "collapipe-protocol/0-0", "collapipe-protocol/7-9", "collapipe-protocol/1-"]
)
def test_caller_of_another_version_is_refused_but_may_check_the_health(agent: str) -> None:
    options = [("grpc.secondary_user_agent", agent)] if agent else []
    with serving(ECHO) as served:
        served.channel.close()
        served.channel = grpc.insecure_channel(served.server.address, options)
        error = served.error("stream_stream")
        assert isinstance(error, PeerLostError) and error.host_id == "device-1"
        assert "update CollaPipe" in str(error)
        health = health_pb2_grpc.HealthStub(served.channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        served.channel.close()
