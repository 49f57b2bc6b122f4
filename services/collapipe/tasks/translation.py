"""Sentences and their translations, measured by BLEU."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collapipe.tasks.rows import Row
from collapipe.tasks.task import IGNORED, Example, IntArray, Task, padded


@dataclass(frozen=True)
class PairExample(Example):
    """An encoded sentence and its encoded translation."""

    target_ids: IntArray


class Translation(Task[PairExample]):
    """One sentence for each sentence; both share the vocabulary."""

    metric = "bleu"
    _effect_of_cut = " (a longer translation counts in full in BLEU)"

    def _examples(self, rows: Sequence[Row]) -> tuple[list[PairExample], int]:
        examples, num_cut = [], 0
        sources = self._vocabulary.encode([row.texts[0] for row in rows])
        targets = self._vocabulary.encode([row.texts[1] for row in rows])
        for row, source, target in zip(rows, sources, targets, strict=True):
            ids = np.array(source.ids, dtype=np.int32), np.array(target.ids, dtype=np.int32)
            examples.append(PairExample(row, *ids))
            num_cut += bool(source.overflowing or target.overflowing)
        return examples, num_cut

    def _labels(self, examples: Sequence[PairExample], length: int) -> IntArray:
        return padded([example.target_ids for example in examples], IGNORED)

    def _measure(self, examples: Sequence[PairExample], predictions: Sequence[list[int]]) -> float:
        """BLEU of all held-out rows, 0 to 100, with the default tokenization of `sacrebleu`."""
        from sacrebleu import corpus_bleu  # only who measures needs it

        translations = [self._vocabulary.decode(row) for row in predictions]
        return corpus_bleu(translations, [[example.row.texts[1] for example in examples]]).score
