"""Named entity recognition: the task of tagging the words of sentences; its metrics are those of seqeval, entity F1 first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding
from torch import Tensor

from collapipe.data.cluster_rows import NewRows, job_labels
from collapipe.data.rows import Row, TaggedRow
from collapipe.errors import InvalidInputError
from collapipe.evaluation import PREDICTED, RIGHT, TRUE
from collapipe.finding import Finding
from collapipe.models import IGNORED
from collapipe.tasks.task import Example, IntArray, RowTask, token_ids

_CUT = -1


@dataclass(frozen=True)
class TaggedExample(Example):
    """An encoded sentence."""

    first_tokens: IntArray
    """Position of each word's first token; -1 for a word without a token."""

    @property
    def has_target(self) -> bool:
        return bool((self.first_tokens != _CUT).any())


class EntityRecognition(RowTask[TaggedExample]):
    """The data of an NER job. Each word has an IOB2 tag, which its first token predicts.

    The words are joined by spaces and encoded as one text, because `pipeline` of `transformers` does the same
    with the sentences of users.
    """

    kind = "ner"
    metric = "entity_f1"

    @property
    def labels(self) -> list[str]:
        """The tag `O`, then the tags B- and I- of each entity type in the cluster's training rows, sorted."""
        return job_labels(self.kind, super().labels)

    @property
    def findings(self) -> list[Finding]:
        without = [example.row.place for example in self._train if not example.has_target]
        if not without:
            return super().findings
        found = Finding(
            "warning",
            without[0],
            f"{len(without)} of {len(self._train)} training rows teach nothing, this one first, because the tokenizer makes no token "
            "of their words",
            "remove them, or write their words in other characters",
        )
        return [*super().findings, found]

    def _take(self, new: NewRows) -> None:
        super()._take(new)
        if self._train and not any(example.has_target for example in self._train):
            raise InvalidInputError(
                f"{self._train[0].row.place}: the tokenizer makes no token of the words of this row, nor of the other "
                f"{len(self._train) - 1} training rows, so there is nothing to learn: write the words in other characters, "
                "or use a model whose vocabulary has them"
            )

    def _example(self, row: Row, *encodings: Encoding) -> TaggedExample:
        assert isinstance(row, TaggedRow)
        [encoding] = encodings
        return TaggedExample(row, token_ids(encoding), _first_tokens(row.words, encoding))

    def answer(self, question: TaggedExample, prediction: Tensor) -> str:
        """Returns a line with a word, a tab and its tag for each word, as in a .conll file."""
        tags = self._tags(question, prediction[0].tolist())
        assert isinstance(question.row, TaggedRow)
        pairs = zip(question.row.words, tags, strict=True)
        return "".join(f"{word}\t{tag}\n" for word, tag in pairs)

    def _question_row(self, text: str) -> Row:
        words = tuple(text.split())
        return TaggedRow("the text", 1, (" ".join(words),), (), words)

    def _tags(self, example: TaggedExample, prediction: Sequence[int]) -> list[str]:
        """Returns the predicted tag of each word, given the label of each token."""
        names = list(self._known_labels())
        return [
            "O" if token == _CUT else names[prediction[token]] for token in example.first_tokens
        ]

    def _labels(self, examples: Sequence[TaggedExample], length: int) -> IntArray:
        label_ids = self._known_labels()
        labels = np.full((len(examples), length), IGNORED, dtype=np.int64)
        for row_labels, example in zip(labels, examples, strict=True):
            tag_ids = np.array([label_ids.get(tag, IGNORED) for tag in example.row.labels])
            has_token = example.first_tokens != _CUT
            row_labels[example.first_tokens[has_token]] = tag_ids[has_token]
        return labels

    def _count(
        self, examples: Sequence[TaggedExample], predictions: Sequence[list[int]]
    ) -> dict[str, float]:
        # Imported here, because they are slow and only an evaluation needs them.
        from seqeval.metrics.sequence_labeling import get_entities  # type: ignore[import-untyped]
        from seqeval.scheme import IOB2, Entities  # type: ignore[import-untyped]

        def strict(sentences: list[list[str]]) -> list[tuple[Any, ...]]:
            found = Entities(sentences, IOB2, suffix=False).entities
            return [entity.to_tuple() for each in found for entity in each]

        predicted = [
            self._tags(example, row) for example, row in zip(examples, predictions, strict=True)
        ]
        truth = [list(example.row.labels) for example in examples]
        sums: dict[str, float] = {}
        for prefix, find in (("", get_entities), ("strict_", strict)):
            found, wanted = (set(find(tags)) for tags in (predicted, truth))
            counted = {RIGHT: len(found & wanted), PREDICTED: len(found), TRUE: len(wanted)}
            sums |= {prefix + name: number for name, number in counted.items()}
        return sums


def _first_tokens(words: Sequence[str], encoding: Encoding) -> IntArray:
    """Finds the first token that ends within each word of the joined text.

    A token may begin with the space before its word. A token that is only a space belongs to no word.
    """
    total = sum(map(len, words)) + len(words)
    word_at = np.full(total, _CUT)
    start = 0
    for index, word in enumerate(words):
        word_at[start : start + len(word)] = index
        start += len(word) + 1
    first_tokens = np.full(len(words), _CUT, dtype=np.int32)
    for token, (begin, end) in reversed(list(enumerate(encoding.offsets))):
        if end > begin and word_at[end - 1] != _CUT:
            first_tokens[word_at[end - 1]] = token
    return first_tokens
