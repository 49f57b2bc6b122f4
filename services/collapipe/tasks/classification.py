"""The task of assigning a class to each text; its metric is accuracy."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding
from torch import Tensor

from collapipe.data.rows import Row
from collapipe.evaluation import PREDICTED, RIGHT, TRUE, of_class
from collapipe.models import IGNORED
from collapipe.tasks.task import Example, IntArray, RowTask, token_ids


class Classification(RowTask[Example]):
    """The data of a classification job."""

    kind = "classification"
    metric = "accuracy"

    def _example(self, row: Row, *encodings: Encoding) -> Example:
        return Example(row, token_ids(encodings[0]))

    def answer(self, question: Example, prediction: Tensor) -> str:
        """Returns the class."""
        return list(self._known_labels())[int(prediction)]

    def _labels(self, examples: Sequence[Example], length: int) -> IntArray:
        label_ids = self._known_labels()
        ids = [label_ids.get(example.row.labels[0], IGNORED) for example in examples]
        return np.array(ids, dtype=np.int64)

    def _count(self, examples: Sequence[Example], predictions: Sequence[int]) -> dict[str, float]:
        truth, predicted = self._labels(examples, length=1), np.array(predictions, dtype=np.int64)
        counted = {TRUE: truth, PREDICTED: predicted, RIGHT: truth[truth == predicted]}
        return {
            of_class(name, class_id): number
            for name, class_ids in counted.items()
            for class_id, number in Counter(class_ids.tolist()).items()
        }
