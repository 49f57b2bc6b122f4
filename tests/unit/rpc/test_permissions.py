"""The table of permissions is complete, and servers enforce it."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collapipe import v1
from collapipe.certificates import Identity, Role
from collapipe.errors import NotPermittedError
from collapipe.rpc import Security, check_is_caller, check_is_owner, owner_name, to_error
from collapipe.rpc.permissions import PERMISSIONS

from .authorities import Authority
from .serving import ARITIES, ECHO, SERVICE, serving

ONLY_CLIENTS = {SERVICE: dict.fromkeys(ARITIES, frozenset({Role.CLIENT, Role.SCHEDULER}))}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def refusal(error: BaseException) -> str:
    assert isinstance(error, grpc.RpcError)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert isinstance(to_error(error, "the server"), NotPermittedError)
    return str(error.details())


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


@pytest.mark.parametrize("arity", ARITIES)
def test_role_in_the_table_may_call(authority: Authority, arity: str) -> None:
    server, client = authority.security("scheduler:server"), authority.security("client:me")
    with serving(ECHO, server, client, permissions=ONLY_CLIENTS) as served:
        assert served.call(arity)


@pytest.mark.parametrize("arity", ARITIES)
def test_other_role_is_refused_before_the_method_begins(authority: Authority, arity: str) -> None:
    begun: list[str] = []

    def begin(request: Any, context: grpc.ServicerContext) -> Any:
        begun.append(arity)
        return iter([b""]) if arity.endswith("stream") else b""

    server = authority.security("scheduler:server")
    device = authority.security("device-agent:device-0-0")
    with (
        serving({arity: begin}, server, device, permissions=ONLY_CLIENTS) as served,
        pytest.raises(grpc.RpcError) as raised,
    ):
        served.call(arity)
    said = refusal(raised.value)
    assert said.startswith(f"device-agent:device-0-0 may not call {SERVICE}/{arity}: ")
    assert "client, scheduler may" in said
    assert not begun


def test_method_outside_the_table_is_refused(authority: Authority) -> None:
    server, client = authority.security("scheduler:server"), authority.security("client:me")
    with (
        serving(ECHO, server, client, permissions={}) as served,
        pytest.raises(grpc.RpcError) as raised,
    ):
        served.call("unary_unary")
    assert "nobody may" in refusal(raised.value)


def test_plain_text_knows_no_roles() -> None:
    with serving(ECHO, permissions={}) as served:
        assert served.call("unary_unary") == [b"ask"]


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
def test_certificate_without_exactly_one_role_is_refused_with_the_remedy(
    authority: Authority, kind: str
) -> None:
    server = authority.security("scheduler:server")
    nobody = authority.without_role("nobody", *LOOKALIKES[kind])
    with serving(ECHO, server, nobody) as served, pytest.raises(grpc.RpcError) as raised:
        served.call("unary_unary")
    said = refusal(raised.value)
    assert "has no role" in said and "collapipe certs issue" in said


def test_log_tells_once_in_a_while_of_refused_calls(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    server, device = authority.security("scheduler:server"), authority.security("device-agent:d-9")
    with serving(ECHO, server, device, permissions=ONLY_CLIENTS) as served:
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                served.call("unary_unary")
    told = [r.getMessage() for r in caplog.records if "refused a call" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"refused a call of device-agent:d-9 to /{SERVICE}/unary_unary: ")


def test_health_is_open_to_every_peer_with_a_certificate(authority: Authority) -> None:
    server, nobody = authority.security("scheduler:server"), authority.without_role("nobody")
    with serving(ECHO, server, nobody, permissions={}) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def speaking(authority: Authority) -> Iterator[Any]:
    """Makes a call in which the caller claims a role and a name."""

    def speak(
        role: Role | None,
        name: str,
        security: Security | None = None,
        cluster: int | None = None,
    ) -> list[bytes]:
        def check(request: bytes, context: grpc.ServicerContext) -> bytes:
            check_is_caller(context, name, role, cluster)
            return b"taken"

        server = security and authority.security("scheduler:server")
        with serving({"unary_unary": check}, server, security) as served:
            return served.call("unary_unary")

    yield speak


def test_caller_may_speak_for_itself_only(authority: Authority, speaking: Any) -> None:
    device = authority.security("device-agent:device-0-0")
    assert speaking(Role.DEVICE_AGENT, "device-0-0", device) == [b"taken"]
    assert speaking(None, "device-0-0", device) == [b"taken"]
    for role, name in (
        (Role.EDGE_SERVER, "device-0-0"),
        (Role.DEVICE_AGENT, "device-0-1"),
        (None, "device-0-1"),
        (None, ""),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            speaking(role, name, device)
        assert refusal(raised.value).startswith("device-agent:device-0-0 may not speak for ")


def test_caller_may_claim_only_the_cluster_of_its_certificate(
    authority: Authority, speaking: Any
) -> None:
    device = authority.security("device-agent:device-1-0@1")
    assert speaking(Role.DEVICE_AGENT, "device-1-0", device, cluster=1) == [b"taken"]
    with pytest.raises(grpc.RpcError) as raised:
        speaking(Role.DEVICE_AGENT, "device-1-0", device, cluster=0)
    assert refusal(raised.value).startswith(
        "device-agent:device-1-0@1 may not be in cluster 0, because its certificate is for cluster 1"
    )


@pytest.mark.parametrize(
    ("caller", "owner", "may"),
    [
        ("client:me", "client:me", True),
        ("client:me", "client:other", False),
        ("client:me", "", True),
        ("admin:boss", "client:other", True),
        ("client:root", "admin:root", False),
        (None, "client:other", True),
    ],
)
def test_job_belongs_to_its_owner_and_to_admins(
    authority: Authority, caller: str | None, owner: str, may: bool
) -> None:
    def check(request: bytes, context: grpc.ServicerContext) -> bytes:
        check_is_owner(context, owner, "job-1")
        return owner_name(context).encode()

    security = caller and authority.security(caller)
    server = security and authority.security("scheduler:server")
    with serving({"unary_unary": check}, server or None, security or None) as served:
        if may:
            assert served.call("unary_unary") == [(caller or "").encode()]
        else:
            with pytest.raises(grpc.RpcError) as raised:
                served.call("unary_unary")
            assert f"job job-1 belongs to {owner}, and {caller} may only" in refusal(raised.value)


def test_plain_text_accepts_every_name(speaking: Any) -> None:
    assert speaking(Role.EDGE_SERVER, "whoever", cluster=7) == [b"taken"]


def test_identity_survives_writing_and_reading() -> None:
    identity = Identity(Role.CONTROL_UNIT, "pi-3.lan")
    assert Identity.from_uris([identity.uri]) == identity
    assert Identity.parse(str(identity)) == identity


@pytest.fixture
def stranger(authority: Authority) -> Iterator[grpc.ChannelCredentials]:
    yield grpc.ssl_channel_credentials(authority.path.read_bytes())


@pytest.fixture
def public(authority: Authority) -> Security:
    """Returns the security of a server that asks callers for no certificate."""
    own = authority.security("scheduler:server")
    return Security(own.ca, own.certificate, own.key, asks_callers=False)


def test_public_method_limits_callers_without_a_certificate(
    public: Security, stranger: grpc.ChannelCredentials
) -> None:
    everybody = {SERVICE: dict.fromkeys(ARITIES, frozenset(Role))}
    with (
        serving(ECHO, public, permissions=everybody) as served,
        grpc.secure_channel(served.server.address, stranger) as channel,
    ):
        method = channel.unary_unary(f"/{SERVICE}/unary_unary")
        assert method(b"hello", timeout=20) == b"hello"
        with pytest.raises(grpc.RpcError) as raised:
            method(bytes(100_000), timeout=20)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_other_method_of_a_public_server_refuses_callers_without_a_certificate(
    public: Security, stranger: grpc.ChannelCredentials
) -> None:
    with (
        serving(ECHO, public) as served,
        grpc.secure_channel(served.server.address, stranger) as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        channel.unary_unary(f"/{SERVICE}/unary_unary")(b"", timeout=20)
    assert "has no role" in refusal(raised.value)
