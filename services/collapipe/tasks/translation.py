"""The task of translating sentences; its metric is BLEU."""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from collapipe.data.rows import Row
from collapipe.evaluation import (
    BLEU_ORDERS,
    BLEU_TOKENIZERS,
    HAN,
    HANGUL,
    HASH_SQUARES,
    HASHES,
    KANA,
    UNSPACED,
    WORDS,
    WRITINGS,
    of_tokenizer,
)
from collapipe.models import IGNORED
from collapipe.tasks.task import Example, IntArray, RowTask, padded, token_ids

_HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KANA = "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"
"""Thai, Lao, Tibetan, Burmese and Khmer."""
_HANGUL = "\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3"
_WRITTEN = re.compile(
    f"(?P<{HAN}>[{_HAN}])|(?P<{KANA}>[{_KANA}])|(?P<{UNSPACED}>[{_UNSPACED}])|(?P<{HANGUL}>[{_HANGUL}]+)"
    f"|(?P<{WORDS}>[^\\W\\d_{_HAN}{_KANA}{_UNSPACED}{_HANGUL}]+)"
)


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

    @property
    def lengths(self) -> list[int]:
        """Tokens of the longer sentence of each pair."""
        return [max(len(each.input_ids), len(each.target_ids)) for each in self._train]

    def _labels(self, examples: Sequence[PairExample], length: int) -> IntArray:
        return padded([example.target_ids for example in examples], IGNORED)

    def _count(
        self, examples: Sequence[PairExample], predictions: Sequence[list[int]]
    ) -> dict[str, float]:
        """Counts n-grams with each tokenizer, because the rows of other clusters also decide which one is right."""
        # Imported here, because only an evaluation needs it.
        from sacrebleu import corpus_bleu

        translations = [self._vocabulary.decode(row) for row in predictions]
        targets = [example.row.texts[1] for example in examples]
        # Short hashes stay whole numbers in sums of squares.
        hashes = [zlib.crc32(text.encode()) & 0xFFF for text in translations]
        sums: dict[str, float] = {
            HASHES: sum(hashes),
            HASH_SQUARES: sum(each**2 for each in hashes),
            **count_writings(targets),
        }
        for tokenizer in BLEU_TOKENIZERS:
            counted = corpus_bleu(translations, [targets], tokenize=tokenizer)
            named = {"length": counted.sys_len, "reference_length": counted.ref_len}
            for order, right, total in zip(
                BLEU_ORDERS, counted.counts, counted.totals, strict=True
            ):
                named |= {f"right_{order}": right, f"total_{order}": total}
            sums |= {of_tokenizer(tokenizer, name): value for name, value in named.items()}
        return sums


def count_writings(texts: Iterable[str]) -> dict[str, int]:
    """Counts the characters or words of each of `WRITINGS`."""
    found = Counter(match.lastgroup for text in texts for match in _WRITTEN.finditer(text))
    return {writing: found[writing] for writing in WRITINGS}
