"""A host acts only where a plan puts it that the scheduler has signed."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.certificates import pki
from collapipe.errors import NotPermittedError
from collapipe.job import DataConfig, JobConfig, TaskConfig
from collapipe.rpc import (
    Security,
    check_finish,
    check_push,
    check_session,
    grant_of,
    session_settings,
    sign_grant,
    to_error,
)
from collapipe.v1.control_unit_pb2 import RunRoundRequest
from collapipe.v1.edge_server_pb2 import PushedUnit
from collapipe.v1.plan_pb2 import (
    Attempt,
    ClusterState,
    Grant,
    ModelSpec,
    Plan,
    SessionSettings,
    SignedGrant,
    Stage,
)
from collapipe.v1.stage_pb2 import ConfigureStage, FinishRound, UnitSource

from .authorities import Authority
from .serving import serving

ATTEMPT = Attempt(job_id="job", round_index=3, attempt=1, plan_id="plan")
PLAN = Plan(
    plan_id="plan",
    cluster_index=2,
    stages=[
        Stage(host_id="control-unit-2", address="control-unit:1", stop_unit=1),
        Stage(host_id="device", address="device:1", start_unit=1, stop_unit=4),
        Stage(host_id="edge", address="edge:1", start_unit=4, stop_unit=5),
    ],
)
MODEL = ModelSpec(family="bert", config_json='{"hidden_size": 64}')
JOB = JobConfig(
    clusters=3,
    use_clusters=[5, 6, 7],
    task=TaskConfig(kind="classification"),
    data=DataConfig(source="stdlib_docstrings"),
)
REQUEST = RunRoundRequest(
    attempt=ATTEMPT,
    plan=PLAN,
    edge_host_id="edge",
    edge_address="edge:1",
    model=MODEL,
    base=ClusterState(step_index=30),
    total_steps=90,
    previous_stages=[Stage(host_id="earlier", address="earlier:1")],
)
NUMBER = 1000
GRANT = grant_of(REQUEST, JOB, NUMBER)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def scheduler(authority: Authority) -> Security:
    return authority.security("scheduler:scheduler")


def refusal(
    server: Security, caller: Security, check: Callable[[grpc.ServicerContext], None]
) -> str:
    """Returns why a server refuses a call, or "" if it does not."""

    def answer(request: Any, context: grpc.ServicerContext) -> bytes:
        check(context)
        return b""

    with serving({"unary_unary": answer}, server, caller) as served:
        try:
            served.call("unary_unary")
        except grpc.RpcError as error:
            refused = to_error(error, "the server")
            assert isinstance(refused, NotPermittedError), refused
            return str(refused)
    return ""


def session(signed: SignedGrant, **changes: Any) -> ConfigureStage:
    configure = ConfigureStage(
        attempt=ATTEMPT,
        plan=PLAN,
        stage_index=1,
        host_cluster=7,
        model=MODEL,
        grant=signed,
        settings=session_settings(REQUEST, JOB),
    )
    configure.MergeFrom(ConfigureStage(**changes))
    return configure


def refused_session(
    authority: Authority,
    configure: ConfigureStage,
    caller: str = "control-unit:control-unit-2",
    host_id: str = "device",
) -> str:
    server = authority.security(f"device-agent:{host_id}")
    return refusal(
        server,
        authority.security(caller),
        lambda context: check_session(server, context, configure, host_id),
    )


def test_control_unit_of_the_plan_may_run_its_stages(
    authority: Authority, scheduler: Security
) -> None:
    assert refused_session(authority, session(sign_grant(scheduler, GRANT))) == ""


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another job": ({"attempt": Attempt(job_id="other")}, "a session of job other, round 3"),
    "a later round": ({"attempt": Attempt(round_index=2**31)}, "round 2147483648"),
    "a later attempt": ({"attempt": Attempt(attempt=9)}, "attempt 9 was asked for with"),
    "another plan": ({"plan": Plan(num_micro_batches=2)}, "must be those that the scheduler"),
    "another cluster": ({"host_cluster": 1}, "must be those that the scheduler has granted"),
    "a larger model": ({"model": ModelSpec(config_json="{}")}, "must be those that the scheduler"),
    "another stage": ({"stage_index": 2}, "device was asked to run stage 2"),
    "no stage": ({"stage_index": 99}, "device was asked to run stage 99"),
    "another training": (
        {"settings": SessionSettings(training_json="{}")},
        "was asked for with training_json = '{}', but the scheduler has granted '{\"rounds\":3,",
    ),
    "another seed": ({"settings": SessionSettings(seed=9)}, "seed = 9, but the scheduler has gran"),
    "a later step": ({"settings": SessionSettings(step_index=31)}, "step_index = 31, but"),
    "more steps": (
        {"settings": SessionSettings(total_steps=2**40)},
        "has granted 90: run the same",
    ),
    "a long silence": (
        {"settings": SessionSettings(silence_seconds=1e9)},
        "silence_seconds = 1000000000.0, but the scheduler has granted 10.0",
    ),
    "longer rows": ({"settings": SessionSettings(max_length=2**20)}, "has granted 128: run"),
    "a use": ({"settings": SessionSettings(is_use=True)}, "is_use = True, but the scheduler has"),
    "weights of a stranger": (
        {"sources": [UnitSource(unit_index=2, weights_addresses=["device:1", "stranger:1"])]},
        "fetches unit 2 from 'stranger:1', but the scheduler has granted control-unit:1, device:1, "
        "earlier:1, edge:1: run",
    ),
    "optimizer states of a stranger": (
        {"sources": [UnitSource(optimizer_addresses=["169.254.169.254:80"])]},
        "fetches unit 0 from '169.254.169.254:80'",
    ),
    "frozen weights of a stranger": (
        {"sources": [UnitSource(frozen_addresses=["stranger:1"])]},
        "fetches unit 0 from 'stranger:1'",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_session_that_differs_from_its_grant_is_refused(
    authority: Authority, scheduler: Security, change: str
) -> None:
    changes, reason = CHANGES[change]
    configure = session(sign_grant(scheduler, GRANT), **changes)
    assert reason in refused_session(authority, configure)


def test_stage_fetches_from_the_hosts_of_the_plan_and_of_the_round_before(
    authority: Authority, scheduler: Security
) -> None:
    addresses = ["control-unit:1", "device:1", "edge:1", "earlier:1"]
    source = UnitSource(
        weights_addresses=addresses, optimizer_addresses=addresses, frozen_addresses=addresses
    )
    configure = session(sign_grant(scheduler, GRANT), sources=[source])
    assert refused_session(authority, configure) == ""


@pytest.mark.parametrize(("least", "refused"), [(NUMBER, False), (NUMBER + 1, True)])
def test_grants_from_before_the_least_number_are_refused(
    authority: Authority, scheduler: Security, least: int, refused: bool
) -> None:
    device = authority.security("device-agent:device")
    edge_server = authority.security("edge-server:edge")
    configure = session(sign_grant(scheduler, GRANT))
    unit = PushedUnit(attempt=ATTEMPT, cluster_index=2, unit_index=2, grant=configure.grant)
    unit_of_plan = authority.security("control-unit:control-unit-2")
    for server in (device, edge_server):
        server.learn_least_grant(least)
    reasons = [
        refusal(device, unit_of_plan, lambda c: check_session(device, c, configure, "device")),
        refusal(edge_server, device, lambda c: check_push(edge_server, c, unit, "edge")),
    ]
    for reason in reasons:
        assert bool(reason) == refused
        assert (
            not refused or f"has the number {NUMBER}, but here grants count from {least}" in reason
        )


@pytest.mark.parametrize(
    ("finish", "allowed"),
    [
        (FinishRound(edge_host_id="edge", edge_address="edge:1"), True),
        (FinishRound(edge_host_id="edge"), True),
        (FinishRound(edge_host_id="edge", edge_address="stranger:1"), False),
        (FinishRound(edge_host_id="edge-2", edge_address="edge:1"), False),
        (FinishRound(edge_address="edge:1"), False),
    ],
)
def test_stage_pushes_to_the_edge_server_of_the_grant_only(
    finish: FinishRound, allowed: bool
) -> None:
    with nullcontext() if allowed else pytest.raises(NotPermittedError, match="edge at edge:1"):
        check_finish(GRANT, finish)


@pytest.mark.parametrize("caller", ["control-unit:control-unit-0", "device-agent:other"])
def test_host_that_is_not_the_first_stage_may_run_none(
    authority: Authority, scheduler: Security, caller: str
) -> None:
    configure = session(sign_grant(scheduler, GRANT))
    assert f"{caller} may not speak for" in refused_session(authority, configure, caller)


def test_host_that_is_not_in_the_plan_runs_no_stage(
    authority: Authority, scheduler: Security
) -> None:
    configure = session(sign_grant(scheduler, GRANT))
    refused = refused_session(authority, configure, host_id="another")
    assert "another was asked to run stage 1" in refused


def wrong_grants(authority: Authority, scheduler: Security) -> Iterator[tuple[SignedGrant, str]]:
    signed = sign_grant(scheduler, GRANT)
    yield SignedGrant(), "no certificate of its signer"
    yield SignedGrant(grant=signed.grant), "no certificate of its signer"
    unsigned = SignedGrant(grant=signed.grant, certificate=signed.certificate)
    yield unsigned, "no valid signature of scheduler:scheduler"
    other = Grant()
    other.CopyFrom(GRANT)
    other.plan.stages[0].host_id = "control-unit-0"
    changed = SignedGrant()
    changed.CopyFrom(signed)
    changed.grant = other.SerializeToString()
    yield changed, "no valid signature of scheduler:scheduler"
    own = sign_grant(authority.security("control-unit:control-unit-2"), GRANT)
    yield own, "control-unit:control-unit-2 has signed a grant"


def test_grant_of_anybody_but_the_scheduler_is_refused(
    authority: Authority, scheduler: Security
) -> None:
    for signed, reason in wrong_grants(authority, scheduler):
        assert reason in refused_session(authority, session(signed)), reason


def test_signature_that_a_tls_handshake_could_have_made_is_refused(
    authority: Authority, scheduler: Security
) -> None:
    """A server of TLS 1.2 signs bytes of which its peer chooses the first 32."""
    assert scheduler.key is not None
    signed = sign_grant(scheduler, GRANT)
    key = pki.read_key(scheduler.key.read_bytes())
    signed.signature = key.sign(signed.grant, ec.ECDSA(hashes.SHA256()))
    assert "no valid signature" in refused_session(authority, session(signed))


def test_grants_of_another_authority_or_with_an_old_certificate_are_refused(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stranger = Authority(tmp_path_factory.mktemp("stranger")).security("scheduler:scheduler")
    refused = refused_session(authority, session(sign_grant(stranger, GRANT)))
    assert (
        "scheduler:scheduler has signed a grant, but its issuing authority is of another" in refused
    )
    expired = authority.expired("scheduler:late")
    signer = signed_by_files(expired)
    assert "is not valid now" in refused_session(authority, session(signer))


def signed_by_files(security: Security) -> SignedGrant:
    """Returns the grant with the signature of a certificate that no process would accept as its own."""
    from collapipe.certificates.signatures import Signer

    assert security.key is not None and security.certificate is not None
    signer = Signer(security.key.read_bytes(), security.certificate.read_bytes())
    data = GRANT.SerializeToString()
    return SignedGrant(grant=data, signature=signer.sign(data), certificate=signer.certificate)


@pytest.mark.parametrize(
    ("caller", "changes", "reason"),
    [
        ("device-agent:device", {}, ""),
        ("control-unit:control-unit-2", {"unit_index": 0}, ""),
        ("device-agent:device", {"unit_index": 4}, "may not speak for 'edge'"),
        ("device-agent:other", {}, "may not speak for 'device'"),
        ("device-agent:device", {"unit_index": 9}, "has no unit 9"),
        ("device-agent:device", {"cluster_index": 3}, "cluster 3 pushed a unit"),
        ("device-agent:device", {"attempt": Attempt(job_id="other")}, "of job other"),
    ],
)
def test_unit_comes_only_from_the_host_that_has_it_in_the_plan(
    authority: Authority, scheduler: Security, caller: str, changes: dict[str, Any], reason: str
) -> None:
    announced = {"attempt": ATTEMPT, "cluster_index": 2, "unit_index": 2} | changes
    unit = PushedUnit(**announced, grant=sign_grant(scheduler, GRANT))
    server = authority.security("edge-server:edge")
    refused = refusal(
        server,
        authority.security(caller),
        lambda context: check_push(server, context, unit, "edge"),
    )
    assert reason in refused and bool(reason) == bool(refused)


def test_unit_goes_only_to_the_edge_server_of_the_grant(
    authority: Authority, scheduler: Security
) -> None:
    unit = PushedUnit(
        attempt=ATTEMPT, cluster_index=2, unit_index=2, grant=sign_grant(scheduler, GRANT)
    )
    server = authority.security("edge-server:edge-2")
    refused = refusal(
        server,
        authority.security("device-agent:device"),
        lambda context: check_push(server, context, unit, "edge-2"),
    )
    assert "to edge-2 with the grant of cluster 2" in refused
