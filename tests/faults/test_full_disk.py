"""Tests a full disk of the scheduler, the edge server or a control unit: the last commit stays intact."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reference.tiny_jobs import make_job
from stored_jobs import stored_ids

from collapipe.database import FILE_NAME
from collapipe.scheduler.job_store import JobStore
from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe_client import LocalTestbed
from faults.interrupted import (
    PATIENT_SECONDS,
    Run,
    check_unfinished,
    final_digests,
    intact_commit,
    make_interruptible_job,
    run_interrupted,
)

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk"),
]

_DISK_BYTES = 32 << 20
FULL_SECONDS = 5.0


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Mounts small file systems for the state of services."""
    names = ("scheduler", "edge-server", "control-unit-0")
    disks = {name: tmp_path / "testbed" / "state" / name for name in names}
    mounted: list[Path] = []
    try:
        for disk in disks.values():
            disk.mkdir(parents=True)
            line = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)]
            made = subprocess.run(line, capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"needs to mount a small disk: {made.stderr.strip()}")
            mounted.append(disk)
        yield disks
    finally:
        for disk in mounted:
            subprocess.run(["umount", str(disk)], check=True)


def test_message_names_the_full_disk_and_the_job_goes_on_when_there_is_space(
    small_disks: dict[str, Path], tmp_path: Path
) -> None:
    with LocalTestbed([3, 1], tmp_path / "testbed") as testbed:
        testbed.wait_until_registered()
        whole = run_interrupted(testbed, make_interruptible_job(tmp_path, PATIENT_SECONDS))
        assert whole.final_state == JOB_STATE_SUCCEEDED, whole.message
        for service, disk in small_disks.items():

            def fill_for_a_while(run: Run, disk: Path = disk) -> None:
                fill(disk)
                time.sleep(FULL_SECONDS)
                try:
                    check_unfinished(run)
                finally:
                    (disk / "filler").unlink()

            run = run_interrupted(
                testbed,
                make_interruptible_job(tmp_path),
                lambda run: run.round_index == 1,
                fill_for_a_while,
            )
            assert run.final_state == JOB_STATE_SUCCEEDED, run.message
            full = f"No space left on device: '{disk}/jobs/{run.job_id}/"
            if service != "edge-server":
                full = f"database or disk is full: '{disk / FILE_NAME}'"
            named = [message for message in run.messages if full in message]
            assert named, run.messages
            assert service.removeprefix("edge-") in named[0]
            assert testbed.lost() == []
            assert final_digests(intact_commit(run)) == final_digests(intact_commit(whole))


def fill(disk: Path) -> None:
    """Fills all free space of a disk."""
    with open(disk / "filler", "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 8, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_job_can_be_deleted_on_a_full_disk_also_after_a_restart(
    small_disks: dict[str, Path],
) -> None:
    disk = small_disks["scheduler"]
    store = JobStore(disk)
    job_ids = [store.create(make_job(disk / "data")).job_id for _ in range(2)]
    for job_id in job_ids:
        document = store.get(job_id)
        document.state = JOB_STATE_SUCCEEDED
        store.save(document)
        store.save_events(
            job_id, [{"number": 1, "at": 1.0, "kind": "STATUS", "text": "x" * 1_000_000}]
        )
    fill(disk)
    for job_id in job_ids:
        store.delete(job_id, "a test")
        store.give_room_back()
        store.close()
        fill(disk)
        store = JobStore(disk)
        assert job_id not in stored_ids(disk)
    assert store.deletions_after(0) == (job_ids, 2)
