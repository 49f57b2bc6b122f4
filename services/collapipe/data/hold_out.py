"""The choice of rows that are held out for evaluation when a job names no held-out data."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class _Division:
    """What the next rows depend on."""

    labels: frozenset[str] = frozenset()
    """Those of training rows; of tags only the type of the entity."""
    kept: frozenset[str] = frozenset()
    """The texts that train although the hash chose them."""
    held_out: frozenset[int] = frozenset()
    """The hashes of held-out texts, if there is a limit."""
    used: int = 0
    """The sizes of held-out rows, if there is a limit."""
    num_first: int | None = None
    """Rows of the first reading; `None` before it."""


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
        self._given_num_first = num_first
        self._division = self._pending = _Division()

    @property
    def num_first(self) -> int | None:
        """Rows of the first reading; `None` before it is accepted."""
        return self._division.num_first

    def divide(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Returns the training rows and the held-out rows, in their order. `accept` ends the choice for these rows."""
        before = self._division
        labels, kept = set(before.labels), set(before.kept)
        chosen = [index for index, row in enumerate(rows) if not self._trains(row, labels, kept)]
        num_first = before.num_first
        num_new = 0  # Of the first reading.
        if num_first is None:
            num_first = num_new = (
                len(rows) if self._given_num_first is None else self._given_num_first
            )
        self._pending = replace(
            before, labels=frozenset(labels), kept=frozenset(kept), num_first=num_first
        )
        held_out, lost = set(chosen), set[int]()
        if self._limit is not None:
            held_out, lost = self._within_limit(self._limit, rows, chosen, num_new)
        train = [row for i, row in enumerate(rows) if i not in held_out and i not in lost]
        return train, [rows[index] for index in sorted(held_out)]

    def _within_limit(
        self, limit: int, rows: Sequence[Row], chosen: Sequence[int], num_new: int
    ) -> tuple[set[int], set[int]]:
        """Returns the indices of rows to hold out, and of rows that would train with the text of one that is held out.

        Args:
            chosen: The indices of rows that the hash chooses.
            num_new: Rows of the first reading.
        """
        digests = {index: _digest(rows[index]) for index in chosen}
        sizes = dict(zip(chosen, self._sizes([rows[index] for index in chosen]), strict=True))
        first = sorted((i for i in chosen if i < num_new), key=lambda i: (digests[i], i))
        texts, used = set(self._pending.held_out), self._pending.used
        held_out: set[int] = set()
        for index in (*first, *(i for i in chosen if i >= num_new)):
            if used >= limit:
                break
            used += sizes[index]
            texts.add(digests[index])
            held_out.add(index)
        self._pending = replace(self._pending, held_out=frozenset(texts), used=used)
        return held_out, {i for i in chosen if i not in held_out and digests[i] in texts}

    def accept(self) -> None:
        """Remembers the rows of the last call of `divide`."""
        self._division = self._pending

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
