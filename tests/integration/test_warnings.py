"""A job with a planted problem warns those who watch it, and clients see what its hosts do."""

from pathlib import Path
from typing import Any

from reference.tiny_jobs import make_job

from collapipe.v1.scheduler_pb2 import WARNING_CODE_FEW_ROWS, WARNING_CODE_LONG_WARM_UP
from collapipe_client import LocalTestbed


def test_warnings_come_before_the_first_round_and_a_snapshot_shows_the_hosts(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    training = {"warm_up_steps": 999, "local_steps": 3, "rounds": 300}
    job = make_job(tmp_path, devices_per_cluster=2, training=training)
    with testbed.client() as client:
        job_id = client.submit(job)
        warned: list[int] = []
        kinds: list[str | None] = []
        pipeline: list[dict[str, Any]] = []
        for event in client.watch(job_id):
            kinds.append(event.WhichOneof("event"))
            if event.HasField("warning"):
                warned.append(event.warning.code)
            if event.HasField("progress") and not pipeline:
                snapshot = client.snapshot(job_id, [0])
                assert snapshot["status"]["id"] == job_id
                if pipeline := snapshot["details"]["0"]["pipeline"]:
                    client.cancel(job_id)
    assert warned[:2] == [WARNING_CODE_LONG_WARM_UP, WARNING_CODE_FEW_ROWS]
    assert kinds.index("warning") < kinds.index("round_started")
    assert [host["units"] for host in (pipeline[0], pipeline[-1])] == ["embedding", "head"]
