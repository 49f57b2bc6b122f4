"""Tests that rounds do not wait for a cluster that is too slow, and that it takes part again later."""

from pathlib import Path
from typing import Any

from reference.tiny_jobs import make_job

from collapipe.emulation.device_profiles import DEVICE_PROFILES
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.job import JobConfig
from collapipe_client import LocalTestbed
from integration.exactness import check_equals_reference
from integration.running import FinishedJob, run_job
from integration.test_uploads import check_equals_one_process

PROFILE = "raspberry-pi-4"
SLOW = Emulation(
    devices={
        # A second for each micro-batch
        "device-1-1": EmulatedDevice(
            profile=PROFILE, slowdown=1 / DEVICE_PROFILES[PROFILE].seconds_per_micro_batch
        )
    }
)


def job_with_deadline(
    folder: Path, name: str, rule: str = "leave_out", **training: Any
) -> JobConfig:
    """Returns a job whose slow cluster would need 16 s for a round, but gets 4 s. Blocks move in every round."""
    return make_job(
        folder,
        name=name,
        num_rows=(21, 33),
        devices_per_cluster=2,
        training={"local_steps": 4, "decay": "constant", **training},
        schedule={
            "strategy": "manual",
            "segments": [[1, 2], [2, 1]],
            "round_deadline_seconds": 4,
            "min_clusters": 1,
            "late_clusters": rule,
        },
    )


def run_with_a_slow_cluster(testbed: LocalTestbed, job: JobConfig, times: int = 2) -> FinishedJob:
    """Runs a job. From the second round on, cluster 1 is slow until it was late `times` times."""
    num_late = 0

    def on_event(event: Any) -> None:
        nonlocal num_late
        if event.HasField("round_started") and event.round_started.round_index == 1:
            testbed.emulate(SLOW)
        elif event.HasField("round_committed"):
            summary = event.round_committed.summaries[1]
            num_late += summary.local_steps < job.training.local_steps
            if num_late == times:
                testbed.emulate(Emulation())

    try:
        finished = run_job(testbed, job, on_event=on_event)
    finally:
        testbed.emulate(Emulation())
    assert num_late >= times
    return finished


def test_rounds_are_committed_without_a_slow_cluster_and_then_with_it_again(
    emulated_testbed: LocalTestbed, tmp_path: Path
) -> None:
    training = {"rounds": 8, "replicate_every": 2, "upload_codecs": ["int8"]}
    job = job_with_deadline(tmp_path, "late", **training)
    finished = run_with_a_slow_cluster(emulated_testbed, job)
    assert finished.late_clusters[7] == [], finished.late_clusters
    late = next(index for index, clusters in finished.late_clusters.items() if clusters == [1])
    assert not finished.summaries[late][1].losses
    check_equals_one_process(job, finished)
    assert finished.commit.restore_point.num_rounds == 8


def test_repeated_rounds_have_the_same_clusters_and_the_same_bits(
    emulated_testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = job_with_deadline(tmp_path, "repeating", rounds=4, replicate_every=10)
    first = run_with_a_slow_cluster(emulated_testbed, job, times=1)
    assert first.commit.restore_point.num_rounds == 0
    longer = {
        "training": job.training.model_copy(update={"rounds": 6, "replicate_every": 6}),
        "schedule": job.schedule.model_copy(update={"round_deadline_seconds": 0.0}),
    }
    job = job.model_copy(update=longer)
    again = run_job(emulated_testbed, job, resume=True)
    assert [started.round_index for started in again.started] == list(range(6))
    assert again.late_clusters == {**first.late_clusters, 4: [], 5: []}
    assert again.losses(1)[: len(first.losses(1))] == first.losses(1)
    # The optimizer states, too: a late cluster goes on from those of its last committed round.
    check_equals_reference(job, again)


def test_late_cluster_ends_early_and_counts_for_what_it_has_trained(
    emulated_testbed: LocalTestbed, tmp_path: Path
) -> None:
    training = {"rounds": 6, "replicate_every": 2, "upload_codecs": ["int8"]}
    job = job_with_deadline(tmp_path, "early", "end_early", **training)
    finished = run_with_a_slow_cluster(emulated_testbed, job)
    assert not any(finished.late_clusters.values())
    assert {cluster for _, cluster in finished.ended_early} == {1}, finished.ended_early
    check_equals_one_process(job, finished)


def test_repeated_rounds_end_early_after_the_same_steps_without_a_deadline(
    emulated_testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = job_with_deadline(tmp_path, "early-again", "end_early", rounds=4, replicate_every=10)
    first = run_with_a_slow_cluster(emulated_testbed, job, times=1)
    schedule = job.schedule.model_copy(update={"round_deadline_seconds": 0.0})
    training = job.training.model_copy(update={"rounds": 5, "replicate_every": 5})
    job = job.model_copy(update={"schedule": schedule, "training": training})
    again = run_job(emulated_testbed, job, resume=True)
    assert [started.round_index for started in again.started] == list(range(5))
    assert again.ended_early == first.ended_early
    check_equals_reference(job, again)
