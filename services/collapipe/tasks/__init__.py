"""One module per task: files or the hub in, micro-batches out; and its metric.

Guided tour: `rows` says what an example is, `sources`, `hub` and `stdlib_docstrings` read them,
`cluster_rows` keeps those of one cluster (`sharding` says which), `vocabulary` turns text into
token ids, `task` makes micro-batches and scores predictions, and `classification`, `ner` and
`translation` say how. `sampler` chooses the rows of each mini-batch.
"""

from collapipe.tasks.loading import check_num_rows, load_task
from collapipe.tasks.sampler import Cursor, begin_round, draw
from collapipe.tasks.task import MicroBatch, Task
from collapipe.tasks.vocabulary import (
    make_vocabulary,
    read_vocabulary,
    special_token_ids,
    write_tokenizer_files,
)

__all__ = [
    "Cursor",
    "MicroBatch",
    "Task",
    "begin_round",
    "check_num_rows",
    "draw",
    "load_task",
    "make_vocabulary",
    "read_vocabulary",
    "special_token_ids",
    "write_tokenizer_files",
]
