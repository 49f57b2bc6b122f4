"""Loads the task of a job."""

from collections.abc import Sequence
from pathlib import Path

from collapipe.data.cluster_rows import ClusterRows, NewRows, NoMoreRows, TaskRows
from collapipe.data.findings import find, find_in_texts, refuse_warnings
from collapipe.data.row_counts import count_rows
from collapipe.data.rows import Row
from collapipe.data.sources import open_file
from collapipe.errors import InvalidInputError
from collapipe.finding import Finding
from collapipe.job import JobConfig
from collapipe.models import adapter_class_for
from collapipe.pretrained_directories import MAX_VOCABULARY_BYTES, pretrained_directory
from collapipe.tasks.causal_lm import CausalLanguageModel, packed_tokens
from collapipe.tasks.classification import Classification
from collapipe.tasks.instruction import InstructionFollowing
from collapipe.tasks.ner import EntityRecognition
from collapipe.tasks.task import Task
from collapipe.tasks.translation import Translation
from collapipe.tasks.vocabulary import Vocabulary, make_vocabulary, read_vocabulary

_CLASSES: list[type[Task]] = [
    Classification,
    EntityRecognition,
    Translation,
    CausalLanguageModel,
    InstructionFollowing,
]
_TASKS = {task_class.kind: task_class for task_class in _CLASSES}


def load_task(
    job: JobConfig,
    cluster_index: int,
    vocabulary: bytes | None,
    num_first: int | None = None,
    is_new: bool = True,
    folders: Sequence[Path] = (),
) -> Task:
    """Loads and encodes the rows of one cluster.

    Args:
        vocabulary: The job's vocabulary. `None` reads the one of the pretrained
            directory; a job without pretrained weights gets one from the cluster's training rows.
        num_first: Rows of the cluster's file at the first reading, if another process has read them before.
        is_new: Whether the job begins. Later, `data.strict` does not end it.
        folders: Folders that must hold the job's files. Empty for any place.

    Raises:
        InvalidInputError: The data or the vocabulary cannot be used. The message names the file,
            the line and the remedy.
    """
    adapter_class_for(job.model.family, job.task.kind)  # refuses a family that cannot do the task
    rows = ClusterRows(job, cluster_index, num_first, folders)
    new = rows.read()
    rows.check(new, is_new=is_new)
    if vocabulary is None:
        vocabulary = _make_or_read_vocabulary(job, new)
    most = job.data.max_held_out_rows
    if job.task.kind == "causal_lm" and most is not None:
        encoder = _make_encoder(job, vocabulary)
        rows.limit_held_out(
            most * job.task.max_length, lambda texts: list(map(len, packed_tokens(encoder, texts)))
        )
        new = rows.read()
    task = _make_task(job, rows, new, vocabulary)
    rows.check_num_rows(task.num_rows, task.length_for_more_rows)
    if is_new:
        refuse_warnings(job, [*task.findings, *find_in_texts(task.kind, [task.texts])])
    return task


def load_task_for_use(
    job: JobConfig,
    vocabulary: bytes,
    labels: Sequence[str],
    evaluated: tuple[str, Sequence[Path]] | None = None,
) -> Task:
    """Makes the task of a job for its model. No data of the job is read.

    Args:
        vocabulary: Bytes of the job's tokenizer.json.
        labels: The labels of the job.
        evaluated: The name of a data file, and where it is stored here: two files if the name is that of parallel
            files. Its rows are held out.

    Raises:
        InvalidInputError: A row of the file is wrong. The message names the file and the line.
    """
    held_out: list[Row] = []
    findings: list[Finding] = []
    if evaluated is not None:
        name, stored = evaluated
        source = open_file(name, job.task.kind, job.data, stored)
        held_out = source.read()
        findings = find(count_rows(job.task.kind, [source.facts], [], held_out))
        if not held_out:
            raise InvalidInputError(f"{name}: has no rows: put at least 1 in it")
    name = evaluated[0] if evaluated else "texts"
    task = _make_task(job, NoMoreRows(name, findings), NewRows([], held_out, 0), vocabulary)
    task.set_labels(labels)
    return task


def _make_task(job: JobConfig, rows: TaskRows, new: NewRows, vocabulary: bytes) -> Task:
    return _TASKS[job.task.kind](rows, new, _make_encoder(job, vocabulary))


def _make_encoder(job: JobConfig, vocabulary: bytes) -> Vocabulary:
    return Vocabulary(
        vocabulary,
        job.model.family,
        job.task.max_length,
        cuts_texts=_TASKS[job.task.kind].cuts_texts,
        origin=job.model.pretrained,
    )


def _make_or_read_vocabulary(job: JobConfig, new: NewRows) -> bytes:
    model = job.model
    if model.pretrained is not None:
        vocabulary = read_vocabulary(pretrained_directory(model.pretrained), model.family)
        remedy = f"shorten the tokenizer.json or the chat template of {model.pretrained}"
    else:
        texts = (text for row in new.train for text in row.texts)
        vocabulary = make_vocabulary(texts, model.vocabulary_size, model.family)
        remedy = f"lower model.vocabulary_size, which is {model.vocabulary_size}"
    if len(vocabulary) > MAX_VOCABULARY_BYTES:
        raise InvalidInputError(
            f"the vocabulary of the job, with its chat template, has {len(vocabulary)} bytes, but other hosts take at most "
            f"{MAX_VOCABULARY_BYTES}: {remedy}"
        )
    return vocabulary
