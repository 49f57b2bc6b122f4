"""What the rounds of a private job add up to."""

from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from pydantic import ValidationError

from collapipe.errors import AttemptFailedError, InvalidInputError
from collapipe.job import JobConfig
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.privacy_account import PrivacyAccount, check_first_round
from collapipe.v1.plan_pb2 import Commit

from .jobs import job
from .test_round_runner import ScriptedPlanner, run_round


def private_job(clusters: int = 5, **privacy: Any) -> JobConfig:
    document = job().model_dump()
    document |= {"clusters": clusters, "privacy": {"noise_multiplier": 3.0, **privacy}}
    return JobConfig.model_validate(document)


@pytest.mark.parametrize(("num_rounds", "delta"), [(1, 1e-5), (20, 1e-5), (300, 1e-3)])
def test_epsilon_is_that_of_the_accountant_of_dp_accounting(num_rounds: int, delta: float) -> None:
    config = private_job(delta=delta)
    loss = PrivacyAccount().after_rounds(config, num_rounds).loss(config)
    # Four of five updates together have the noise of the average.
    for epsilon, multiplier in ((loss.epsilon, 3.0), (loss.update_epsilon, 3.0 / 2)):
        accountant = PLDAccountant()
        accountant.compose(GaussianDpEvent(multiplier), num_rounds)
        assert epsilon == pytest.approx(accountant.get_epsilon(delta), rel=1e-3)
    assert loss.delta == delta


def test_rounds_of_different_sizes_compose() -> None:
    few, many = private_job(3), private_job(9)
    account = PrivacyAccount().after_rounds(few, 4).after_rounds(many, 6)
    accountant = PLDAccountant()
    accountant.compose(GaussianDpEvent(3.0 / 2**0.5), 4)
    accountant.compose(GaussianDpEvent(3.0 / 8**0.5), 6)
    assert account.loss(many).update_epsilon == pytest.approx(
        accountant.get_epsilon(many.privacy.delta), rel=1e-3
    )


def test_a_job_without_rounds_reveals_nothing() -> None:
    loss = PrivacyAccount().loss(private_job())
    assert (loss.epsilon, loss.update_epsilon) == (0, 0)


def test_every_attempt_counts_before_its_hosts_train_and_no_return_takes_it_back(
    tmp_path: Path,
) -> None:
    store = JobStore(tmp_path)
    document = store.create(private_job())
    epsilons = []
    for _ in range(3):
        with pytest.raises(AttemptFailedError):
            run_round(store, document, ScriptedPlanner("device-0", 4))
        document = JobStore(tmp_path).get(document.job_id)  # what a restarted scheduler reads
        epsilons.append(document.status().privacy_loss.epsilon)
        document = store.roll_back(document.job_id, Commit(num_rounds=0, attempt=9))
        assert document.status().privacy_loss.epsilon == epsilons[-1]
    expected = [PrivacyAccount().after_rounds(private_job(), n) for n in (1, 2, 3)]
    assert epsilons == [account.loss(private_job()).epsilon for account in expected]
    assert epsilons == sorted(set(epsilons))


def test_job_without_noise_has_no_epsilon(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    document = store.create(job())
    with pytest.raises(AttemptFailedError):
        run_round(store, document, ScriptedPlanner("device-0", 4))
    assert not store.get(document.job_id).status().HasField("privacy_loss")


def test_rounds_are_allowed_up_to_the_largest_epsilon() -> None:
    config = private_job()
    limit = PrivacyAccount().after_rounds(config, 7).loss(config).epsilon
    config = private_job(max_epsilon=limit)
    account = PrivacyAccount().after_rounds(config, 4)
    assert account.allows_rounds(config, 3)
    assert not account.allows_rounds(config, 4)


def test_job_that_may_not_train_a_round_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"epsilon of 1\.\d+, but privacy.max_epsilon is 1"):
        check_first_round(private_job(max_epsilon=1.0))
    check_first_round(private_job(max_epsilon=2.0))
    check_first_round(job())


def test_noise_of_all_but_one_of_the_fewest_clusters_is_that_of_the_average() -> None:
    def shares(**changes: Any) -> int:
        return private_job().model_copy(update=changes).num_noise_shares

    late = {"round_deadline_seconds": 10.0, "min_clusters": 3}
    leave_out = private_job().schedule.model_copy(update=late)
    end_early = leave_out.model_copy(update={"late_clusters": "end_early"})
    assert [shares(clusters=n) for n in (1, 2, 5)] == [1, 1, 4]
    assert shares(schedule=leave_out) == 2
    assert shares(schedule=end_early) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"averaging": {"rule": "median"}}, "averaging.rule is 'median'"),
        ({"training": {"upload_codecs": ["fp32", "int8"]}}, r"upload_codecs is \['fp32', 'int8'\]"),
        ({"privacy": {"max_epsilon": 1.0}}, "max_epsilon is 1, but without noise"),
    ],
)
def test_settings_that_void_the_guarantee_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        JobConfig.model_validate(private_job().model_dump() | changes)
