"""The tasks of jobs: rows (`collapipe.data`) become micro-batches, and predictions become metrics.

Reading order: `vocabulary` encodes texts. `task` makes micro-batches and computes metrics, and `classification`, `ner`,
`translation`, `causal_lm` and `instruction` say how. `sampler` chooses the rows of each mini-batch. `loading` puts all of
this together.
"""

from collapipe.tasks.loading import load_task as load_task
from collapipe.tasks.loading import load_task_for_use as load_task_for_use
from collapipe.tasks.sampler import Cursor as Cursor
from collapipe.tasks.sampler import begin_round as begin_round
from collapipe.tasks.sampler import draw as draw
from collapipe.tasks.task import MicroBatch as MicroBatch
from collapipe.tasks.task import Task as Task
from collapipe.tasks.vocabulary import declared_tokens as declared_tokens
from collapipe.tasks.vocabulary import make_vocabulary as make_vocabulary
from collapipe.tasks.vocabulary import parse_vocabulary as parse_vocabulary
from collapipe.tasks.vocabulary import read_vocabulary as read_vocabulary
from collapipe.tasks.vocabulary import write_tokenizer_files as write_tokenizer_files
