"""A job with a planted problem warns those who watch it, and clients see what its hosts do."""

from pathlib import Path

from reference.tiny_jobs import make_job

from collapipe.v1.scheduler_pb2 import WARNING_CODE_FEW_ROWS, WARNING_CODE_LONG_WARM_UP
from collapipe_client import LocalTestbed


def test_warnings_come_before_the_first_round_and_a_snapshot_shows_the_hosts(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    training = {"warm_up_steps": 99, "local_steps": 3, "rounds": 2}
    job = make_job(tmp_path, devices_per_cluster=2, training=training)
    with testbed.client() as client:
        job_id = client.submit(job)
        warned: list[int] = []
        kinds, snapshots = [], []
        for event in client.watch(job_id):
            kinds.append(event.WhichOneof("event"))
            if event.HasField("warning"):
                warned.append(event.warning.code)
            if event.HasField("progress"):
                snapshots.append(client.snapshot(job_id, [0]))
    assert warned[:2] == [WARNING_CODE_LONG_WARM_UP, WARNING_CODE_FEW_ROWS]
    assert kinds.index("warning") < kinds.index("round_started")
    shown = [snapshot["details"]["0"]["pipeline"] for snapshot in snapshots]
    pipeline = next(one for one in shown if one)
    assert [host["units"] for host in (pipeline[0], pipeline[-1])] == ["embedding", "head"]
    assert all(snapshot["status"]["id"] == job_id for snapshot in snapshots)
