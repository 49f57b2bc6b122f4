"""Tests that kill one process at a given moment: the last commit stays intact, and the job resumes."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_processes import kill, restart

from collapipe.v1.scheduler_pb2 import JOB_STATE_FAILED
from collapipe_client import LocalTestbed
from faults.interrupted import (
    MOMENTS,
    Run,
    final_digests,
    intact_commit,
    make_interruptible_job,
    resume,
    run_interrupted,
    undisturbed_digests,
)

pytestmark = pytest.mark.heavy

VICTIMS: dict[str, Callable[[Run], str]] = {
    "scheduler": lambda run: "scheduler",
    "edge server": lambda run: "edge-server",
    "control unit": lambda run: "control-unit-0",
    "middle device": lambda run: run.plans[0].stages[2].host_id,
    "last device": lambda run: run.plans[0].stages[-2].host_id,
}


CASES = [
    *itertools.product(("scheduler", "edge server", "control unit"), MOMENTS),
    *itertools.product(["middle device"], ("configure", "step", "committed")),
    *itertools.product(["last device"], ("configure", "copy", "commit")),
]


@pytest.mark.parametrize(("victim", "moment"), CASES)
def test_job_resumes_bit_for_bit_after_a_kill(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path, victim: str, moment: str
) -> None:
    job = make_interruptible_job(tmp_path)
    killed: list[str] = []

    def kill_victim(run: Run) -> None:
        killed.append(VICTIMS[victim](run))
        kill(testbed, killed[0])

    broken = run_interrupted(testbed, job, MOMENTS[moment], kill_victim)
    assert killed, f"the job ended before the moment of the kill: {broken}"
    assert testbed.lost() == killed
    assert intact_commit(broken).num_rounds in (1, 2)
    restart(testbed, killed[0])
    with testbed.client() as client:
        status = client.find_job(broken.job_id)
    assert status.state == JOB_STATE_FAILED
    assert killed[0] in status.message
    assert final_digests(intact_commit(resume(testbed, broken))) == undisturbed


def test_job_repeats_all_rounds_if_nothing_was_copied_before_a_device_died(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path
) -> None:
    job = make_interruptible_job(tmp_path, training={"replicate_every": 10})
    killed: list[str] = []

    def kill_victim(run: Run) -> None:
        killed.append(VICTIMS["last device"](run))
        kill(testbed, killed[0])

    broken = run_interrupted(testbed, job, MOMENTS["committed"], kill_victim)
    commit = intact_commit(broken)
    assert (commit.num_rounds, commit.restore_point.num_rounds) == (2, 0)
    restart(testbed, killed[0])
    assert final_digests(intact_commit(resume(testbed, broken))) == undisturbed


@pytest.mark.parametrize(
    "overrides",
    [{"training": {"upload_codecs": ["int8"]}}, {"lora": {"lora_dropout": 0.1}}],
    ids=["lossy uploads", "LoRA"],
)
def test_job_with_other_weights_resumes_bit_for_bit(
    testbed: LocalTestbed, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    undisturbed = undisturbed_digests(testbed, tmp_path, **overrides)
    job = make_interruptible_job(tmp_path, **overrides)
    killed: list[str] = []

    def kill_victim(run: Run) -> None:
        killed.append(VICTIMS["middle device"](run))
        kill(testbed, killed[0])

    broken = run_interrupted(testbed, job, MOMENTS["step"], kill_victim)
    assert broken.plans[0].upload_codec == ("int8" if "training" in overrides else "")
    commit = intact_commit(broken)
    assert commit.num_rounds == 1
    restart(testbed, killed[0])
    if "lora" in overrides:
        # One file of frozen weights is gone on the edge server, and one is damaged on a device.
        folder = testbed.workspace.state
        (folder / "edge-server" / "frozen" / commit.global_units[1].frozen_digest).unlink()
        stage = broken.plans[0].stages[2]
        digest = commit.global_units[stage.start_unit].frozen_digest
        (folder / stage.host_id / "frozen" / digest).write_bytes(b"garbage")
    assert final_digests(intact_commit(resume(testbed, broken))) == undisturbed
