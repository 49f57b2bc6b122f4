"""The data of a job: rows of files or of the hub become micro-batches, and predictions become a metric.

Reading order: `rows` defines a row. `sources`, `hub` and `stdlib_docstrings` read rows. `cluster_rows`
keeps the rows of one cluster, which `sharding` chooses. `vocabulary` encodes texts. `task` makes
micro-batches and computes the metric, and `classification`, `ner` and `translation` say how. `sampler`
chooses the rows of each mini-batch. `loading` puts all of this together.
"""

from collapipe.tasks.loading import load_task
from collapipe.tasks.sampler import Cursor, begin_round, draw
from collapipe.tasks.task import MicroBatch, Task
from collapipe.tasks.vocabulary import write_tokenizer_files

__all__ = [
    "Cursor",
    "MicroBatch",
    "Task",
    "begin_round",
    "draw",
    "load_task",
    "write_tokenizer_files",
]
