"""Assigns the rows of a shared file to clusters.

Every control unit reads the whole file and keeps the rows of its cluster. So the cluster of a row
depends only on the seed, the position of the row and, for Dirichlet sharding, its label. Appended
rows follow the same rule and never move earlier rows.
"""

from collections.abc import Sequence

import numpy as np

from collapipe.data import stable_random


def iid_clusters(seed: int, num_clusters: int, start: int, count: int) -> list[int]:
    """Returns the cluster of each of the rows `start` to `start + count`, evenly at random.

    Each run of `num_clusters` rows has one row for each cluster, in a random order. So the numbers of
    rows of two clusters never differ by more than 1.
    """
    first_run = start // num_clusters
    num_runs = -(-(start + count) // num_clusters) - first_run
    words = stable_random.words(
        "iid", seed, num_clusters, start=first_run * num_clusters, count=num_runs * num_clusters
    )
    orders = np.argsort(words.reshape(num_runs, num_clusters), axis=1, kind="stable").ravel()
    skipped = start - first_run * num_clusters
    clusters: list[int] = orders[skipped : skipped + count].tolist()
    return clusters


def dirichlet_clusters(
    seed: int, num_clusters: int, alpha: float, start: int, groups: Sequence[str]
) -> list[int]:
    """Returns the cluster of each row from `start`, so that each cluster has other shares of labels.

    For each label, the shares of the clusters are drawn from a Dirichlet distribution. Then the
    cluster of each row is drawn from the shares of its label. With a smaller `alpha`, the clusters differ
    more.

    Args:
        groups: The label of each row.
    """
    limits = {
        group: np.cumsum(
            stable_random.shares("shares", seed, group, alpha=alpha, count=num_clusters)
        )[:-1]
        for group in sorted(set(groups))
    }
    fractions = stable_random.fractions("dirichlet", seed, start=start, count=len(groups))
    return [
        int(np.searchsorted(limits[group], fraction, side="right"))
        for group, fraction in zip(groups, fractions, strict=True)
    ]
