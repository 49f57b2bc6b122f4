"""The choice of rows that are held out for evaluation when a job names no held-out data."""

import hashlib
from collections.abc import Sequence

from collapipe.data.rows import Row, TaggedRow
from collapipe.job import LABELLING_TASKS

HELD_OUT_SHARE = 0.15
"""Part of the training rows that is held out if the job names no held-out data."""


class HoldOut:
    """Divides the rows of a file into training rows and held-out rows.

    The hash of its input text chooses the side of a row. So rows with the same text are on the same side, and each label
    loses about the same share. There is one exception: if the hash chooses the first row of a label, the row trains
    nevertheless, as do later rows with its text. So no label loses its only row, and rows that are appended never change the
    side of earlier ones.

    Args:
        kind: The kind of the task. Labels of rows count only if the task has some.
    """

    def __init__(self, kind: str) -> None:
        self._has_labels = kind in LABELLING_TASKS
        self._labels: frozenset[str] = frozenset()
        """Those of training rows; of tags only the type of the entity."""
        self._kept: frozenset[str] = frozenset()
        """The texts that train although the hash chose them."""
        self._pending = self._labels, self._kept

    def divide(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Returns the training rows and the held-out rows, in their order. `accept` ends the choice for these rows."""
        labels, kept = set(self._labels), set(self._kept)
        train: list[Row] = []
        held_out: list[Row] = []
        for row in rows:
            own = _names(row) if self._has_labels else set()
            if not _is_chosen(row) or row.key in kept:
                train.append(row)
                labels |= own
            elif own <= labels:
                held_out.append(row)
            else:
                train.append(row)
                labels |= own
                kept.add(row.key)
        self._pending = frozenset(labels), frozenset(kept)
        return train, held_out

    def accept(self) -> None:
        """Remembers the rows of the last call of `divide`."""
        self._labels, self._kept = self._pending


def _names(row: Row) -> set[str]:
    if isinstance(row, TaggedRow):
        return {tag[2:] for tag in row.labels if tag != "O"}
    return set(row.labels)


def _is_chosen(row: Row) -> bool:
    digest = hashlib.sha256(row.key.encode()).digest()
    return int.from_bytes(digest[:8], "little") < HELD_OUT_SHARE * 2**64
