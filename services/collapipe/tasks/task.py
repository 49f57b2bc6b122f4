"""The base class of all tasks, which makes micro-batches of rows and computes metrics of predictions."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Encoding
from torch import Tensor
from typing_extensions import TypeVar

from collapipe.data.cluster_rows import NewRows, TaskRows, labels_in_order
from collapipe.data.findings import TextFacts
from collapipe.data.rows import Row
from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.evaluation import ROWS, compute_metrics
from collapipe.finding import Finding
from collapipe.models import IGNORED
from collapipe.tasks.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

IntArray = npt.NDArray[np.integer[Any]]
"""Token ids: int32 in memory, int64 in micro-batches."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the pipeline together, as tensors."""

    tensors: dict[str, Tensor]
    """`input_ids` and `attention_mask` have the shape [rows, length]. `labels` has the shape [rows] for
    classification, [rows, length] for ner, causal_lm and instruction, and [rows, target length] for translation. All are int64 and
    padded to their longest row. The label -100 means that a position has no target."""
    num_targets: int
    """Number of labels that count in the loss."""
    num_rows: int


@dataclass(frozen=True)
class Example:
    """A row as token ids."""

    row: Row
    input_ids: IntArray


E = TypeVar("E", bound=Example, default=Any)


class Task(ABC, Generic[E]):
    """The encoded data of one cluster.

    A row is identified by its index, from 0 to `num_rows` - 1. The index never changes, because new rows are
    only appended. `set_labels` must be called before micro-batches are made.

    Args:
        new: What the first `rows.read()` returned.

    Attributes:
        num_long_rows: Training rows that are longer than `task.max_length`.
        num_long_held_out_rows: Held-out rows of this cluster that are longer.
        texts: What was counted in the texts of the first reading.
    """

    kind: ClassVar[str]
    """The kind of the task in a job."""
    metric: ClassVar[str]
    """Name of the main metric of `score`, which is its first one."""
    cuts_texts: ClassVar[bool] = True
    """Whether a text that is longer than `task.max_length` is cut, and its rest is lost."""
    length_for_more_rows: ClassVar[str | None] = None
    """How a change of `task.max_length` gives more rows: "raise" or "lower"."""
    generates: ClassVar[bool] = False
    """Whether an answer is generated token by token. Otherwise it is made of labels."""
    continues_text: ClassVar[bool] = False
    """Whether each generated token is the input of the next pass. Otherwise the head generates the whole answer."""

    def __init__(self, rows: TaskRows, new: NewRows, vocabulary: Vocabulary) -> None:
        self._rows = rows
        self._vocabulary = vocabulary
        self._train: list[E] = []
        self._held_out: list[E] = []
        self._num_held_out_read = 0
        self.num_long_rows = 0
        self.num_long_held_out_rows = 0
        self._label_ids: dict[str, int] | None = None
        self.texts = TextFacts()
        self._take(new)
        self._count_special([*new.train, *rows.share_held_out(new.held_out, 0)])

    @property
    def num_rows(self) -> int:
        return len(self._train)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each training row, in the order of the rows."""
        return [len(example.input_ids) for example in self._train]

    @property
    def num_held_out_rows(self) -> int:
        """Number of held-out rows that this cluster evaluates."""
        return len(self._held_out)

    @property
    def labels(self) -> list[str]:
        """Names of the labels in the cluster's training rows, in the order of `labels_in_order`; none for a task without labels."""
        return labels_in_order(example.row.labels for example in self._train)

    @property
    def held_out_labels(self) -> dict[str, str]:
        """The labels of the held-out rows that this cluster evaluates, and the file and line of the first row with each."""
        places: dict[str, str] = {}
        for example in self._held_out:
            for label in example.row.labels:
                places.setdefault(label, example.row.place)
        return places

    @property
    def findings(self) -> list[Finding]:
        """What a person should know about the rows of the first reading."""
        return self._rows.findings

    @property
    def num_first(self) -> int:
        """Rows of the cluster's file at the first reading, by which held-out rows were chosen."""
        return self._rows.num_first

    @property
    def vocabulary(self) -> bytes:
        """The vocabulary of the job, as `collapipe.tasks.vocabulary` describes it."""
        return self._vocabulary.data

    def set_labels(self, labels: Sequence[str]) -> None:
        """Sets the labels of the whole job; the id of a label is its position. Repeated calls are cheap.

        A held-out row with another label counts as an error of the model, which cannot predict that label.

        Raises:
            InvalidInputError: A training row has another label.
        """
        label_ids = {label: number for number, label in enumerate(labels)}
        if label_ids != self._label_ids:
            self._check_labels([example.row for example in self._train], label_ids)
            self._label_ids = label_ids

    def refresh(self) -> int:
        """Reads rows that were appended to the cluster's files, and returns the number of training rows.

        Raises:
            InvalidInputError: A new row is wrong, or a new training row has an unknown label. Then no new row is in use, and the
                next call reads the new rows again.
        """
        new = self._rows.read()
        if self._label_ids is not None:
            self._check_labels(new.train, self._label_ids)
        num_long = self.num_long_rows
        self._take(new)
        if self.num_long_rows > num_long == 0:
            _log.warning(
                "%s: %d of the rows that were appended are longer than task.max_length = %d tokens, and are cut or left out",
                self._rows.name,
                self.num_long_rows,
                self._vocabulary.max_length,
            )
        return len(self._train)

    def micro_batches(self, row_indices: Sequence[int], num_micro_batches: int) -> list[MicroBatch]:
        """Cuts a mini-batch into equal micro-batches, in the order of its rows.

        Args:
            row_indices: The rows of the mini-batch, in the order in which the sampler drew them.
            num_micro_batches: A divisor of the number of rows.
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
        """Makes micro-batches of at most `size` held-out rows; short rows come first, to reduce padding."""
        examples = [self._held_out[index] for index in self._by_length()]
        return [self._collate(examples[i : i + size]) for i in range(0, len(examples), size)]

    def score(self, predictions: Sequence[Tensor]) -> dict[str, float]:
        """Computes the metrics of the cluster's own held-out rows; the argument is that of `sums`."""
        return compute_metrics(self.kind, self.sums(predictions))

    def sums(self, predictions: Sequence[Tensor]) -> dict[str, float]:
        """Counts what the metrics need. A cluster without held-out rows counts nothing.

        Args:
            predictions: What `Head.predict` returned for `held_out_micro_batches`, in their order.
        """
        if not self.num_held_out_rows:
            return {}
        by_length = [row for tensor in predictions for row in tensor.tolist()]
        if len(by_length) != len(self._held_out):
            raise WrongStateError(
                f"there are predictions for {len(by_length)} of {len(self._held_out)} held-out "
                "rows: predict each of held_out_micro_batches once"
            )
        by_index = dict(zip(self._by_length(), by_length, strict=True))
        counted = self._count(self._held_out, [by_index[i] for i in range(len(by_index))])
        return {ROWS: self.num_held_out_rows, **counted}

    @abstractmethod
    def question(self, text: str) -> E:
        """Encodes a text that the model is to answer. Special tokens are as in training.

        Raises:
            InvalidInputError: The text is blank or too long.
        """

    def inputs(self, question: E) -> MicroBatch:
        """Returns a question as a micro-batch of one row, without labels."""
        input_ids = torch.from_numpy(padded([question.input_ids], self._vocabulary.pad_id))
        tensors = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        return MicroBatch(tensors, num_targets=0, num_rows=1)

    def answer(self, question: E, prediction: Tensor) -> str:
        """Returns the answer that is made of labels, given what `Head.predict` returned for the question."""
        raise WrongStateError(
            "the answers of this task are generated token by token: call answer_stream instead"
        )

    def answer_stream(self, question: E) -> Callable[[int], str]:
        """Returns a function that takes the next generated token, and returns the characters that it completes."""
        return self._vocabulary.stream()

    @property
    def end_id(self) -> int | None:
        """The token that ends a generated text."""
        return self._vocabulary.end_id

    @abstractmethod
    def _take(self, new: NewRows) -> None:
        """Encodes new rows, accepts them, and appends their examples to `_train` and `_held_out`."""

    @abstractmethod
    def _labels(self, examples: Sequence[E], length: int) -> IntArray:
        """Returns the labels of a micro-batch whose inputs are padded to `length`."""

    @abstractmethod
    def _count(self, examples: Sequence[E], predictions: Sequence[Any]) -> dict[str, float]:
        """Counts for `compute_metrics`, given predictions as nested lists of numbers."""

    def _accept(self, new: NewRows, train: list[E], held_out: list[E]) -> None:
        """Accepts new rows, whose examples are given, and keeps the held-out ones that this cluster evaluates."""
        self._rows.accept(new)
        self._train += train
        self._held_out += self._rows.share_held_out(held_out, self._num_held_out_read)
        self._num_held_out_read += len(held_out)

    def _count_special(self, rows: Sequence[Row]) -> None:
        """Counts the rows with a special token in a text."""
        self.texts.num_rows = len(rows)
        for row in rows:
            tokens = map(self._vocabulary.special_token_in, self._plain_texts(row))
            if token := next(filter(None, tokens), ""):
                self.texts.special.add(row.place)
                self.texts.first_special = self.texts.first_special or token

    def _plain_texts(self, row: Row) -> Sequence[str]:
        """Returns those texts of a row that are searched for special tokens."""
        return row.texts

    def _check_labels(self, rows: Sequence[Row], label_ids: dict[str, int]) -> None:
        for row in rows:
            for label in row.labels:
                if label not in label_ids:
                    raise InvalidInputError(
                        f"{row.place}: label {label!r} is not one of the {len(label_ids)} labels of the first "
                        f"training rows, which are the labels of the job: {', '.join(label_ids):.200}; correct the row, "
                        "or start a new job that has this label in its training data"
                    )

    def _by_length(self) -> list[int]:
        """Returns the indices of the held-out rows, short rows first."""
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
        """Returns the id of each label, in the order of the ids."""
        if self._label_ids is None:
            raise WrongStateError("the labels of the job are not known yet: call set_labels first")
        return self._label_ids


class RowTask(Task[E]):
    """A task with one example for each row."""

    @abstractmethod
    def _example(self, row: Row, *encodings: Encoding) -> E:
        """Makes an example of a row and the encoding of each of its texts."""

    def question(self, text: str) -> E:
        row = self._question_row(text)
        return self._example(row, self._vocabulary.encode_whole(row.texts[0]))

    def _question_row(self, text: str) -> Row:
        """Returns a row without labels."""
        return Row("the text", 1, (text,), ())

    def _take(self, new: NewRows) -> None:
        train, cut, unknown = self._encode(new.train)
        held_out, held_out_cut, held_out_unknown = self._encode(new.held_out)
        num_before = self._num_held_out_read
        self.num_long_rows += sum(cut)
        self.num_long_held_out_rows += sum(self._rows.share_held_out(held_out_cut, num_before))
        for place in (*unknown, *self._rows.share_held_out(held_out_unknown, num_before)):
            if place:
                self.texts.unknown.add(place)
        self._accept(new, train, held_out)

    def _encode(self, rows: Sequence[Row]) -> tuple[list[E], list[bool], list[str]]:
        """Encodes rows. Returns also whether each of them was cut, and the place of each row that is mostly unknown, "" for others."""
        examples: list[E] = []
        is_cut: list[bool] = []
        unknown: list[str] = []
        texts_by_column = zip(*(row.texts for row in rows), strict=True)
        encoded = [self._vocabulary.encode(texts) for texts in texts_by_column]
        for row, *encodings in zip(rows, *encoded, strict=True):
            examples.append(self._example(row, *encodings))
            is_cut.append(any(encoding.overflowing for encoding in encodings))
            is_unknown = any(self._vocabulary.is_unknown(encoding) for encoding in encodings)
            unknown.append(row.place if is_unknown else "")
        return examples, is_cut, unknown


def token_ids(encoding: Encoding) -> IntArray:
    """Returns the token ids of an encoded text, in little memory."""
    return np.array(encoding.ids, dtype=np.int32)


def padded(rows: Sequence[Sequence[int] | IntArray], value: int) -> IntArray:
    """Pads rows at their ends to the length of the longest one."""
    result = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for padded_row, row in zip(result, rows, strict=True):
        padded_row[: len(row)] = row
    return result
