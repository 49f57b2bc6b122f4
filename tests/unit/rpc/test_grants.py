"""A host acts only where a plan puts it that the scheduler has signed."""

import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.certificates import pki
from collapipe.certificates.signatures import Signer
from collapipe.errors import WrongStateError
from collapipe.job import DataConfig, JobConfig, TaskConfig
from collapipe.rpc import (
    Security,
    check_finish,
    check_push,
    check_session,
    grant_of,
    session_settings,
    sign_grant,
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
from .serving import CallContext, refusal

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
_PADDING = 1 << 20
NUMBER = 1000
GRANT = grant_of(REQUEST, JOB, NUMBER)


UNIT, DEVICE = "control-unit:control-unit-2", "device-agent:device"


@pytest.fixture(scope="module")
def scheduler(authority: Authority) -> Security:
    return authority.security("scheduler:scheduler")


def registered(authority: Authority, holder: str = DEVICE) -> Security:
    """Returns the security of a host that has learned from the scheduler that all grants count."""
    security = authority.security(holder)
    security.learn_least_grant(0)
    return security


@pytest.fixture(scope="module")
def device(authority: Authority) -> Security:
    return registered(authority)


@pytest.fixture(scope="module")
def signed(scheduler: Security) -> SignedGrant:
    return sign_grant(scheduler, GRANT)


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
    server: Security, configure: ConfigureStage, caller: str = UNIT, host_id: str = "device"
) -> str:
    return refusal(check_session, server, CallContext(caller), configure, host_id)


def refused_push(server: Security, unit: PushedUnit, caller: str, host_id: str = "edge") -> str:
    return refusal(check_push, server, CallContext(caller), unit, host_id)


def test_control_unit_of_the_plan_may_run_its_stages(device: Security, signed: SignedGrant) -> None:
    assert refused_session(device, session(signed)) == ""


def test_no_grant_counts_before_the_host_has_registered(
    authority: Authority, signed: SignedGrant
) -> None:
    device, edge_server = authority.security(DEVICE), authority.security("edge-server:edge")
    unit = PushedUnit(attempt=ATTEMPT, cluster_index=2, unit_index=2, grant=signed)
    with pytest.raises(WrongStateError, match="has not registered since it started"):
        check_session(device, CallContext(UNIT), session(signed), "device")
    with pytest.raises(WrongStateError, match="has not registered since it started"):
        check_push(edge_server, CallContext(DEVICE), unit, "edge")
    for server in (device, edge_server):
        server.learn_least_grant(NUMBER, anew=True)
    assert refused_session(device, session(signed)) == ""
    assert refused_push(edge_server, unit, DEVICE) == ""


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"attempt": Attempt(job_id="other")}, "job other, round 3"),
    ({"attempt": Attempt(round_index=2**31)}, "round 2147483648"),
    ({"attempt": Attempt(attempt=9)}, "attempt 9"),
    ({"plan": Plan(num_micro_batches=2)}, "plan"),
    ({"host_cluster": 1}, "cluster"),
    ({"model": ModelSpec(config_json="{}")}, "model"),
    ({"stage_index": 2}, "device was asked to run stage 2"),
    ({"stage_index": 99}, "device was asked to run stage 99"),
]
SETTINGS: list[tuple[dict[str, Any], str, str]] = [
    ({"training_json": "{}"}, "'{}'", '\'{"rounds":3,'),
    ({"seed": 9}, "9", ""),
    ({"step_index": 31}, "31", "30"),
    ({"total_steps": 2**40}, str(2**40), "90"),
    ({"silence_seconds": 1e9}, "1000000000.0", "10.0"),
    ({"max_length": 2**20}, str(2**20), "128"),
    ({"is_use": True}, "True", "False"),
]
SOURCES: list[tuple[dict[str, Any], str]] = [
    (
        {"unit_index": 2, "weights_addresses": ["device:1", "stranger:1"]},
        "unit 2 from 'stranger:1', .* control-unit:1, device:1, earlier:1, edge:1",
    ),
    ({"optimizer_addresses": ["169.254.169.254:80"]}, "unit 0 from '169.254.169.254:80'"),
    ({"frozen_addresses": ["stranger:1"]}, "unit 0 from 'stranger:1'"),
]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *CHANGES,
        *(
            ({"settings": SessionSettings(**one)}, f"{next(iter(one))} = {asked}.* {granted}")
            for one, asked, granted in SETTINGS
        ),
        *(({"sources": [UnitSource(**one)]}, reason) for one, reason in SOURCES),
    ],
)
def test_session_that_differs_from_its_grant_is_refused(
    device: Security, signed: SignedGrant, changes: dict[str, Any], reason: str
) -> None:
    assert re.search(reason, refused_session(device, session(signed, **changes)))


def test_stage_fetches_from_the_hosts_of_the_plan_and_of_the_round_before(
    device: Security, signed: SignedGrant
) -> None:
    addresses = ["control-unit:1", "device:1", "edge:1", "earlier:1"]
    source = UnitSource(
        weights_addresses=addresses, optimizer_addresses=addresses, frozen_addresses=addresses
    )
    assert refused_session(device, session(signed, sources=[source])) == ""


@pytest.mark.parametrize(("least", "refused"), [(NUMBER, False), (NUMBER + 1, True)])
def test_grants_from_before_the_least_number_are_refused(
    authority: Authority, signed: SignedGrant, least: int, refused: bool
) -> None:
    device, edge_server = registered(authority), registered(authority, "edge-server:edge")
    unit = PushedUnit(attempt=ATTEMPT, cluster_index=2, unit_index=2, grant=signed)
    for server in (device, edge_server):
        server.learn_least_grant(least)
    for said in (
        refused_session(device, session(signed)),
        refused_push(edge_server, unit, DEVICE),
    ):
        assert bool(said) == refused
        assert not refused or (str(NUMBER) in said and str(least) in said)


def test_grant_with_the_largest_number_shuts_out_no_later_one(
    authority: Authority, scheduler: Security, signed: SignedGrant
) -> None:
    device = registered(authority)
    device.learn_least_grant(NUMBER, anew=True)
    largest = Grant()
    largest.CopyFrom(GRANT)
    largest.number = (1 << 64) - 1
    for each in (sign_grant(scheduler, largest), signed):
        assert refused_session(device, session(each)) == ""
    assert device.least_grant == NUMBER


@pytest.mark.parametrize(
    ("host_id", "address", "allowed"),
    [
        ("edge", "edge:1", True),
        ("edge", "", True),
        ("edge", "stranger:1", False),
        ("edge-2", "edge:1", False),
        ("", "edge:1", False),
    ],
)
def test_stage_pushes_to_the_edge_server_of_the_grant_only(
    host_id: str, address: str, allowed: bool
) -> None:
    said = refusal(check_finish, GRANT, FinishRound(edge_host_id=host_id, edge_address=address))
    assert said == "" if allowed else "edge at edge:1" in said


@pytest.mark.parametrize(
    ("caller", "host_id", "reason"),
    [
        ("control-unit:control-unit-0", "device", "control-unit-0 may not speak for"),
        ("device-agent:other", "device", "other may not speak for"),
        (UNIT, "another", "another was asked to run stage 1"),
    ],
)
def test_host_that_is_not_in_its_place_of_the_plan_runs_no_stage(
    device: Security, signed: SignedGrant, caller: str, host_id: str, reason: str
) -> None:
    assert reason in refused_session(device, session(signed), caller, host_id)


def signed_by_files(security: Security) -> SignedGrant:
    """Returns the grant with the signature of a certificate that no process might accept as its own."""
    assert security.key is not None and security.certificate is not None
    signer = Signer(security.key.read_bytes(), security.certificate.read_bytes())
    data = GRANT.SerializeToString()
    return SignedGrant(grant=data, signature=signer.sign(data), certificate=signer.certificate)


def test_grant_that_the_scheduler_has_not_signed_is_refused(
    authority: Authority,
    others: Authority,
    scheduler: Security,
    device: Security,
    signed: SignedGrant,
) -> None:
    other = Grant()
    other.CopyFrom(GRANT)
    other.plan.stages[0].host_id = "control-unit-0"
    changed = SignedGrant()
    changed.CopyFrom(signed)
    changed.grant = other.SerializeToString()
    # A server of TLS 1.2 signs bytes of which its peer chooses the first 32.
    assert scheduler.key is not None
    as_tls = SignedGrant()
    as_tls.CopyFrom(signed)
    key = pki.read_key(scheduler.key.read_bytes())
    as_tls.signature = key.sign(signed.grant, ec.ECDSA(hashes.SHA256()))
    for wrong, reason in (
        (SignedGrant(), "no certificate"),
        (SignedGrant(grant=signed.grant), "no certificate"),
        (SignedGrant(grant=signed.grant, certificate=signed.certificate), "signature of"),
        (changed, "signature of scheduler:scheduler"),
        (as_tls, "signature of scheduler:scheduler"),
        (signed_by_files(authority.security(UNIT)), f"{UNIT} has signed"),
        (signed_by_files(others.security("scheduler:scheduler")), "issuing authority"),
        (signed_by_files(authority.expired("scheduler:late")), "not valid now"),
    ):
        assert reason in refused_session(device, session(wrong)), reason


@pytest.mark.parametrize("damage", [lambda s: b"", lambda s: s[:-1], lambda s: s + b"\0", bytes])
def test_damaged_signature_is_refused(
    device: Security, signed: SignedGrant, damage: Callable[[bytes], bytes]
) -> None:
    wrong = SignedGrant(grant=signed.grant, certificate=signed.certificate)
    wrong.signature = damage(signed.signature) if damage is not bytes else bytes(72)
    assert "signature of scheduler:scheduler" in refused_session(device, session(wrong))


def test_each_changed_byte_of_a_grant_is_refused(device: Security, signed: SignedGrant) -> None:
    for position in range(len(signed.grant)):
        changed = bytearray(signed.grant)
        changed[position] ^= 1
        wrong = SignedGrant(
            grant=bytes(changed), signature=signed.signature, certificate=signed.certificate
        )
        assert refused_session(device, session(wrong)), position


def test_grant_of_a_scheduler_whose_key_was_revoked_is_refused(authority: Authority) -> None:
    scheduler, device = authority.security("scheduler:stolen"), registered(authority)
    signed = sign_grant(scheduler, GRANT)
    assert refused_session(device, session(signed)) == ""
    device.learn_revoked(authority.revoke("scheduler:stolen"))
    assert "was revoked" in refused_session(device, session(signed))


def test_large_grants_of_strangers_and_padded_certificates_do_not_stay_in_memory(
    authority: Authority, others: Authority, signed: SignedGrant
) -> None:
    device, stranger = registered(authority), others.security("scheduler:scheduler")
    assert stranger.key is not None and stranger.certificate is not None
    signer = Signer(stranger.key.read_bytes(), stranger.certificate.read_bytes())

    def refuse_all() -> None:
        for number in range(8):
            padding = bytes([number]) * _PADDING
            forged = SignedGrant(
                grant=padding, signature=signer.sign(padding), certificate=signer.certificate
            )
            assert "issuing authority" in refused_session(device, session(forged))
            padded = SignedGrant()
            padded.CopyFrom(signed)
            padded.certificate += padding
            assert f"certificate of {len(padded.certificate)} bytes" in refused_session(
                device, session(padded)
            )

    tracemalloc.start()
    try:
        refuse_all()
        assert tracemalloc.get_traced_memory()[0] < _PADDING
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("caller", "changes", "reason"),
    [
        (DEVICE, {}, ""),
        (UNIT, {"unit_index": 0}, ""),
        (DEVICE, {"unit_index": 4}, "'edge'"),
        ("device-agent:other", {}, "'device'"),
        (DEVICE, {"unit_index": 9}, "unit 9"),
        (DEVICE, {"cluster_index": 3}, "cluster 3"),
        (DEVICE, {"attempt": Attempt(job_id="other")}, "job other"),
    ],
)
def test_unit_comes_only_from_the_host_that_has_it_in_the_plan(
    authority: Authority, signed: SignedGrant, caller: str, changes: dict[str, Any], reason: str
) -> None:
    announced = {"attempt": ATTEMPT, "cluster_index": 2, "unit_index": 2} | changes
    unit = PushedUnit(**announced, grant=signed)
    said = refused_push(registered(authority, "edge-server:edge"), unit, caller)
    assert reason in said and bool(reason) == bool(said)


def test_unit_goes_only_to_the_edge_server_of_the_grant(
    authority: Authority, signed: SignedGrant
) -> None:
    unit = PushedUnit(attempt=ATTEMPT, cluster_index=2, unit_index=2, grant=signed)
    server = registered(authority, "edge-server:edge-2")
    assert "edge-2 with the grant of cluster 2" in refused_push(server, unit, DEVICE, "edge-2")
