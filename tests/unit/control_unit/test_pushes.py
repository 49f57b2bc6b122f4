"""What a control unit reports about the weights that move between its hosts and the edge server."""

from pathlib import Path

from reference.tiny_jobs import make_job

from .clusters import MakeCluster, Ranges

SPREAD: Ranges = [("control-unit-0", 0, 1), ("device-0-0", 1, 4), ("edge-server", 4, 5)]


def test_report_has_the_bytes_of_every_host_but_the_edge_server(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(make_job(tmp_path))
    cluster.run_round(SPREAD)
    blobs = cluster.folder / "edge-server" / "jobs" / "job" / "blobs"
    sizes = [(blobs / u.weights_digest).stat().st_size for u in cluster.commit.global_units]
    moved = {"control-unit-0": sizes[0], "device-0-0": sum(sizes[1:4])}
    assert cluster.pushed == [moved]
    assert cluster.fetched == [moved]  # the initial weights, which have the same sizes


def test_hosts_that_have_their_weights_fetch_nothing(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(make_job(tmp_path))
    cluster.run_round(SPREAD)
    cluster.run_round(SPREAD)
    assert cluster.fetched[1] == {}


def test_round_that_only_evaluates_pushes_nothing(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(make_job(tmp_path))
    cluster.run_round(SPREAD, evaluate=True, train=False)
    assert cluster.pushed == [{}]
