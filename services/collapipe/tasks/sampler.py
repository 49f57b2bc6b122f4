"""Which rows a mini-batch holds: pure functions of the seed, the cluster and a cursor.

A cursor is what a commit records of a cluster's data (`DataCursor` on the wire). A retry starts
from the recorded cursor, draws the same rows, and does not see rows that were appended meanwhile.
"""

from dataclasses import dataclass

from collapipe.errors import InvalidInputError
from collapipe.tasks import stable_random


@dataclass(frozen=True)
class Cursor:
    """Where sampling stands."""

    epoch: int = 0
    """Passes over the data completed or restarted."""
    offset: int = 0
    """Mini-batches drawn in this epoch."""
    num_rows: int = 0
    """Rows that this epoch's order covers; 0 before the first round."""


def begin_round(cursor: Cursor, current_num_rows: int) -> Cursor:
    """Lets appended rows in: if there are any, a new epoch starts over all rows.

    A retry passes the number of rows that the first attempt at the round did, so it gets the same
    cursor.

    Args:
        cursor: Where the round before ended.
        current_num_rows: Training rows that the cluster had when the round began.
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

    Each epoch is a new order of rows, cut into mini-batches; what is left at its end is dropped.

    Args:
        seed: The job's.
        cluster_index: The cluster.
        cursor: Where sampling stands.
        mini_batch: Rows to draw.

    Returns:
        The row indices, and the cursor of the mini-batch after.
    """
    per_epoch = cursor.num_rows // mini_batch
    if per_epoch == 0:
        raise InvalidInputError(
            f"cluster {cluster_index} has {cursor.num_rows} training rows, fewer than one "
            f"mini-batch of {mini_batch}: add rows or lower training.mini_batch"
        )
    if cursor.offset >= per_epoch:
        cursor = Cursor(cursor.epoch + 1, 0, cursor.num_rows)
    order = stable_random.permutation(
        "epoch", seed, cluster_index, cursor.epoch, cursor.num_rows, count=cursor.num_rows
    )
    start = cursor.offset * mini_batch
    rows: list[int] = order[start : start + mini_batch].tolist()
    return rows, Cursor(cursor.epoch, cursor.offset + 1, cursor.num_rows)
