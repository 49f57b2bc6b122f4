"""Jobs with differential privacy on real processes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.federated_job import train_job
from reference.tiny_jobs import make_job
from torch import Tensor

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.scheduler.privacy_account import PrivacyAccount
from collapipe.v1.scheduler_pb2 import JobStatus
from collapipe_client import LocalTestbed
from integration.running import run_job

LORA = {"r": 4, "target_modules": "all-linear"}


def private_job(folder: Path, name: str, privacy: dict[str, Any], **changes: Any) -> JobConfig:
    # Equal numbers of rows, so that the reference weights clusters equally.
    changes = {"num_rows": (24, 24, 24), "devices_per_cluster": 1, **changes}
    return make_job(folder, name=name, privacy=privacy, **changes)


def status_of(testbed: LocalTestbed, job_id: str) -> JobStatus:
    with testbed.client() as client:
        return client.find_job(job_id)


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].double().reshape(-1) for name in sorted(weights)])


def test_hardly_any_noise_and_a_large_bound_give_plain_averages(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = private_job(tmp_path, "plain", {"noise_multiplier": 1e-12, "clip_norm": 1e3})
    finished = run_job(testbed, job)
    expected = flat(train_job(job).weights)
    assert torch.allclose(flat(finished.weights()), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_average_has_the_noise_of_all_clusters(
    testbed: LocalTestbed, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    changes: dict[str, Any] = {"family": "llama", "kind": "causal_lm", "lora": lora}
    changes["training"] = {"rounds": 1}
    clean, noisy = (
        run_job(
            testbed,
            private_job(
                tmp_path, f"noise-{z}", {"noise_multiplier": z, "clip_norm": 0.1}, **changes
            ),
        )
        for z in (1e-9, 2.0)
    )
    before, after = clean.weights(), noisy.weights()
    trained = {name for name in after if lora is None or "lora" in name}
    assert all(torch.equal(before[name], after[name]) for name in after.keys() - trained)
    noise = flat({name: after[name] - before[name] for name in trained})
    # Each of three clusters adds 1 / sqrt(2) of the noise, and the sum is divided by 3.
    expected = 2.0 * 0.1 * math.sqrt(3 / 2) / 3
    assert noise.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * len(noise)))
    for plain, private in zip(clean.summaries[0], noisy.summaries[0], strict=True):
        assert [one.bytes for one in plain.pushed] == [one.bytes for one in private.pushed]


def test_repeated_round_has_the_same_noise_and_counts_again(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    privacy = {"noise_multiplier": 1.0, "clip_norm": 0.1}
    training = {"rounds": 3, "replicate_every": 2}
    job = private_job(tmp_path, "repeated", privacy, training=training)
    first = run_job(testbed, job)
    before = status_of(testbed, first.job_id).privacy_loss
    assert before.epsilon == PrivacyAccount().after_rounds(job, 3).loss(job).epsilon
    with testbed.client() as client:
        client.rollback(first.job_id, first.commit.restore_point.num_rounds)
    assert status_of(testbed, first.job_id).privacy_loss == before
    again = run_job(testbed, job, resume=True)
    assert list(again.commit.global_units) == list(first.commit.global_units)
    assert [started.round_index for started in again.started] == [2]
    loss = status_of(testbed, first.job_id).privacy_loss
    assert loss.epsilon == PrivacyAccount().after_rounds(job, 4).loss(job).epsilon
    assert loss.update_epsilon > loss.epsilon


def test_job_ends_before_the_round_that_would_reveal_too_much(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    privacy = {"noise_multiplier": 4.0, "clip_norm": 0.1}
    job = private_job(tmp_path, "bounded", privacy, training={"rounds": 5})
    epsilons = [PrivacyAccount().after_rounds(job, n).loss(job).epsilon for n in (2, 3)]
    limit = sum(epsilons) / 2
    bounded = job.model_copy(
        update={"privacy": job.privacy.model_copy(update={"max_epsilon": limit})}
    )
    finished = run_job(testbed, bounded)
    status = status_of(testbed, finished.job_id)
    assert (finished.commit.num_rounds, status.num_rounds_committed) == (2, 2)
    assert status.privacy_loss.epsilon == epsilons[0] < limit
    assert "ended after 2 of 5 rounds" in status.message
    assert "privacy.max_epsilon" in status.message
    assert finished.evaluations[-1].num_rounds == 2

    resumed = run_job(testbed, bounded, resume=True)
    assert resumed.started == []
    assert list(resumed.commit.global_units) == list(finished.commit.global_units)

    # A larger epsilon lets it go on.
    longer = run_job(testbed, job, resume=True)
    assert longer.commit.num_rounds == 5
    assert status_of(testbed, finished.job_id).privacy_loss.epsilon >= epsilons[1]


def test_job_that_may_not_train_a_round_is_refused(testbed: LocalTestbed, tmp_path: Path) -> None:
    job = private_job(tmp_path, "refused", {"noise_multiplier": 0.5, "max_epsilon": 1.0})
    with testbed.client() as client, pytest.raises(InvalidInputError, match="one round"):
        client.submit(job)
