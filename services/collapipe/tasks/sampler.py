"""Chooses the rows of each mini-batch: pure functions of the seed, the cluster and a cursor.

A commit records a cursor for each cluster (`DataCursor` on the wire). Another attempt at a round
starts from the recorded cursor. So it draws the same rows, even if rows were appended meanwhile.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from collapipe.data import stable_random
from collapipe.errors import InvalidInputError


@dataclass(frozen=True)
class Cursor:
    """The position of a cluster in its training rows."""

    epoch: int = 0
    """Number of the pass over the data, from 0."""
    offset: int = 0
    """Mini-batches already drawn in this epoch."""
    num_rows: int = 0
    """Rows of this epoch; 0 before the first round."""


def begin_round(cursor: Cursor, current_num_rows: int) -> Cursor:
    """Returns the cursor of a round, given that of the previous round. Appended rows start a new epoch.

    Args:
        current_num_rows: Training rows of the cluster at the first attempt at the round. Later attempts pass
            the same number, so they get the same cursor.
    """
    if current_num_rows < cursor.num_rows:
        raise InvalidInputError(
            f"the cluster has {current_num_rows} training rows, but {cursor.num_rows} were in use "
            "at the last commit: restore the rows that were removed, or start a new job"
        )
    if current_num_rows == cursor.num_rows:
        return cursor
    epoch = cursor.epoch + 1 if cursor.num_rows else cursor.epoch
    return Cursor(epoch, 0, current_num_rows)


def draw(
    seed: int, cluster_index: int, cursor: Cursor, mini_batch: int
) -> tuple[list[int], Cursor]:
    """Draws the next mini-batch.

    Each epoch has a new order of all rows, which is cut into mini-batches. Rows that do not fill the
    last mini-batch are left out.

    Returns:
        The indices of the rows, and the cursor of the next mini-batch.
    """
    per_epoch = cursor.num_rows // mini_batch
    if per_epoch == 0:
        raise InvalidInputError(
            f"cluster {cluster_index} has {cursor.num_rows} training rows, fewer than one "
            f"mini-batch of {mini_batch}: add rows or lower training.mini_batch"
        )
    if cursor.offset >= per_epoch:
        cursor = Cursor(cursor.epoch + 1, 0, cursor.num_rows)
    order = _order(seed, cluster_index, cursor.epoch, cursor.num_rows)
    start = cursor.offset * mini_batch
    rows: list[int] = order[start : start + mini_batch].tolist()
    return rows, Cursor(cursor.epoch, cursor.offset + 1, cursor.num_rows)


@lru_cache(maxsize=1)
def _order(seed: int, cluster_index: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Returns the rows of an epoch in their order. All mini-batches of the epoch use the same array."""
    return stable_random.permutation("epoch", seed, cluster_index, epoch, num_rows, count=num_rows)
