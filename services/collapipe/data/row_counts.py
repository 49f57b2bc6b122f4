"""Counts what is in the rows that one cluster reads. Only hashes of texts are kept, and only until all rows are counted."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence

from collapipe.data.findings import Counted, DataFacts, RowFacts, SourceFacts, folded
from collapipe.data.rows import Row, TaggedRow
from collapipe.evaluation import BLEU_ORDERS
from collapipe.job import LABELLING_TASKS

_LETTERS_LOOKED_AT = 12
_LETTERS = r"[a-zA-Z0-9\u00c0-\u024f\u0370-\u07ff\u0900-\u0dff\u1e00-\u1eff]+"
_WORDS = re.compile(rf"{_LETTERS}|\S")
_DAMAGED = re.compile(
    r"[\x00-\x08\x0e-\x1a\x7f-\x9f\ufffd]|[\u00c2\u00c3][\u00a1-\u00bf]|\u00e2\u20ac"
)
"""Control characters, the sign for a character that could not be read, and UTF-8 that was read as Latin-1 or cp1252."""
_SCRIPTS = dict.fromkeys(
    ("Cjk", "Hiragana", "Katakana", "Katakana-hiragana", "Ideographic"), "Chinese or Japanese"
)
"""Alphabets that one language mixes, by the first word of the names of their letters."""


def count_rows(
    kind: str,
    sources: Sequence[SourceFacts],
    train: Iterable[Row],
    held_out: Iterable[Row],
    left_out: Sequence[Row] = (),
) -> DataFacts:
    """Counts the rows that one cluster reads.

    Args:
        kind: The kind of the task.
        sources: The facts of the files, that of the training rows first.
        left_out: Training rows behind `data.max_rows`.
    """
    trained, measured = _Counter(kind), _Counter(kind)
    for row in train:
        trained.add(row)
    shared = Counted()
    for row in held_out:
        if measured.add(row) in trained.labels_of_texts:
            shared.add(row.place)
    lost = {name for row in left_out for name in class_names(row)}
    return DataFacts(
        kind,
        sources,
        trained.facts,
        measured.facts,
        shared,
        num_left_out=len(left_out),
        lost_labels=lost - trained.facts.labels.keys() if kind in LABELLING_TASKS else (),
    )


def class_names(row: Row) -> list[str]:
    """Returns the class of a row; for ner, the type of each entity."""
    if isinstance(row, TaggedRow):
        return [tag[2:] for tag in row.labels if tag.startswith("B-")]
    return list(row.labels)


class _Counter:
    def __init__(self, kind: str) -> None:
        self.facts = RowFacts()
        self.labels_of_texts: dict[int, int] = {}
        """The hash of the labels that each text had first, by the hash of the text."""
        self._kind = kind

    def add(self, row: Row) -> int:
        """Counts a row, and returns the hash of its texts."""
        facts, kind = self.facts, self._kind
        facts.num_rows += 1
        if kind == "causal_lm" and not row.texts[0].strip():
            facts.blank.add(row.place)
            return -1
        if any(map(_DAMAGED.search, row.texts)):
            facts.damaged.add(row.place)
        text = _hash(*map(folded, row.texts))
        labels = _hash(*row.labels) if kind in LABELLING_TASKS else 0
        if text not in self.labels_of_texts:
            self.labels_of_texts[text] = labels
        elif self.labels_of_texts[text] == labels:
            facts.repeated.add(row.place)
        else:
            facts.contradicting.add(row.place)
        if kind in LABELLING_TASKS:
            for name in class_names(row):
                facts.labels[name] += 1
                facts.label_places.setdefault(name, row.place)
        if kind == "translation":
            source, target = row.texts
            if source.strip() == target.strip() and " " in source.strip():
                facts.untranslated.add(row.place)
            facts.num_measurable += _is_measurable(target)
            if script := _script(target):
                facts.scripts.setdefault(script, Counted()).add(row.place)
        return text


def _hash(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _is_measurable(target: str) -> bool:
    """Returns whether a translation may have as many words as the longest sequence that BLEU counts.

    It may say so too often: each sign counts as a word, and so does each character of most other scripts than Latin, Greek,
    Cyrillic, Semitic and Indian ones.
    """
    return len(_WORDS.findall(target)) >= max(BLEU_ORDERS)


def _script(text: str) -> str:
    """Returns the alphabet of most of the first letters, such as "Latin"; "" without a letter."""
    start = unicodedata.normalize("NFKC", text[: 4 * _LETTERS_LOOKED_AT])
    letters = [c for c in start if c.isalpha()][:_LETTERS_LOOKED_AT]
    names = [unicodedata.name(letter, "").partition(" ")[0].capitalize() for letter in letters]
    scripts = [_SCRIPTS.get(name, name) for name in names]
    return max(sorted(set(scripts)), key=scripts.count, default="")
