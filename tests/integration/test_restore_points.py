"""Tests that a resumed job repeats the rounds since its restore point with the same bits."""

from pathlib import Path

from reference.tiny_jobs import make_job

from collapipe_client import LocalTestbed
from integration.running import run_job


def test_job_that_gets_more_rounds_repeats_its_rounds_bit_for_bit(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    # The learning rate depends on the number of rounds, and the files grow between the runs.
    training = {"rounds": 3, "replicate_every": 10, "decay": "linear"}
    job = make_job(tmp_path, name="longer", devices_per_cluster=2, training=training)
    first = run_job(testbed, job)
    assert first.commit.restore_point.num_rounds == 0
    with open(job.data.train[0], "a", encoding="utf-8") as file:
        file.write('{"text": "a new row", "label": "thing"}\n')
    changed = {"training": job.training.model_copy(update={"rounds": 4})}
    longer = job.model_copy(update=changed)
    with testbed.client() as client:
        answer = client.check_resume(longer)
    assert (answer.job.num_rounds_committed, answer.num_rounds_restorable) == (3, 0)
    second = run_job(testbed, longer, resume=True)
    assert {started.attempt for started in second.started} == {1}
    assert [started.round_index for started in second.started] == [0, 1, 2, 3]
    assert second.losses(0)[: len(first.losses(0))] == first.losses(0)
    assert second.commit.clusters[0].num_samples == first.commit.clusters[0].num_samples + 1


def test_restore_point_follows_the_job(testbed: LocalTestbed, tmp_path: Path) -> None:
    training = {"rounds": 7, "replicate_every": 2}
    job = make_job(tmp_path, name="following", devices_per_cluster=2, training=training)
    finished = run_job(testbed, job)
    assert finished.commit.restore_point.num_rounds == 6  # the final evaluation waits for its copy
    folder = testbed.workspace.state / "control-unit-0" / "jobs" / finished.job_id / "blobs"
    devices = finished.commit.restore_point.clusters[0].units[:-1]
    kept = {path.name for path in folder.iterdir()}
    assert {unit.optimizer_digest for unit in devices} <= kept
    # Without deletion there would be three restore points. The last but one stays until the next attempt begins.
    assert len(kept) <= 2 * len(devices) + 1, (
        "the control unit keeps more than that and the vocabulary"
    )
