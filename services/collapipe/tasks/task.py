"""What every task shares: rows in, micro-batches out, predictions in, metric out."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import TypeVar

from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.tasks.cluster_rows import ClusterRows, NewRows
from collapipe.tasks.rows import Row
from collapipe.tasks.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

IntArray = npt.NDArray[np.integer[Any]]
"""Token ids are kept as int32, and become int64 in micro-batches."""
IGNORED = -100
"""The label of positions that are no target."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the pipeline together."""

    tensors: dict[str, Tensor]
    """`input_ids` and `attention_mask` [rows, length]; `labels`: [rows] for classification,
    [rows, length] for ner, [rows, target length] for translation. int64, padded to the longest row
    of each; -100 is no target."""
    num_targets: int
    """Labels that count in the loss."""
    num_rows: int


@dataclass(frozen=True)
class Example:
    """A row as token ids."""

    row: Row
    input_ids: IntArray


E = TypeVar("E", bound=Example, default=Any)


class Task(ABC, Generic[E]):
    """The data of one cluster, ready for training and measuring.

    Rows are named by index, 0 to `num_rows` - 1: the index of a row never changes, as new rows only
    come after. `set_labels` must be called before micro-batches are made.

    Args:
        rows: Where the cluster's rows come from.
        new: What was read from there first.
        vocabulary: The job's.
    """

    metric: ClassVar[str]
    """Name of what `score` measures."""
    _effect_of_cut: ClassVar[str] = ""
    """What a cut does to the metric."""

    def __init__(self, rows: ClusterRows, new: NewRows, vocabulary: Vocabulary) -> None:
        self._rows = rows
        self._vocabulary = vocabulary
        self._train: list[E] = []
        self._held_out: list[E] = []
        self._label_ids: dict[str, int] | None = None
        self._has_warned = False
        self._take(new)

    @property
    def num_rows(self) -> int:
        """Training rows of the cluster."""
        return len(self._train)

    @property
    def num_held_out_rows(self) -> int:
        """Rows that `score` measures."""
        return len(self._held_out)

    @property
    def labels(self) -> list[str]:
        """Names of the labels in the cluster's training rows, sorted; none for translation."""
        return sorted({label for example in self._train for label in example.row.labels})

    @property
    def vocabulary(self) -> bytes:
        """Bytes of the tokenizer.json."""
        return self._vocabulary.data

    @property
    def vocabulary_size(self) -> int:
        """Entries of the vocabulary."""
        return self._vocabulary.size

    def set_labels(self, labels: Sequence[str]) -> None:
        """Fixes the labels of the whole job: a label's id is its position. Cheap when repeated.

        Raises:
            InvalidInputError: A row, training or held out, has another label.
        """
        label_ids = {label: number for number, label in enumerate(labels)}
        if label_ids != self._label_ids:
            self._check_labels(
                [example.row for example in [*self._train, *self._held_out]], label_ids
            )
            self._label_ids = label_ids

    def refresh(self) -> int:
        """Picks up rows that were appended to the cluster's files; one `stat` if there are none.

        Returns:
            Training rows of the cluster now.

        Raises:
            InvalidInputError: A new row is wrong, or has a label that the job does not know.
                Nothing is lost: the rows so far stay in use, and the new ones are read again by the
                next call.
        """
        new = self._rows.read()
        if self._label_ids is not None:
            self._check_labels([*new.train, *new.held_out], self._label_ids)
        self._take(new)
        return len(self._train)

    def micro_batches(self, row_indices: Sequence[int], num_micro_batches: int) -> list[MicroBatch]:
        """Cuts a mini-batch into equal micro-batches, in the order of its rows.

        Args:
            row_indices: The rows of the mini-batch, as `draw` returned them.
            num_micro_batches: A divisor of their number.
        """
        size, rest = divmod(len(row_indices), num_micro_batches)
        if rest:
            raise InvalidInputError(
                f"{len(row_indices)} rows cannot be cut into {num_micro_batches} equal "
                "micro-batches: use a divisor"
            )
        examples = [self._train[index] for index in row_indices]
        return [self._collate(examples[i : i + size]) for i in range(0, len(examples), size)]

    def held_out_micro_batches(self, size: int) -> list[MicroBatch]:
        """Makes micro-batches of at most `size` held-out rows; shortest first, to save padding."""
        examples = [self._held_out[index] for index in self._by_length()]
        return [self._collate(examples[i : i + size]) for i in range(0, len(examples), size)]

    def score(self, predictions: Sequence[Tensor]) -> float:
        """Measures the metric.

        Args:
            predictions: What the head predicted for each of `held_out_micro_batches`, in their
                order: the class of each row [rows], the label of each token [rows, length], or the
                generated tokens without the start token [rows, generated length].
        """
        by_length = [row for tensor in predictions for row in tensor.tolist()]
        if len(by_length) != len(self._held_out):
            raise WrongStateError(
                f"there are predictions for {len(by_length)} of {len(self._held_out)} held-out "
                "rows: predict each of held_out_micro_batches once"
            )
        in_order = [
            row
            for _, row in sorted(
                zip(self._by_length(), by_length, strict=True), key=lambda pair: pair[0]
            )
        ]
        return self._measure(self._held_out, in_order)

    @abstractmethod
    def _examples(self, rows: Sequence[Row]) -> tuple[list[E], int]:
        """Encodes rows; also says how many were cut."""

    @abstractmethod
    def _labels(self, examples: Sequence[E], length: int) -> IntArray:
        """Makes the labels of a micro-batch whose inputs are padded to `length`."""

    @abstractmethod
    def _measure(self, examples: Sequence[E], predictions: Sequence[Any]) -> float:
        """Compares predictions (nested lists of integers) with the truth."""

    def _take(self, new: NewRows) -> None:
        train, num_cut = self._examples(new.train)
        held_out, num_held_out_cut = self._examples(new.held_out)
        self._rows.accept(new)
        self._train += train
        self._held_out += held_out
        if (num_cut or num_held_out_cut) and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: %d of %d training rows and %d of %d held-out rows are longer than "
                "task.max_length = %d tokens and are cut%s: raise it if they matter",
                self._rows.name,
                num_cut,
                len(train),
                num_held_out_cut,
                len(held_out),
                self._vocabulary.max_length,
                self._effect_of_cut,
            )

    def _check_labels(self, rows: Sequence[Row], label_ids: dict[str, int]) -> None:
        for row in rows:
            for label in row.labels:
                if label not in label_ids:
                    raise InvalidInputError(
                        f"{row.place}: label {label!r} is not one of the {len(label_ids)} of the "
                        f"job ({', '.join(label_ids):.200}), which are those of the training rows "
                        "at its start: correct the row, or start a new job with such a row in its "
                        "training data"
                    )

    def _by_length(self) -> list[int]:
        return sorted(
            range(len(self._held_out)), key=lambda index: len(self._held_out[index].input_ids)
        )

    def _collate(self, examples: Sequence[E]) -> MicroBatch:
        input_ids = padded([example.input_ids for example in examples], self._vocabulary.pad_id)
        lengths = np.array([len(example.input_ids) for example in examples])
        mask = (np.arange(input_ids.shape[1]) < lengths[:, None]).astype(np.int64)
        labels = self._labels(examples, input_ids.shape[1])
        arrays = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
        return MicroBatch(
            tensors={name: torch.from_numpy(array) for name, array in arrays.items()},
            num_targets=int((labels != IGNORED).sum()),
            num_rows=len(examples),
        )

    def _known_labels(self) -> dict[str, int]:
        """The id of each label, in the order of the ids."""
        if self._label_ids is None:
            raise WrongStateError("the labels of the job are not known yet: call set_labels first")
        return self._label_ids


def padded(rows: Sequence[Sequence[int] | IntArray], value: int) -> IntArray:
    """Pads rows at their ends to the longest."""
    result = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for padded_row, row in zip(result, rows, strict=True):
        padded_row[: len(row)] = row
    return result
