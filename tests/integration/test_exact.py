"""Tests that training through real services equals a plain loop in one process bit for bit: invariant I1."""

import itertools
from pathlib import Path

import pytest
from reference.job_matrix import Case, name_of, pairwise
from reference.tiny_jobs import make_job

from collapipe_client import LocalTestbed
from integration.exactness import (
    check_case,
    check_equals_reference,
    check_placement,
    identities,
    owner_of_units,
)
from integration.running import run_job

CASES = pairwise()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_services_equal_reference(testbed: LocalTestbed, tmp_path: Path, case: Case) -> None:
    """Each pair of settings occurs in a case. The campaign runs more of their product."""
    check_case(testbed, tmp_path, case)


def test_blocks_move_between_rounds_with_their_optimizer_state(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(
        tmp_path,
        num_blocks=6,
        devices_per_cluster=3,
        training={"rounds": 3},
        schedule={"strategy": "manual", "segments": [[1, 3, 2], [3, 2, 1], [1, 1, 4]]},
    )
    before = identities(testbed)
    finished = run_job(testbed, job)
    check_placement(job, finished)
    check_equals_reference(job, finished)

    assert identities(testbed) == before, "a process was restarted"
    assert {started.attempt for started in finished.started} == {0}
    owners = [owner_of_units(plan) for plan in finished.plans(0)]
    for index, (earlier, now) in enumerate(itertools.pairwise(owners), start=1):
        moved = [unit for unit in now if now[unit] != earlier[unit]]
        assert moved
        # With one cluster, averaging changes nothing. So a host that keeps a unit need not fetch it.
        fetched = finished.summaries[index][0].fetched_bytes
        assert fetched == sum(finished.unit_bytes(unit) for unit in moved)


def test_half_blocks_change_no_bit_without_dropout(testbed: LocalTestbed, tmp_path: Path) -> None:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    job = make_job(tmp_path, half_blocks=True, devices_per_cluster=3, model_config=dropout)
    finished = run_job(testbed, job)
    whole = job.model_copy(update={"model": job.model.model_copy(update={"half_blocks": False})})
    check_equals_reference(whole, finished)


def test_half_blocks_placed_by_their_profile_equal_reference(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    schedule = {"strategy": "proportional"}
    job = make_job(tmp_path, half_blocks=True, devices_per_cluster=3, schedule=schedule)
    check_equals_reference(job, run_job(testbed, job))


def test_devices_with_little_memory_recompute_as_the_plan_says(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    # Two blocks have room for one micro-batch of one row. So without recomputation, the first device would starve the
    # second. Whether the second recomputes as well depends on the measured round trip.
    job = make_job(
        tmp_path,
        num_blocks=4,
        use_clusters=[4],
        training={"recompute": "auto"},
        schedule={"strategy": "dssra", "num_micro_batches": 8},
    )
    finished = run_job(testbed, job)
    for plan in finished.plans(0):
        assert any(stage.recompute for stage in plan.stages)
    check_equals_reference(job, finished)
