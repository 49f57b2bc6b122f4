"""Tests that kill one process at a given moment: the job goes on by itself, to the same bits."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_processes import kill, restart

from collapipe.v1.scheduler_pb2 import (
    INCIDENT_CODE_HOSTS_CHANGED,
    JOB_STATE_FAILED,
    JOB_STATE_SUCCEEDED,
)
from collapipe_client import LocalTestbed
from faults.interrupted import (
    MOMENTS,
    PATIENT_SECONDS,
    SERVICES,
    Run,
    check_unfinished,
    final_digests,
    intact_commit,
    make_interruptible_job,
    resume,
    run_interrupted,
    tried_again,
    undisturbed_digests,
)

VICTIMS: dict[str, Callable[[Run], str]] = {
    **SERVICES,
    "last device": lambda run: run.plans[0].stages[-2].host_id,
}


CASES = [
    *itertools.product(["scheduler"], ("configure", "commit")),
    *itertools.product(["edge server"], ("step", "commit", "committed")),
    *itertools.product(["control unit"], ("configure", "copy")),
    *itertools.product(["middle device"], ("step", "committed")),
    *itertools.product(["last device"], ("commit",)),
]


class Killer:
    """Kills a process, and starts it again at once, or at the end of the test."""

    def __init__(self, testbed: LocalTestbed, victim: str) -> None:
        self.killed: list[str] = []
        self._testbed, self._victim = testbed, victim

    def kill(self, run: Run) -> None:
        self.killed = [VICTIMS[self._victim](run)]
        kill(self._testbed, self.killed[0])
        check_unfinished(run)

    def kill_and_restart(self, run: Run) -> None:
        self.kill(run)
        restart(self._testbed, self.killed[0])

    def restart(self) -> None:
        restart(self._testbed, self.killed[0])
        self._testbed.wait_until_registered()


@pytest.mark.parametrize(("victim", "moment"), CASES)
def test_job_goes_on_bit_for_bit_after_a_kill(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path, victim: str, moment: str
) -> None:
    killer = Killer(testbed, victim)
    # Two devices are left without the third, and the job does not wait for it.
    is_device = victim.endswith("device")
    inject = killer.kill if is_device else killer.kill_and_restart
    # Starting a process takes the machine's two cores for seconds.
    job = make_interruptible_job(tmp_path, 5.0 if is_device else PATIENT_SECONDS)
    run = run_interrupted(testbed, job, MOMENTS[moment], inject)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    if victim == "scheduler":
        assert {"SCHEDULER_RESTARTED", "RECOVERED"} <= set(run.codes()), run.incidents
    if is_device:
        assert testbed.lost() == killer.killed
        assert any(f"{killer.killed[0]} " in message for message in run.messages), run.messages
        changes = [i for i in run.incidents if i.code == INCIDENT_CODE_HOSTS_CHANGED]
        assert any(killer.killed[0] in change.host_ids for change in changes), run.incidents
        assert run.codes(killer.killed[0])[:2] == ["HOST_LOST", "HOSTS_CHANGED"], run.incidents
        killer.restart()
    assert final_digests(intact_commit(run)) == undisturbed
    assert testbed.lost() == []


def test_job_repeats_all_rounds_if_nothing_was_copied_before_a_device_died(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path
) -> None:
    job = make_interruptible_job(tmp_path, training={"replicate_every": 10})
    killer = Killer(testbed, "last device")
    run = run_interrupted(testbed, job, MOMENTS["committed"], killer.kill, hit=tried_again)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert run.attempts == {0, 1}
    killer.restart()
    assert final_digests(intact_commit(run)) == undisturbed


def test_job_that_is_killed_every_few_rounds_moves_its_restore_point(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    training = {"rounds": 6}
    undisturbed = undisturbed_digests(testbed, tmp_path, training=training)
    job = make_interruptible_job(
        tmp_path, PATIENT_SECONDS, training={**training, "replicate_every": 100}
    )

    def kill_after_three_commits(run: Run) -> None:
        for victim in ("edge-server", "scheduler", "edge-server"):
            before = len(run.commits)
            while len(run.commits) < before + 3:
                assert not run.final_state, run
                time.sleep(0.01)
            kill(testbed, victim)
            restart(testbed, victim)

    run = run_interrupted(testbed, job, lambda run: True, kill_after_three_commits)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    messages = [incident.message for incident in run.incidents if "repeats" in incident.message]
    restored = [int(message.rpartition(" ")[2]) for message in messages]
    assert restored == sorted({0, *restored}), "each attempt goes on from a later restore point"
    assert final_digests(intact_commit(run)) == undisturbed


def test_only_the_cluster_that_lost_a_device_repeats_rounds(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    # What lossy uploads have lost belongs to the optimizer states, which must come out equal.
    lossy = {"upload_codecs": ["int8"]}
    undisturbed = undisturbed_digests(testbed, tmp_path, training=lossy)
    job = make_interruptible_job(tmp_path, training={"replicate_every": 10, **lossy})
    killer = Killer(testbed, "middle device")
    run = run_interrupted(
        testbed,
        job,
        lambda run: run.round_index == 2 and run.steps_done >= 1,
        killer.kill,
        hit=tried_again,
    )
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert [incident.message for incident in run.incidents if "repeats" in incident.message] == [
        "repeats 2 committed rounds and round 3 without cluster 1, whose results of this round are kept"
    ]
    killer.restart()
    assert final_digests(intact_commit(run)) == undisturbed


def test_job_without_retries_fails_names_the_process_and_resumes(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path
) -> None:
    job = make_interruptible_job(tmp_path)
    schedule = job.schedule.model_copy(update={"retry_seconds": 0.0})
    job = job.model_copy(update={"schedule": schedule})
    killer = Killer(testbed, "middle device")
    broken = run_interrupted(testbed, job, MOMENTS["step"], killer.kill)
    assert broken.final_state == JOB_STATE_FAILED
    assert killer.killed[0] in broken.message
    killer.restart()
    assert final_digests(intact_commit(resume(testbed, broken))) == undisturbed


@pytest.mark.parametrize(
    "overrides",
    [{"training": {"upload_codecs": ["int8"]}}, {"lora": {"lora_dropout": 0.1}}],
    ids=["lossy uploads", "LoRA"],
)
def test_job_with_other_weights_goes_on_bit_for_bit(
    testbed: LocalTestbed, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    undisturbed = undisturbed_digests(testbed, tmp_path, **overrides)
    killer = Killer(testbed, "middle device")

    def disturb(run: Run) -> None:
        assert run.plans[0].upload_codec == ("int8" if "training" in overrides else "")
        if "lora" in overrides:
            # One file of frozen weights is gone on the edge server, and one is damaged on the device that starts again.
            folder, commit = testbed.workspace.state, intact_commit(run)
            (folder / "edge-server" / "frozen" / commit.global_units[1].frozen_digest).unlink()
            stage = run.plans[0].stages[2]
            digest = commit.global_units[stage.start_unit].frozen_digest
            (folder / stage.host_id / "frozen" / digest).write_bytes(b"garbage")
        killer.kill_and_restart(run)

    job = make_interruptible_job(tmp_path, PATIENT_SECONDS, **overrides)
    run = run_interrupted(testbed, job, MOMENTS["step"], disturb)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert final_digests(intact_commit(run)) == undisturbed
