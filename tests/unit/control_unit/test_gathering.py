"""What a control unit reports about the unit states that it gathers."""

from pathlib import Path

from reference.tiny_jobs import make_job

from .clusters import MakeCluster, Ranges

SPREAD: Ranges = [("control-unit-0", 0, 1), ("device-0-0", 1, 4), ("edge-server", 4, 5)]


def test_report_has_the_bytes_that_each_device_sent(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(make_job(tmp_path))
    cluster.run_round(SPREAD)
    blobs = cluster.folder / "control-unit-0" / "jobs" / "job" / "blobs"
    units = cluster.commit.clusters[0].units[1:4]
    digests = [digest for unit in units for digest in (unit.weights_digest, unit.optimizer_digest)]
    total = sum((blobs / digest).stat().st_size for digest in digests)
    assert cluster.gathered == [{"device-0-0": total}]


def test_device_whose_state_did_not_change_is_not_reported(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(make_job(tmp_path))
    cluster.run_round(SPREAD)
    cluster.run_round(SPREAD, evaluate=True, train=False)
    assert cluster.gathered[0] and not cluster.gathered[1]
