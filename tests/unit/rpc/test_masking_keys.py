"""Masking keys count only with the signature of the control unit of their cluster."""

import pytest

from collapipe.rpc import Security, check_masking_keys, sign_masking_keys
from collapipe.secure_aggregation.keys import PublicKeys
from collapipe.v1.plan_pb2 import Attempt
from collapipe.v1.secure_aggregation_pb2 import SignedMaskingKeys

from .authorities import Authority
from .serving import refusal

ATTEMPT = Attempt(job_id="job", round_index=3, attempt=1)
KEYS = PublicKeys(bytes([1]) * 32, bytes([2]) * 32)
HOST_CLUSTERS = [4, 7, 9]
"""Cluster 1 of the job runs on cluster 7 of the deployment."""


@pytest.fixture(scope="module")
def control_unit(authority: Authority) -> Security:
    return authority.security("control-unit:cu@7")


def refused(reader: Security, *signed: SignedMaskingKeys, attempt: Attempt = ATTEMPT) -> str:
    """Returns why keys are refused, or "" if they are those of cluster 1."""

    def check() -> None:
        assert check_masking_keys(reader, attempt, signed, HOST_CLUSTERS) == {1: KEYS}

    return refusal(check)


def test_keys_of_the_control_unit_of_the_cluster_count(control_unit: Security) -> None:
    assert not refused(control_unit, sign_masking_keys(control_unit, ATTEMPT, 1, KEYS))


def test_keys_are_neither_signed_nor_checked_in_plain_text() -> None:
    plain = Security.insecure()
    signed = sign_masking_keys(plain, ATTEMPT, 1, KEYS)
    assert not signed.signature
    assert not refused(plain, signed)


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        ("control-unit:other@9", "other@9 has signed the masking keys of cluster 1"),
        ("device-agent:device@7", "only a control-unit"),
        ("scheduler:scheduler", "only a control-unit"),
        ("edge-server:edge", "only a control-unit"),
    ],
)
def test_keys_that_another_host_has_signed_are_refused(
    authority: Authority, control_unit: Security, holder: str, text: str
) -> None:
    signed = sign_masking_keys(authority.security(holder), ATTEMPT, 1, KEYS)
    assert text in refused(control_unit, signed)


def test_signature_for_another_purpose_or_of_other_keys_is_refused(
    control_unit: Security,
) -> None:
    signed = sign_masking_keys(control_unit, ATTEMPT, 1, KEYS)
    as_grant = SignedMaskingKeys(keys=signed.keys, certificate=signed.certificate)
    as_grant.signature, _ = control_unit.sign(signed.keys)
    changed = sign_masking_keys(control_unit, ATTEMPT, 1, PublicKeys(KEYS.share, KEYS.mask))
    changed.signature = signed.signature
    unsigned = SignedMaskingKeys(keys=signed.keys)
    for wrong in (as_grant, changed):
        assert "signature of control-unit:" in refused(control_unit, wrong)
    assert "no certificate" in refused(control_unit, unsigned)


def test_keys_of_another_attempt_or_twice_of_one_cluster_are_refused(
    control_unit: Security,
) -> None:
    signed = sign_masking_keys(control_unit, ATTEMPT, 1, KEYS)
    later = Attempt(job_id="job", round_index=3, attempt=2)
    assert "round 3, attempt 2" in refused(control_unit, signed, attempt=later)
    assert "twice" in refused(control_unit, signed, signed)
    beyond = sign_masking_keys(control_unit, ATTEMPT, 3, KEYS)
    assert "3 clusters" in refused(control_unit, beyond)
