"""Masking keys count only with the signature of the control unit of their cluster."""

import pytest

from collapipe.errors import NotPermittedError
from collapipe.rpc import Security, check_masking_keys, sign_masking_keys
from collapipe.secure_aggregation.keys import PublicKeys
from collapipe.v1.plan_pb2 import Attempt
from collapipe.v1.secure_aggregation_pb2 import SignedMaskingKeys

from .authorities import Authority

ATTEMPT = Attempt(job_id="job", round_index=3, attempt=1)
KEYS = PublicKeys(bytes([1]) * 32, bytes([2]) * 32)
HOST_CLUSTERS = [4, 7, 9]
"""Cluster 1 of the job runs on cluster 7 of the deployment."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def control_unit(authority: Authority) -> Security:
    return authority.security("control-unit:cu@7")


def refusal(reader: Security, *signed: SignedMaskingKeys, attempt: Attempt = ATTEMPT) -> str:
    """Returns why keys are refused, or "" if they are those of cluster 1."""
    try:
        assert check_masking_keys(reader, attempt, signed, HOST_CLUSTERS) == {1: KEYS}
    except NotPermittedError as error:
        return str(error)
    return ""


def test_keys_of_the_control_unit_of_the_cluster_count(control_unit: Security) -> None:
    assert not refusal(control_unit, sign_masking_keys(control_unit, ATTEMPT, 1, KEYS))


def test_keys_are_neither_signed_nor_checked_in_plain_text() -> None:
    plain = Security.insecure()
    signed = sign_masking_keys(plain, ATTEMPT, 1, KEYS)
    assert not signed.signature
    assert not refusal(plain, signed)


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        ("control-unit:other@9", "other@9 has signed the masking keys of cluster 1, which runs on"),
        ("device-agent:device@7", "but only a control-unit may"),
        ("scheduler:scheduler", "but only a control-unit may"),
        ("edge-server:edge", "but only a control-unit may"),
    ],
)
def test_keys_that_another_host_has_signed_are_refused(
    authority: Authority, control_unit: Security, holder: str, text: str
) -> None:
    signed = sign_masking_keys(authority.security(holder), ATTEMPT, 1, KEYS)
    assert text in refusal(control_unit, signed)


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
        assert "has no valid signature" in refusal(control_unit, wrong)
    assert "has no certificate of its signer" in refusal(control_unit, unsigned)


def test_keys_of_another_attempt_or_twice_of_one_cluster_are_refused(
    control_unit: Security,
) -> None:
    signed = sign_masking_keys(control_unit, ATTEMPT, 1, KEYS)
    later = Attempt(job_id="job", round_index=3, attempt=2)
    assert "of another attempt than round 3, attempt 2" in refusal(
        control_unit, signed, attempt=later
    )
    assert "are there twice" in refusal(control_unit, signed, signed)
    beyond = sign_masking_keys(control_unit, ATTEMPT, 3, KEYS)
    assert "but the job has 3 clusters" in refusal(control_unit, beyond)
