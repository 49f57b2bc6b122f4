"""Tests that activations go directly between devices, and that jobs use new rows and measured speeds."""

import itertools
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from reference.tiny_jobs import make_job, write_rows

from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe_client import LocalTestbed
from integration.exactness import check_placement, identities
from integration.running import FinishedJob, run_job

Traffic = Counter[tuple[str, str, str]]
"""Number of bytes by (host, direction, way), as in the labels of collapipe_link_bytes_total."""


def test_activations_between_devices_bypass_other_hosts(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(tmp_path, num_blocks=6, devices_per_cluster=4, name="long")
    before = traffic(testbed)
    finished = run_job(testbed, job)
    moved = traffic(testbed)
    moved.subtract(before)
    check_placement(job, finished)

    pipeline = [stage.host_id for stage in finished.plans(0)[0].stages]
    assert pipeline[0] == "control-unit-0" and pipeline[-1] == "edge-server"
    for earlier, later in itertools.pairwise(pipeline):
        for direction, sender, receiver in (
            ("forward", earlier, later),
            ("backward", later, earlier),
        ):
            sent = moved[sender, direction, "sent"]
            assert sent > 0
            assert sent == moved[receiver, direction, "received"]

    # The control unit and the edge server carry only the traffic of the link at their end of the pipeline.
    for host, directions in (
        ("control-unit-0", {"forward": "sent", "backward": "received"}),
        ("edge-server", {"forward": "received", "backward": "sent"}),
    ):
        for direction, way in directions.items():
            opposite = {"sent": "received", "received": "sent"}[way]
            assert moved[host, direction, way] > 0
            assert moved[host, direction, opposite] == 0
    between_devices = sum(moved[device, "forward", "sent"] for device in pipeline[1:-2]) + sum(
        moved[device, "backward", "sent"] for device in pipeline[2:-1]
    )
    carried_by_others = sum(
        count for (host, _, _), count in moved.items() if not host.startswith("device")
    )
    assert between_devices > carried_by_others  # 5 links between devices, and 2 links at the ends
    assert not any(moved[host, d, w] for host, d, w in moved if host not in pipeline)
    assert not any(host == "scheduler" for host, _, _ in moved)


def test_traffic_of_control_unit_does_not_grow_with_the_number_of_devices(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    carried = []
    for devices in (1, 4):
        before = traffic(testbed)
        run_job(testbed, make_job(tmp_path, num_blocks=6, devices_per_cluster=devices))
        moved = traffic(testbed)
        moved.subtract(before)
        carried.append({key: moved[key] for key in moved if key[0] == "control-unit-0"})
    assert carried[0] == carried[1]


def test_rows_that_arrive_between_rounds_are_trained_without_restart(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(
        tmp_path, devices_per_cluster=2, training={"rounds": 20, "local_steps": 1}, name="online"
    )
    assert isinstance(job.data.train, list)
    rows, more = Path(job.data.train[0]), Path(write_rows(tmp_path, "classification", "more", 12))
    before = identities(testbed)
    appended_after = 0
    with testbed.client() as client:
        job_id = client.submit(job)
        finished = FinishedJob(job, job_id, testbed.workspace.state)
        for event in client.watch(job_id):
            if event.HasField("status"):
                last = event.status
            elif event.HasField("round_committed") and not appended_after:
                with open(rows, "a", encoding="utf-8") as file:
                    file.write(more.read_text())
                appended_after = event.round_committed.num_rounds
    assert last.state == JOB_STATE_SUCCEEDED, last.message
    assert appended_after == 1
    (cluster,) = finished.commit.clusters
    assert cluster.num_samples == cluster.cursor.num_rows == 21 + 12
    assert cluster.cursor.epoch >= 1  # an epoch over all rows has begun
    assert identities(testbed) == before


def test_proportional_placement_follows_the_speeds(testbed: LocalTestbed, tmp_path: Path) -> None:
    job = make_job(
        tmp_path, num_blocks=7, devices_per_cluster=4, schedule={"strategy": "proportional"}
    )
    finished = run_job(testbed, job)
    first = finished.plans(0)[0]  # Later plans may rest on measured speeds.
    blocks = {s.host_id: s.stop_unit - s.start_unit for s in first.stages[1:-1]}
    assert blocks == {"device-0-0": 1, "device-0-1": 2, "device-0-2": 4}


def traffic(testbed: LocalTestbed) -> Traffic:
    """Returns the bytes that each process has exchanged with its neighbours in pipelines so far."""
    counted: Traffic = Counter()
    for process in testbed.processes:
        text = testbed.metrics(process.name)
        assert "collapipe_process_peak_resident_memory_bytes" in text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "collapipe_link_bytes_total":
                    direction, way = sample.labels["direction"], sample.labels["way"]
                    counted[process.name, direction, way] += int(sample.value)
    return counted
