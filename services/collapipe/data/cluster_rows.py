"""The training rows and held-out rows of one cluster."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from collapipe.data.findings import (
    JobFacts,
    find,
    find_in_job,
    refuse_warnings,
)
from collapipe.data.hold_out import HELD_OUT_SHARE, HoldOut, Sizes, choose, one_each
from collapipe.data.hub import load_hub_rows
from collapipe.data.row_counts import count_rows
from collapipe.data.rows import Row
from collapipe.data.sharding import dirichlet_clusters, iid_clusters
from collapipe.data.sources import FixedRows, RowSource, open_file
from collapipe.data.stdlib_docstrings import ask_for_package, load_docstrings
from collapipe.errors import InvalidInputError
from collapipe.finding import Finding, in_order
from collapipe.job import LABELLING_TASKS, LANGUAGE_TASKS, JobConfig
from collapipe.job_files import place_of

T = TypeVar("T")
_MOST_LABEL_BYTES = 1 << 21
"""Largest size of all labels together, with the file of each. A message has 8 MiB, and some have each label three times."""
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class NewRows:
    """Rows that were read and are not accepted yet."""

    train: list[Row]
    held_out: list[Row]
    num_shared: int
    """Number of training rows of all clusters that were read."""


class TaskRows(Protocol):
    """The rows of a task, to which more may be appended."""

    name: str
    knows_all_held_out: bool
    """Whether these are the held-out rows of all clusters. Otherwise, each cluster holds out rows of its own file."""

    findings: list[Finding]
    """What a person should know about the rows of the first reading."""

    @property
    def num_first(self) -> int:
        """Rows of the file at the first reading that was accepted."""

    def read(self) -> NewRows:
        """Returns the rows after the accepted ones."""

    def accept(self, new: NewRows) -> None:
        """Marks the rows of the last reading as accepted."""

    def share_held_out(self, items: Sequence[T], num_before: int) -> Sequence[T]:
        """Returns what this cluster evaluates of held-out rows that were read: each is evaluated by one cluster.

        Args:
            items: What the rows became.
            num_before: Items of earlier readings.
        """


class NoMoreRows:
    """Rows to which none are appended."""

    knows_all_held_out = True
    num_first = 0

    def __init__(self, name: str, findings: list[Finding]) -> None:
        self.name, self.findings = name, findings

    def read(self) -> NewRows:
        return NewRows([], [], 0)

    def accept(self, new: NewRows) -> None:
        pass

    def share_held_out(self, items: Sequence[T], num_before: int) -> Sequence[T]:
        return items


class ClusterRows:
    """Reads the job's data and keeps the rows of one cluster, in the order of the data.

    The cluster of a row does not depend on later rows, so appended rows never move earlier ones.

    Args:
        num_first: Rows of the file at the first reading, if another process has read them before.
        folders: Folders that must hold the files. Empty for any place.

    Raises:
        InvalidInputError: The job names no readable data.
        NotPermittedError: A file is in none of the folders.
    """

    def __init__(
        self,
        job: JobConfig,
        cluster_index: int,
        num_first: int | None = None,
        folders: Sequence[Path] = (),
    ) -> None:
        job.check_cluster(cluster_index)
        self._job = job
        self._cluster_index = cluster_index
        self._is_shared = not isinstance(job.data.train, list)
        self._num_shared = 0
        self._num_held_out = 0
        train, held_out = job.data.train, job.data.held_out
        own = train[cluster_index] if isinstance(train, list) else train
        self._train = _open(job, own, folders)
        self._held_out = None if held_out is None else _open(job, held_out, folders)
        # The limit of a language model counts rows of tokens, which `limit_held_out` measures.
        limit = None if job.task.kind == "causal_lm" else job.data.max_held_out_rows
        self._num_first = num_first
        self.limit_held_out(limit)
        self.findings: list[Finding] = []
        self.labels: frozenset[str] = frozenset()
        """Those of the training rows of all clusters that the first reading has found."""
        self.name = self._train.name
        self.knows_all_held_out = self._is_shared or held_out is not None or job.clusters == 1

    def limit_held_out(self, limit: int | None, sizes: Sizes = one_each) -> None:
        """Limits the held-out rows, before any reading is accepted.

        Args:
            limit: Rows are held out until their sizes reach it.
        """
        self._limit, self._sizes = limit, sizes
        self._hold_out = HoldOut(self._job.task.kind, limit, sizes, self._num_first)

    @property
    def num_first(self) -> int:
        """Rows of the file at the first reading that was accepted, by which held-out rows were chosen."""
        return self._hold_out.num_first or 0

    def read(self) -> NewRows:
        """Reads all rows at first, and later the appended training rows. Only `findings` and `labels` change, at the first reading."""
        data = self._job.data
        read = self._train.read()
        held_out: list[Row] = []
        if self._held_out is None:
            read, held_out = self._hold_out.divide(read)
        elif self._num_held_out == 0:
            held_out = choose(self._held_out.read(), self._limit, self._sizes)
        train = read
        if data.max_rows is not None:
            train = read[: max(0, data.max_rows - self._num_shared)]
        if not (self._num_shared or data.source == "stdlib_docstrings"):
            self.labels = frozenset(label for row in train for label in row.labels)
            sources = [self._train.facts]
            if self._held_out is not None:
                sources.append(self._held_out.facts)
            facts = count_rows(self._job.task.kind, sources, train, held_out, read[len(train) :])
            facts.has_all_held_out = self.knows_all_held_out
            self.findings = find(facts)
        return NewRows(self._own(train) if self._is_shared else train, held_out, len(train))

    def check(self, new: NewRows, *, is_new: bool = True) -> None:
        """Raises `InvalidInputError` if the first reading has no training rows, or no cluster has held-out rows.

        With a file for each cluster, only the scheduler knows whether another one has held-out rows.

        Args:
            is_new: Whether the job begins, so that `data.strict` holds. Rows that were appended do not end it later.
        """
        if not new.held_out and self._held_out is not None:
            raise InvalidInputError(f"{self._held_out.name}: has no rows: put at least 1 in it")
        self._check_labels(new)
        self._check_size_of_labels(self.labels, self._train.name)
        held_out = self._held_out or self._train
        labels = frozenset(label for row in new.held_out for label in row.labels)
        self._check_size_of_labels(labels, held_out.name)
        if not new.held_out and new.num_shared and self.knows_all_held_out:
            raise InvalidInputError(
                f"{self.name}: none of its {new.num_shared} rows can be held out for evaluation "
                f"(the hash of the text chooses {HELD_OUT_SHARE:.0%}): add rows, or name a file in "
                "data.held_out"
            )
        if not new.num_shared:
            raise InvalidInputError(
                f"{self.name}: has no rows: put at least one mini-batch in it "
                f"({self._job.training.mini_batch})"
            )
        if is_new:
            refuse_warnings(self._job, self.findings)

    def _check_labels(self, new: NewRows) -> None:
        """Refuses labels that are all different, because they are no classes."""
        num_labels = len(self.labels)
        if self._job.task.kind == "classification" and num_labels == new.num_shared > 2:
            raise InvalidInputError(
                f"{self.name}: each of the {num_labels} training rows has a label of its own, such as {min(self.labels)!r:.40}, so there are "
                "no classes to learn: set data.label_column to the column of the classes"
            )

    def _check_size_of_labels(self, labels: Collection[str], name: str) -> None:
        """Refuses labels that do not fit into a message to the scheduler."""
        size = sum(len(label.encode()) + len(name) for label in labels)
        if size > _MOST_LABEL_BYTES:
            raise InvalidInputError(
                f"{name}: its {len(labels)} labels have {size} bytes with the name of the file, but at most {_MOST_LABEL_BYTES} are allowed: set data.label_column to "
                "the column of the classes, or use fewer or shorter labels"
            )

    def check_num_rows(self, num_rows: int, change_of_length: str | None = None) -> None:
        """Raises `InvalidInputError` if the cluster has fewer training rows than a mini-batch.

        Args:
            change_of_length: How a change of `task.max_length` gives more rows: "raise" or "lower".
        """
        job = self._job
        if num_rows >= job.training.mini_batch:
            return
        remedies = ["add rows", "lower training.mini_batch"]
        if change_of_length is not None:
            remedies.append(
                f"{change_of_length} task.max_length ({job.task.max_length} tokens in a row)"
            )
        if job.data.max_rows is not None:
            remedies.append("raise data.max_rows")
        is_divided = job.clusters > 1 and self._is_shared
        if is_divided:
            remedies.append("use fewer clusters")
            if job.data.sharding == "dirichlet":
                remedies.append(f"raise data.dirichlet_alpha ({job.data.dirichlet_alpha})")
        share = f" as its share of the rows for {job.clusters} clusters" if is_divided else ""
        raise InvalidInputError(
            f"{self.name}: cluster {self._cluster_index} has {num_rows} training rows{share}, fewer than one "
            f"mini-batch of {job.training.mini_batch}: {', or '.join(remedies)}"
        )

    def accept(self, new: NewRows) -> None:
        self._train.accept()
        self._hold_out.accept()
        self._num_shared += new.num_shared
        self._num_held_out += len(new.held_out)

    def share_held_out(self, items: Sequence[T], num_before: int) -> Sequence[T]:
        most = self._job.data.max_held_out_rows
        if most is not None:  # The last text of a language model may pass the limit.
            items = items[: max(0, most - num_before)]
        if not self.knows_all_held_out:
            return items
        first = (self._cluster_index - num_before) % self._job.clusters
        return items[first :: self._job.clusters]

    def _own(self, rows: list[Row]) -> list[Row]:
        job, data = self._job, self._job.data
        if data.sharding == "iid":
            clusters = iid_clusters(job.seed, job.clusters, self._num_shared, len(rows))
        else:
            groups = [row.group for row in rows]
            clusters = dirichlet_clusters(
                job.seed, job.clusters, data.dirichlet_alpha, self._num_shared, groups
            )
        return [
            row
            for row, cluster in zip(rows, clusters, strict=True)
            if cluster == self._cluster_index
        ]


def check_data(job: JobConfig) -> list[Finding]:
    """Reads all rows of a job's files or of its data set, to find mistakes before anything starts.

    Returns:
        What a person should know about them, warnings first.

    Raises:
        InvalidInputError: A row is wrong, or there are too few. The message names the file and the line. Or there are warnings,
            and `data.strict` is set.
    """
    if job.data.source == "stdlib_docstrings":
        _check_docstrings(job)
        return []
    is_shared = not isinstance(job.data.train, list)
    labels: set[str] = set()
    known: set[str] = set()
    places: dict[str, str] = {}
    num_train = num_held_out = 0
    findings: list[Finding] = []
    for cluster_index in range(job.clusters):
        if is_shared and len(labels) > 1:
            break  # The first clusters have shown all rows.
        rows = ClusterRows(job, cluster_index)
        new = rows.read()
        rows.check(new)
        if job.task.kind != "causal_lm":  # Its texts are cut into rows, which needs the vocabulary.
            rows.check_num_rows(len(new.train))
        labels.update(label for row in new.train for label in row.labels)
        known.update(rows.labels)
        findings += rows.findings
        if cluster_index == 0 or not is_shared:
            num_train += new.num_shared
        if cluster_index == 0 or not rows.knows_all_held_out:
            num_held_out += len(new.held_out)
            for row in new.held_out:
                for label in row.labels:
                    places.setdefault(label, row.place)
    if job.task.kind in LABELLING_TASKS and len(labels) < 2:
        trained = job.data.train if isinstance(job.data.train, str) else "the training data"
        raise InvalidInputError(
            f"{trained}: all training rows have the label {next(iter(labels), 'O')!r}, so there is nothing to learn: {job.task.kind} needs "
            "at least 2 labels"
        )
    facts = None
    if job.task.kind not in LANGUAGE_TASKS:  # Tokens decide which rows those have.
        facts = JobFacts(num_train, num_held_out, job_labels(job.task.kind, known), places)
    return join_findings(job, facts, findings)


def join_findings(
    job: JobConfig, facts: JobFacts | None, of_clusters: Iterable[Finding]
) -> list[Finding]:
    """Returns the findings about a job whose files are on this machine, those about all clusters first within warnings and notes.

    Args:
        facts: What was counted in the data of all clusters; `None` if that is not known yet.
        of_clusters: The findings of each cluster.

    Raises:
        InvalidInputError: There are warnings, and `data.strict` is set.
    """
    of_job = [] if facts is None else find_in_job(job, facts, HELD_OUT_SHARE)
    found = in_order([*_repeated_files(job), *of_job, *of_clusters])
    refuse_warnings(job, found)
    return found


def job_labels(kind: str, labels: Iterable[str]) -> list[str]:
    """Returns the labels of a model, in order, given those of training rows. For ner: `O`, and B- and I- of each entity type."""
    if kind != "ner":
        return labels_in_order([labels])
    types = {label[2:] for label in labels if label != "O"}
    return labels_in_order([["O"], *([f"B-{each}", f"I-{each}"] for each in types)])


def labels_in_order(labels_of_clusters: Iterable[Iterable[str]]) -> list[str]:
    """Returns the labels of all clusters in the order of their ids.

    Whole numbers are ordered by their values, and other labels as texts. By convention "O", the label of a word outside all
    entities, comes first.
    """
    labels = {label for labels in labels_of_clusters for label in labels}
    if all(_WHOLE_NUMBER.fullmatch(label) for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels, key=lambda label: (label != "O", label))


def _check_docstrings(job: JobConfig) -> None:
    """Raises `InvalidInputError` if the docstrings of the standard library do not fit the job."""
    data, kind = job.data, job.task.kind
    if kind not in ("classification", *LANGUAGE_TASKS):
        raise InvalidInputError(
            'data.source is "stdlib_docstrings", whose rows have classes, but task.kind is '
            f'{kind!r}: set "classification", "causal_lm" or "instruction", or use files'
        )
    if data.train is not None or data.held_out is not None:
        raise InvalidInputError(
            'data.source is "stdlib_docstrings", which reads no files, but data.train or '
            'data.held_out is set: remove them, or set data.source = "files"'
        )


def _open(job: JobConfig, name: str | None, folders: Sequence[Path]) -> RowSource:
    data, kind = job.data, job.task.kind
    if data.source == "stdlib_docstrings":
        _check_docstrings(job)
        rows = load_docstrings()
        if kind == "instruction":
            rows = list(map(ask_for_package, rows))
        return FixedRows("the standard library's docstrings", rows)
    if name is None:
        what = "file" if data.source == "files" else "split"
        raise InvalidInputError(
            f'data.source is "{data.source}" but data.train is not set: name the {what}'
        )
    if data.source == "hub":
        table = load_hub_rows(name, kind, data, folders)
        return FixedRows(f"{data.hub_name}[{name}]", table.rows, table.columns)
    trained = [data.train] if isinstance(data.train, str) else data.train or []
    same = next((each for each in trained if _is_same_file(each, data.held_out, folders)), None)
    if same is not None:
        raise InvalidInputError(
            f"{data.held_out}: is both data.train and data.held_out{f' (as {same})' * (same != data.held_out)}, so the model would be evaluated on "
            f"its training rows: name another file, or remove data.held_out to hold out {HELD_OUT_SHARE:.0%} "
            "of the training rows"
        )
    return open_file(name, kind, data, folders=folders)


def _is_same_file(one: str, other: str | None, folders: Sequence[Path]) -> bool:
    """Returns whether two names are those of the same file, perhaps by a link, or of the same parallel files."""
    if other is None:
        return False
    names, other_names = (
        [place_of(name.strip(), folders) for name in each.split(",")] for each in (one, other)
    )
    pairs = zip(names, other_names, strict=False)
    return len(names) == len(other_names) and all(
        # Unlike `Path.exists`, this returns False for a file in a folder that must not be read.
        a == b or (os.path.exists(a) and os.path.exists(b) and a.samefile(b))
        for a, b in pairs
    )


def _repeated_files(job: JobConfig) -> Iterator[Finding]:
    """Warns of files that several clusters have, which count that often in the average."""
    files = job.data.train if isinstance(job.data.train, list) else []
    indices: dict[tuple[Path, ...], int] = {}
    for index, name in enumerate(files):
        first = indices.setdefault(tuple(Path(p.strip()).resolve() for p in name.split(",")), index)
        if first < index:
            yield Finding(
                "warning",
                name,
                f"clusters {first} and {index} both train on this file",
                "give each cluster rows of its own, or one file for all as data.train",
            )
