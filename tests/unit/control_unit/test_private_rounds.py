"""Private updates of a cluster: the same bits wherever units run, and whenever a round is repeated."""

import stat
from pathlib import Path

import torch
from reference.comparison import first_difference
from reference.tiny_jobs import make_job
from torch import Tensor

from collapipe.job import JobConfig

from .clusters import JOB_ID, Cluster, MakeCluster, Ranges

PLACEMENTS: dict[str, Ranges] = {
    "one host": [("control-unit-0", 0, 5)],
    "three hosts": [("control-unit-0", 0, 1), ("device-0-0", 1, 4), ("edge-server", 4, 5)],
    "four hosts": [
        ("control-unit-0", 0, 1),
        ("device-0-0", 1, 2),
        ("device-0-1", 2, 4),
        ("edge-server", 4, 5),
    ],
}
SECRET = bytes(range(32))


def private_job(folder: Path, noise_multiplier: float = 0.5, clip_norm: float = 0.25) -> JobConfig:
    return make_job(folder, privacy={"noise_multiplier": noise_multiplier, "clip_norm": clip_norm})


def secret_file(cluster: Cluster) -> Path:
    return cluster.folder / "control-unit-0" / "jobs" / JOB_ID / "noise-secret"


def run_rounds(cluster: Cluster, *placements: str) -> dict[str, Tensor]:
    """Returns the weights after a round with each placement."""
    cluster.start("device-0-1")
    secret_file(cluster).write_bytes(SECRET)
    for placement in placements:
        cluster.run_round(PLACEMENTS[placement])
    return cluster.weights()


def test_placement_changes_no_bit_of_a_private_job(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    job = private_job(tmp_path)
    spread = make_cluster(job, "spread")
    moving = make_cluster(job, "moving")
    expected = run_rounds(spread, "three hosts", "three hosts", "three hosts")
    found = run_rounds(moving, "one host", "four hosts", "three hosts")
    assert moving.losses == spread.losses
    assert first_difference(expected, found) is None


def test_repeated_round_pushes_the_same_bytes(make_cluster: MakeCluster, tmp_path: Path) -> None:
    job = private_job(tmp_path)
    training = job.training.model_copy(update={"replicate_every": 10})
    cluster = make_cluster(job.model_copy(update={"training": training}))
    cluster.run_round(PLACEMENTS["three hosts"])
    first = [unit.weights_digest for unit in cluster.commit.global_units]
    for name in ("control-unit-0", "device-0-0", "device-0-1", "edge-server"):
        cluster.start(name)
    cluster.prepare()
    assert cluster.commit.num_rounds == 0, "the round is repeated"
    cluster.run_round(PLACEMENTS["four hosts"])
    assert [unit.weights_digest for unit in cluster.commit.global_units] == first


def test_only_the_owner_reads_the_secret_of_the_noise(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(private_job(tmp_path))
    cluster.run_round(PLACEMENTS["one host"])
    path = secret_file(cluster)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_bytes()) == 32


def test_whole_change_of_a_round_has_the_bound(make_cluster: MakeCluster, tmp_path: Path) -> None:
    norms = []
    for clip_norm in (0.25, 1e6):
        cluster = make_cluster(private_job(tmp_path, 1e-9 / clip_norm, clip_norm), f"{clip_norm}")
        before = cluster.weights()
        cluster.run_round(PLACEMENTS["three hosts"])
        after = cluster.weights()
        changes = [(after[name] - before[name]).double().reshape(-1) for name in after]
        norms.append(float(torch.cat(changes).norm()))
    assert norms[0] <= 0.25 * (1 + 1e-5)
    assert norms[1] > 2 * norms[0]
