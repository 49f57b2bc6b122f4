"""Which cluster a row of a shared file belongs to.

Every control unit reads the whole file and keeps its own rows, so the answer depends on nothing but
the seed, the row's position and (Dirichlet) its label. Rows appended later follow the same rule,
and no earlier row ever moves.
"""

from collections.abc import Sequence

import numpy as np

from collapipe.tasks import stable_random


def iid_clusters(seed: int, num_clusters: int, start: int, count: int) -> list[int]:
    """Says the cluster of each of the rows `start` to `start + count`, evenly at random.

    Each run of `num_clusters` rows goes to all clusters in an order of its own, so however many
    rows there are, the clusters' sizes differ by at most one.
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
    """Says the cluster of each row from `start`, with skewed label shares.

    For each group the clusters' shares are drawn from a Dirichlet distribution, and each row's
    cluster from these shares.

    Args:
        seed: The job's.
        num_clusters: Clusters to spread over.
        alpha: Concentration; smaller is more skewed.
        start: Position of the first row.
        groups: What each row is skewed by (its label).
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
