"""The choice of rows that are held out for evaluation when a job names no held-out data."""

import hashlib
from collections.abc import Callable, Sequence

from collapipe.data.rows import Row, TaggedRow
from collapipe.job import LABELLING_TASKS

HELD_OUT_SHARE = 0.15
"""Part of the training rows that is held out if the job names no held-out data."""


Sizes = Callable[[Sequence[Row]], Sequence[int]]
"""Returns what each row adds to a limit of held-out rows."""


def one_each(rows: Sequence[Row]) -> Sequence[int]:
    """Returns 1 for each row."""
    return [1] * len(rows)


def choose(rows: Sequence[Row], limit: int | None, sizes: Sizes = one_each) -> list[Row]:
    """Returns the rows of a held-out file that are measured, in their order: those with the smallest hashes.

    Args:
        limit: Rows are added until their sizes reach it. `None` takes all.
    """
    if limit is None:
        return list(rows)
    order = sorted(range(len(rows)), key=lambda index: (_digest(rows[index]), index))
    size_of, used, chosen = sizes(rows), 0, list[int]()
    for index in order:
        if used >= limit:
            break
        used += size_of[index]
        chosen.append(index)
    return [rows[index] for index in sorted(chosen)]


class HoldOut:
    """Divides the rows of a file into training rows and held-out rows.

    The hash of its input text chooses the side of a row. So rows with the same text are on the same side, and each label
    loses about the same share. There is one exception: if the hash chooses the first row of a label, the row trains
    nevertheless, as do later rows with its text. So no label loses its only row, and rows that are appended never change the
    side of earlier ones.

    With a limit, the chosen rows with the smallest hashes are held out, from all parts of the file. The others train, unless a
    held-out row has their text. Of rows that are appended later, the first ones are held out, until the limit is reached. So
    the sides depend on which rows were there at first: `num_first`.

    Args:
        kind: The kind of the task. Labels of rows count only if the task has some.
        limit: Rows are held out until their sizes reach it. `None` holds out all that the hash chooses.
        sizes: Used for rows that the hash chooses.
        num_first: Rows of the first reading, if they were read before, perhaps by another process.
    """

    def __init__(
        self,
        kind: str,
        limit: int | None = None,
        sizes: Sizes = one_each,
        num_first: int | None = None,
    ) -> None:
        self._has_labels = kind in LABELLING_TASKS
        self._limit = limit
        self._sizes = sizes
        self.num_first = num_first
        self._labels: frozenset[str] = frozenset()
        """Those of training rows; of tags only the type of the entity."""
        self._kept: frozenset[str] = frozenset()
        """The texts that train although the hash chose them."""
        self._held_out: frozenset[int] = frozenset()
        """The hashes of held-out texts, if there is a limit."""
        self._used = 0
        """The sizes of held-out rows."""
        self._has_divided = False
        self._pending = self._labels, self._kept, self._held_out, self._used, num_first

    def divide(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Returns the training rows and the held-out rows, in their order. `accept` ends the choice for these rows."""
        labels, kept = set(self._labels), set(self._kept)
        may_train = [self._trains(row, labels, kept) for row in rows]
        held_out, used = set(self._held_out), self._used
        num_first = 0
        if not self._has_divided:
            num_first = len(rows) if self.num_first is None else min(self.num_first, len(rows))
        sides: list[bool | None] = list(may_train)
        """True trains, and False is held out. `None` does neither, because its text is held out already."""
        if self._limit is not None:
            chosen = [index for index, trains in enumerate(may_train) if not trains]
            size_of = dict(zip(chosen, self._sizes([rows[i] for i in chosen]), strict=True))
            digests = {index: _digest(rows[index]) for index in chosen}
            sides = [True] * len(rows)
            for index in sorted(
                chosen, key=lambda i: (0, digests[i], i) if i < num_first else (1, 0, i)
            ):
                if used < self._limit:
                    used += size_of[index]
                    held_out.add(digests[index])
                    sides[index] = False
            for index in chosen:
                if sides[index] and digests[index] in held_out:
                    sides[index] = None
        self._pending = (
            frozenset(labels),
            frozenset(kept),
            frozenset(held_out),
            used,
            self.num_first if self._has_divided else num_first,
        )
        train = [row for row, side in zip(rows, sides, strict=True) if side]
        return train, [row for row, side in zip(rows, sides, strict=True) if side is False]

    def accept(self) -> None:
        """Remembers the rows of the last call of `divide`."""
        self._labels, self._kept, self._held_out, self._used, self.num_first = self._pending
        self._has_divided = True

    def _trains(self, row: Row, labels: set[str], kept: set[str]) -> bool:
        """Returns whether the hash, or a label that comes first, lets a row train. Adds to both sets."""
        own = _names(row) if self._has_labels else set()
        if _is_chosen(row) and row.key not in kept:
            if own <= labels:
                return False
            kept.add(row.key)
        labels |= own
        return True


def _names(row: Row) -> set[str]:
    if isinstance(row, TaggedRow):
        return {tag[2:] for tag in row.labels if tag != "O"}
    return set(row.labels)


def _digest(row: Row) -> int:
    return int.from_bytes(hashlib.sha256(row.key.encode()).digest()[:8], "little")


def _is_chosen(row: Row) -> bool:
    return _digest(row) < HELD_OUT_SHARE * 2**64
