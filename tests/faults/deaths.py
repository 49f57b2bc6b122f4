"""Jobs in which one service dies before or after one of its writes, and is started again."""

import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from killed_processes import restart

from collapipe.database import FILE_NAME
from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe_client import LocalTestbed
from collapipe_client.client import FINAL_STATES
from faults.dying_service import NO_DEATH, write_number
from faults.interrupted import (
    PATIENT_SECONDS,
    Run,
    final_digests,
    intact_commit,
    make_interruptible_job,
    run_interrupted,
)

VICTIMS = ("scheduler", "edge-server", "control-unit-0")
_SCRIPT = Path(__file__).with_name("dying_service.py")
_MANY = 1_000_000


class MortalTestbed(LocalTestbed):
    """A testbed whose services can end themselves at a write."""

    __test__ = False
    forks_hosts = False

    def death_file(self, name: str) -> Path:
        """Returns the file with the number of points that a service passes before it dies."""
        return self.workspace.run / f"death-of-{name}"

    def _command_line(self, name: str, listen: str, line: list[str]) -> list[str]:
        if name not in VICTIMS:
            return line
        wrapped = [sys.executable, str(_SCRIPT), *line[line.index("-m") + 1 :]]
        return ["env", f"DEATH_FILE={self.death_file(name)}", *wrapped]


@contextmanager
def running_testbed(folder: Path) -> Iterator[MortalTestbed]:
    """Starts a testbed with 3 devices in cluster 0 and one in cluster 1. Checks that no process remains."""
    with MortalTestbed([3, 1], folder) as testbed:
        testbed.wait_until_registered()
        yield testbed
        processes = testbed.processes
    assert [process.name for process in processes if process.alive] == []


def run_with_death(testbed: MortalTestbed, folder: Path, name: str, point: int) -> tuple[Run, bool]:
    """Runs a job in which a service dies at a point, from 0, and is started again. Returns also whether it died: the point may come
    after the job."""
    file = testbed.death_file(name)

    def let_die(run: Run) -> None:
        write_number(file, point + 1)
        while not run.ended:
            if name in testbed.lost():
                restart(testbed, name)
                return
            time.sleep(0.05)

    try:
        job = make_interruptible_job(folder, PATIENT_SECONDS)
        run = run_interrupted(testbed, job, lambda run: bool(run.job_id), let_die)
        return run, int(file.read_text()) == NO_DEATH
    finally:
        write_number(file, NO_DEATH)
        if name in testbed.lost():  # It died when the job had just ended.
            restart(testbed, name)
        testbed.wait_until_registered()
        with testbed.client() as client:
            for left in client.jobs():
                if left.state not in FINAL_STATES:
                    client.cancel(left.job_id)


def count_points(testbed: MortalTestbed, folder: Path, name: str) -> int:
    """Returns how many points a service passes in a job."""
    file = testbed.death_file(name)

    def count(run: Run) -> None:
        write_number(file, _MANY)
        while not run.ended:
            time.sleep(0.05)

    job = make_interruptible_job(folder, PATIENT_SECONDS)
    run = run_interrupted(testbed, job, lambda run: bool(run.job_id), count)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    left = int(file.read_text())
    write_number(file, NO_DEATH)
    return _MANY - left


def check_nothing_is_lost(run: Run, undisturbed: list[str]) -> None:
    """Checks that a job has succeeded with the bits of an undisturbed one, and that the result of each round is stored."""
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert final_digests(intact_commit(run)) == undisturbed
    with closing(sqlite3.connect(run.state / "scheduler" / FILE_NAME)) as database:
        statement = "SELECT round_index FROM result WHERE job_id = ? ORDER BY round_index"
        found = [index for (index,) in database.execute(statement, (run.job_id,))]
    assert found == list(range(run.job.training.rounds)), run.messages
