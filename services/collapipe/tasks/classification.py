"""Texts and their classes, measured by accuracy."""

from collections.abc import Sequence

import numpy as np

from collapipe.tasks.rows import Row
from collapipe.tasks.task import Example, IntArray, Task


class Classification(Task[Example]):
    """One class for each text."""

    metric = "accuracy"

    def _examples(self, rows: Sequence[Row]) -> tuple[list[Example], int]:
        examples, num_cut = [], 0
        encodings = self._vocabulary.encode([row.texts[0] for row in rows])
        for row, encoding in zip(rows, encodings, strict=True):
            examples.append(Example(row, np.array(encoding.ids, dtype=np.int32)))
            num_cut += bool(encoding.overflowing)
        return examples, num_cut

    def _labels(self, examples: Sequence[Example], length: int) -> IntArray:
        label_ids = self._known_labels()
        return np.array([label_ids[example.row.labels[0]] for example in examples], dtype=np.int64)

    def _measure(self, examples: Sequence[Example], predictions: Sequence[int]) -> float:
        truth = self._labels(examples, length=1)
        return float((truth == np.array(predictions)).mean())
