"""The task of predicting the next token of a text; its metric is perplexity."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from collapipe.data.cluster_rows import NewRows
from collapipe.data.rows import Row
from collapipe.errors import InvalidInputError
from collapipe.models import IGNORED
from collapipe.tasks.language_task import LanguageTask
from collapipe.tasks.task import Example, IntArray, padded
from collapipe.tasks.vocabulary import Vocabulary


class CausalLanguageModel(LanguageTask[Example]):
    """The data of a language model.

    An end token follows each text that is not blank. The texts are joined in their order and cut into examples of the same length, so
    nothing is padded, and only the last tokens wait until more texts are appended.
    """

    kind = "causal_lm"
    metric = "perplexity"
    length_for_more_rows = "lower"
    _rest: Sequence[int] = ()
    """The training tokens that do not fill an example yet."""
    _held_out_rest: Sequence[int] = ()

    def question(self, text: str) -> Example:
        """Encodes the beginning of a text, which the model continues."""
        ids = np.array(self._vocabulary.encode_prompt(text), dtype=np.int32)
        return Example(Row("the text", 1, (text,), ()), ids)

    def _take(self, new: NewRows) -> None:
        train, rest = self._pack(new.train, self._rest)
        held_out, held_out_rest = self._pack(new.held_out, self._held_out_rest)
        is_short = new.held_out and not (held_out or self._num_held_out_read)
        if is_short and self._rows.knows_all_held_out:
            raise InvalidInputError(
                f"{self._rows.name}: the held-out texts have {len(held_out_rest)} tokens, fewer than one row of "
                f"task.max_length = {self._vocabulary.max_length}: hold out more text, or lower task.max_length"
            )
        self._accept(new, train, held_out)
        self._rest, self._held_out_rest = rest, held_out_rest

    def _pack(self, rows: Sequence[Row], rest: Sequence[int]) -> tuple[list[Example], list[int]]:
        """Returns examples of the tokens in `rest` and of texts, and the tokens that are left."""
        length = self._vocabulary.max_length
        examples: list[Example] = []
        tokens = list(rest)
        for row, ids in zip(rows, packed_tokens(self._vocabulary, rows), strict=True):
            tokens += ids
            num_used = len(tokens) // length * length
            for start in range(0, num_used, length):
                packed = np.array(tokens[start : start + length], dtype=np.int32)
                examples.append(Example(row, packed))
            del tokens[:num_used]
        return examples, tokens

    def _labels(self, examples: Sequence[Example], length: int) -> IntArray:
        return padded([[*example.input_ids[1:], IGNORED] for example in examples], IGNORED)

    def _count(
        self, examples: Sequence[Example], predictions: Sequence[Sequence[float]]
    ) -> dict[str, float]:
        num_targets = sum(len(example.input_ids) - 1 for example in examples)
        return {
            "loss": math.fsum(loss for loss, _ in predictions),
            "right_tokens": sum(right for _, right in predictions),
            "measured_tokens": num_targets,
            "tokens": num_targets,
        }


def packed_tokens(vocabulary: Vocabulary, rows: Sequence[Row]) -> Iterator[list[int]]:
    """Yields the tokens that each text adds to the rows of a language model: none if it is blank."""
    beginnings = [row.texts[0] for row in rows if row.texts[0].strip()]
    encoded = iter(vocabulary.encode_beginnings(beginnings))
    for row in rows:
        yield vocabulary.ended(next(encoded)) if row.texts[0].strip() else []
