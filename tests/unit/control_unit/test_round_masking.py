"""What a control unit answers about the masks of a round."""

from collections.abc import Mapping

import pytest

from collapipe.control_unit.round_masking import RoundMasking
from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.job import JobConfig
from collapipe.rpc import Security
from collapipe.v1.control_unit_pb2 import (
    MakeMaskingKeysRequest,
    RevealMasksRequest,
    RunRoundRequest,
    ShareMasksRequest,
)
from collapipe.v1.job_pb2 import JobSpec
from collapipe.v1.plan_pb2 import Attempt
from collapipe.v1.secure_aggregation_pb2 import MaskedRound, SignedMaskingKeys

JOB = JobConfig.from_dict(
    {"task": {"kind": "classification"}, "clusters": 3, "averaging": {"secure": True}}, "JOB.toml"
)

SPEC = JobSpec(job_id="job", config_json=JOB.to_json())


def attempt(number: int = 0, plan_id: str = "") -> Attempt:
    return Attempt(job_id="job", round_index=4, attempt=number, plan_id=plan_id)


def make_keys(masking: RoundMasking, cluster: int, number: int = 0) -> SignedMaskingKeys:
    return masking.begin(
        MakeMaskingKeysRequest(attempt=attempt(number), job=SPEC, cluster_index=cluster)
    )


@pytest.fixture
def control_units() -> Mapping[int, RoundMasking]:
    """Three control units that have shared their secrets, and begun the round."""
    units = {index: RoundMasking(Security.insecure()) for index in range(3)}
    keys = [make_keys(unit, index) for index, unit in units.items()]
    shares = [
        one
        for unit in units.values()
        for one in unit.share(ShareMasksRequest(attempt=attempt(), keys=keys, total_samples=9))
    ]
    for index, unit in units.items():
        own = [one for one in shares if one.receiver == index]
        masked = MaskedRound(shares=own, total_samples=9)
        # The attempt of a round names its plan.
        request = RunRoundRequest(attempt=attempt(plan_id="plan"), job=SPEC, masked=masked)
        other_rows, other_job = RunRoundRequest(), RunRoundRequest()
        for other in (other_rows, other_job):
            other.CopyFrom(request)
        other_rows.masked.total_samples = 10**9
        other_job.job.config_json = JOB.model_copy(update={"seed": 7}).to_json()
        for other in (other_rows, other_job):
            with pytest.raises(WrongStateError, match="round 4, attempt 0"):
                unit.of_round(other, JOB)
        assert unit.of_round(request, JOB) is not None
    return units


def test_each_control_unit_reveals_one_share_of_each_cluster_once(
    control_units: Mapping[int, RoundMasking],
) -> None:
    request = RevealMasksRequest(attempt=attempt(), present_clusters=[0, 1, 2])
    for index, unit in control_units.items():
        revealed = unit.reveal(request)
        assert revealed.holder == index
        assert [one.cluster_index for one in revealed.shares] == [0, 1, 2]
        assert {len(one.share) for one in revealed.shares} == {16}
        with pytest.raises(WrongStateError, match="round 4, attempt 0"):
            unit.reveal(request)


def test_secrets_of_an_attempt_are_gone_when_the_next_one_begins(
    control_units: Mapping[int, RoundMasking],
) -> None:
    make_keys(control_units[0], 0, number=1)
    with pytest.raises(WrongStateError, match="round 4, attempt 0"):
        control_units[0].reveal(RevealMasksRequest(attempt=attempt(), present_clusters=[0, 1, 2]))
    for number in (0, 1):
        with pytest.raises(WrongStateError, match="round 4, attempt 1"):
            make_keys(control_units[0], 0, number)


def test_only_an_evaluation_of_a_job_that_averages_securely_needs_no_masks() -> None:
    masking = RoundMasking(Security.insecure())
    plain = JobConfig.from_dict({"task": {"kind": "classification"}}, "JOB.toml")
    training = RunRoundRequest(attempt=attempt(), local_steps=2)
    assert masking.of_round(training, plain) is None
    assert masking.of_round(RunRoundRequest(attempt=attempt()), JOB) is None
    with pytest.raises(InvalidInputError, match=r"averaging\.secure"):
        masking.of_round(training, JOB)
