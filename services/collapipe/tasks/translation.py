"""The task of translating sentences; its metric is BLEU."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from collapipe.data.rows import Row
from collapipe.evaluation import BLEU_ORDERS, LABEL_SQUARES, LABELS
from collapipe.models import IGNORED
from collapipe.tasks.task import Example, IntArray, RowTask, padded, token_ids


@dataclass(frozen=True)
class PairExample(Example):
    """An encoded sentence and its encoded translation."""

    target_ids: IntArray


class Translation(RowTask[PairExample]):
    """The data of a translation job; both languages share one vocabulary."""

    kind = "translation"
    metric = "bleu"
    generates = True

    def _example(self, row: Row, *encodings: Encoding) -> PairExample:
        source, *targets = map(token_ids, encodings)  # A question has no target.
        return PairExample(row, source, targets[0] if targets else source[:0])

    def _labels(self, examples: Sequence[PairExample], length: int) -> IntArray:
        return padded([example.target_ids for example in examples], IGNORED)

    def _count(
        self, examples: Sequence[PairExample], predictions: Sequence[list[int]]
    ) -> dict[str, float]:
        """Counts n-grams with the default tokenization of `sacrebleu`."""
        # Imported here, because only an evaluation needs it.
        from sacrebleu import corpus_bleu

        translations = [self._vocabulary.decode(row) for row in predictions]
        targets = [example.row.texts[1] for example in examples]
        counted = corpus_bleu(translations, [targets])
        sums: dict[str, float] = {"length": counted.sys_len, "reference_length": counted.ref_len}
        # Short hashes stay whole numbers in sums of squares.
        hashes = [zlib.crc32(text.encode()) & 0xFFF for text in translations]
        sums |= {LABELS: sum(hashes), LABEL_SQUARES: sum(each**2 for each in hashes)}
        for order, right, total in zip(BLEU_ORDERS, counted.counts, counted.totals, strict=True):
            sums |= {f"right_{order}": right, f"total_{order}": total}
        return sums
