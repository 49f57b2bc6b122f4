"""What a person should know about the data of a job: facts that were counted become findings.

All of this is pure. `sources` counts what is in a file, `row_counts` counts what is in its rows, and `cluster_rows` puts both
together. No finding has the text of a row, because services pass findings on. They have names of labels, files and lines.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from collapipe.errors import InvalidInputError
from collapipe.finding import Finding, shortened
from collapipe.job import JobConfig
from collapipe.mistakes import MOST_NAMED, say_some

_MOST_LABELS = 20
"""Most labels whose numbers of rows are told."""
_FEW_HELD_OUT_ROWS = 100
"""With fewer of them, one row more that is right changes a metric by more than 1 %."""
_FEWEST_OF_SCRIPT, _LEAST_SHARE_OF_SCRIPT = 2, 0.01
"""Fewer translations with other letters are names, and no mistake."""
_FATES_OF_LONG_ROWS = {
    "ner": ("are cut", "are cut, so that the words that are cut off count as misses"),
    "translation": ("are cut", "are cut, but BLEU compares with the whole translation"),
    "instruction": ("are left out", "count as wrong answers"),
}
"""What becomes of longer training rows and held-out rows than `task.max_length`, by the kind of the task. Other kinds only cut them."""
_NUMBER = re.compile(r"[+-]?\d{1,15}(\.\d+)?")


def _warning(place: str, what: str, remedy: str) -> Finding:
    return Finding("warning", place, what, remedy)


def _note(place: str, what: str, remedy: str = "") -> Finding:
    return Finding("note", place, what, remedy)


@dataclass
class Counted:
    """How many times something was found, and where first."""

    number: int = 0
    place: str = ""

    def add(self, place: str) -> None:
        self.place = self.place or place
        self.number += 1


@dataclass
class SourceFacts:
    """What was counted while a file was read for the first time."""

    name: str
    num_lines: int = 0
    """0 if the source has no lines."""
    num_rows: int = 0
    scheme: str = "IOB2"
    """That of the tags in the file."""
    columns: str = ""
    """Which columns were taken because of names that are usual elsewhere."""
    spanning: Counted = field(default_factory=Counted)
    """Rows with a value that spans lines."""
    spanning_rows: Counted = field(default_factory=Counted)
    """Those of which each line looks like a row of its own."""
    document_starts: Counted = field(default_factory=Counted)
    """Lines that begin with -DOCSTART-."""


@dataclass
class RowFacts:
    """What was counted in the training rows, or in the held-out rows. Limits of `data` have been applied."""

    num_rows: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    """Rows with each class; for ner, entities of each type."""
    label_places: dict[str, str] = field(default_factory=dict)
    """The first row with each class or type."""
    blank: Counted = field(default_factory=Counted)
    damaged: Counted = field(default_factory=Counted)
    """Rows with characters that show that a text was read in a wrong encoding."""
    repeated: Counted = field(default_factory=Counted)
    """Rows that are like an earlier one, as `folded` compares."""
    contradicting: Counted = field(default_factory=Counted)
    """Rows with the text of an earlier one, but another label."""
    untranslated: Counted = field(default_factory=Counted)
    """Rows whose target is their source."""
    num_measurable: int = 0
    """Translations that may have four words as BLEU counts them."""
    scripts: dict[str, Counted] = field(default_factory=dict)
    """For translation, the alphabets of the targets."""


@dataclass
class DataFacts:
    """What was counted in the data that one cluster reads."""

    kind: str
    sources: Sequence[SourceFacts]
    train: RowFacts
    held_out: RowFacts
    shared: Counted
    """Held-out rows that are also training rows."""
    num_left_out: int = 0
    """Training rows behind `data.max_rows`."""
    lost_labels: Collection[str] = ()
    """Labels that only those have."""
    has_all_held_out: bool = True
    """Whether no other cluster has more held-out rows."""


def find(facts: DataFacts) -> list[Finding]:
    """Returns the findings about the data of one cluster. Their number does not depend on the data's size."""
    found = [finding for source in facts.sources for finding in find_in_source(source)]
    shared = facts.shared
    if shared.number:
        found.append(
            _warning(
                shared.place,
                f"{shared.number} of {facts.held_out.num_rows} held-out rows are also training rows, this one first, so the metrics "
                "are too good",
                "remove them from one of the two",
            )
        )
    is_measured = facts.kind == "translation" and facts.has_all_held_out
    if is_measured and facts.held_out.num_rows and not facts.held_out.num_measurable:
        found.append(
            _warning(
                facts.sources[-1].name,
                "no held-out translation has four words, so BLEU is 0 even if all of them are translated exactly",
                "hold out longer sentences",
            )
        )
    return [
        *found,
        *_in_rows(facts.train, "training"),
        *_in_rows(facts.held_out, "held-out"),
        *_in_limit(facts),
        *_in_labels(facts),
    ]


def _in_rows(rows: RowFacts, which: str) -> Iterator[Finding]:
    if rows.contradicting.number:
        yield _warning(
            rows.contradicting.place,
            f"{rows.contradicting.number} of {rows.num_rows} {which} rows have the text of an earlier row but another label, this one "
            "first",
            "correct one of the two",
        )
    if rows.untranslated.number:
        yield _warning(
            rows.untranslated.place,
            f"in {rows.untranslated.number} of {rows.num_rows} {which} rows the translation is the source itself, this one first",
            "translate or remove them",
        )
    by_number = sorted(rows.scripts, key=lambda each: rows.scripts[each].number, reverse=True)
    for common, script in pairwise(by_number[:2]):
        count = rows.scripts[script]
        if count.number >= max(_FEWEST_OF_SCRIPT, _LEAST_SHARE_OF_SCRIPT * rows.num_rows):
            yield _warning(
                count.place,
                f"{count.number} of {rows.num_rows} {which} rows have translations in {script} letters, this one first, but most "
                f"are in {common} letters",
                "check that source and target are not exchanged",
            )
    if rows.repeated.number:
        yield _note(
            rows.repeated.place,
            f"{rows.repeated.number} of {rows.num_rows} {which} rows repeat an earlier one, this one first",
            "remove them if that is not meant",
        )
    if rows.damaged.number:
        yield _note(
            rows.damaged.place,
            f"{rows.damaged.number} of {rows.num_rows} {which} rows, this one first, have control characters, U+FFFD or letters such "
            "as Ã©, as if they had once been read in a wrong encoding",
            "read the original file in its own encoding, or remove these characters",
        )
    if rows.blank.number:
        yield _note(
            rows.blank.place,
            f"CollaPipe leaves out {_number(rows.blank.number, f'blank {which} text')}, this one first",
        )


def _in_limit(facts: DataFacts) -> Iterator[Finding]:
    """Says what `data.max_rows` leaves out."""
    if facts.lost_labels:
        yield _warning(
            "data.max_rows",
            f"it leaves out all rows of {_number(len(facts.lost_labels), 'label')}: {say_some(sorted(facts.lost_labels))}",
            "raise it, or shuffle the rows of the file",
        )
    elif facts.num_left_out:
        yield _note(
            "data.max_rows",
            f"it allows {facts.train.num_rows}, so CollaPipe leaves out {_number(facts.num_left_out, 'training row')} at the end of "
            f"{facts.sources[0].name}",
        )


def _in_labels(facts: DataFacts) -> Iterator[Finding]:
    train, held_out = facts.train, facts.held_out
    one = "entity" if facts.kind == "ner" else "row"
    labels = train.labels + held_out.labels
    places = held_out.label_places | train.label_places
    if groups := alike_labels(places):
        listed = say_some(
            [
                " and ".join(
                    f"{label!r:.40} ({_number(labels[label], one)}, {places[label]})"
                    for label in alike[:MOST_NAMED]
                )
                for alike in groups
            ]
        )
        yield _warning(
            places[groups[0][0]],
            f"these labels differ only in case, blanks or the way of writing, but are {sum(map(len, groups))} classes: {listed}",
            "write them alike",
        )
    single = [label for label, number in train.labels.items() if number == 1]
    if single and len(single) < len(train.labels):
        yield _note(
            train.label_places[single[0]],
            f"{_number(len(single), 'type' if facts.kind == 'ner' else 'label')} with one training {one} only, this one first: "
            f"{say_some(single)}",
            f"check how {'they are' if len(single) > 1 else 'it is'} written, or add rows",
        )
    if train.labels:
        most = train.labels.most_common(_MOST_LABELS)
        listed = ", ".join(f"{label:.40} {number}" for label, number in most)
        classes = _number(len(train.labels), "type" if facts.kind == "ner" else "label")
        yield _note(
            facts.sources[0].name,
            f"{_number(train.num_rows, 'training row')} with {classes}, and the {_plural(one)} of each: {listed}"
            f"{', ...' * (len(train.labels) > len(most))}",
        )


def find_in_source(facts: SourceFacts) -> Iterator[Finding]:
    """Yields what a person should know about how a file was read."""
    name, spanning, torn = facts.name, facts.spanning, facts.spanning_rows
    counts = f"{_number(facts.num_lines, 'line')}, {_number(facts.num_rows, 'row')}"
    if torn.number:
        yield _warning(
            torn.place,
            f"a value in quotes spans lines that look like rows of their own ({_number(torn.number, 'row')} with such a value; {counts})",
            "if they are rows, double each quote and put the value in quotes",
        )
    elif spanning.number:
        yield _note(
            spanning.place,
            f"{_number(spanning.number, 'row')} with a value that spans lines, this one first ({counts})",
        )
    if facts.columns:
        yield _note(
            name,
            f"is read with {facts.columns}",
            "name other columns with --set if that is wrong",
        )
    if facts.document_starts.number:
        yield _note(
            facts.document_starts.place,
            f"{_number(facts.document_starts.number, 'line')} with -DOCSTART- left out, this one first",
        )
    if facts.scheme != "IOB2":
        yield _note(
            name,
            f"its tags are {facts.scheme}, and are read as IOB2: B- opens every entity, and I- continues it",
        )


@dataclass
class TextFacts:
    """What was counted in the texts of one cluster as tokens."""

    num_rows: int = 0
    special: Counted = field(default_factory=Counted)
    """Rows with a special token that is written out in a text."""
    first_special: str = ""
    """A token in the first of them."""
    unknown: Counted = field(default_factory=Counted)
    """Rows with a text of which at least half of the tokens are unknown."""


def find_in_texts(kind: str, facts: Sequence[TextFacts]) -> Iterator[Finding]:
    """Yields what a person should know about texts as tokens, given the facts of each cluster."""
    num_rows = sum(each.num_rows for each in facts)
    special = [each for each in facts if each.special.number]
    if special:
        make = _note if kind == "causal_lm" else _warning  # Such tokens may separate documents.
        yield make(
            special[0].special.place,
            f"{sum(each.special.number for each in special)} of {num_rows} rows, this one first, contain special tokens such as "
            f"{special[0].first_special!r}, which the vocabulary does not read as text",
            "write them differently if they are meant as text",
        )
    unknown = [each.unknown for each in facts if each.unknown.number]
    if unknown:
        yield _warning(
            unknown[0].place,
            f"{sum(each.number for each in unknown)} of {num_rows} rows, this one first, have a text of which at least half of the "
            "tokens are unknown to the vocabulary",
            "use a pretrained model for this language, or correct the texts",
        )


@dataclass(frozen=True)
class JobFacts:
    """What was counted in the data of all clusters.

    Args:
        num_train: Training rows.
        num_held_out: Held-out rows.
        labels: The labels of the job.
        held_out_places: The file and line of the first held-out row with each label.
        num_long: Training rows and held-out rows that are longer than `task.max_length`.
        texts: What was counted in the texts of each cluster, if they were encoded.
    """

    num_train: int
    num_held_out: int
    labels: Collection[str]
    held_out_places: Mapping[str, str]
    num_long: tuple[int, int] = (0, 0)
    texts: Sequence[TextFacts] = ()


def find_in_job(job: JobConfig, facts: JobFacts, held_out_share: float) -> list[Finding]:
    """Returns the findings about the data of all clusters together.

    Args:
        held_out_share: Part of the training rows that is held out if the job names no held-out data.
    """
    found = [
        unknown_labels(facts.held_out_places, facts.labels),
        few_held_out_rows(job.task.kind, facts.num_held_out),
        _held_out_by_hash(job, facts, held_out_share) if job.data.held_out is None else None,
        long_rows(
            job.task.kind,
            job.task.max_length,
            (facts.num_long[0], facts.num_train),
            (facts.num_long[1], facts.num_held_out),
        ),
        *find_in_texts(job.task.kind, facts.texts),
    ]
    return [finding for finding in found if finding is not None]


def _held_out_by_hash(job: JobConfig, facts: JobFacts, share: float) -> Finding:
    known, measured = _classes(job, facts.labels), _classes(job, facts.held_out_places)
    missing = sorted(known - measured)
    most = job.data.max_held_out_rows
    limit = (
        f"; data.max_held_out_rows allows {most}, and the others train"
        if most is not None and facts.num_held_out >= most
        else ""
    )
    rest = (
        f"; the held-out rows lack {len(missing)} of the {len(known)} labels: {say_some(missing)}"
    )
    return _note(
        "data.held_out is not set",
        f"{facts.num_held_out} of {facts.num_held_out + facts.num_train} rows are held out to measure the model (the hash of a text chooses "
        f"about {share:.0%}{limit}){rest if missing else ''}",
    )


def few_held_out_rows(kind: str, num_rows: int) -> Finding | None:
    """Warns of a metric that a few rows decide. A row of `causal_lm` has many targets."""
    if kind == "causal_lm" or not 0 < num_rows < _FEW_HELD_OUT_ROWS:
        return None
    rows = "1 row is" if num_rows == 1 else f"{num_rows} rows are"
    return _warning(
        "held-out data",
        f"only {rows} measured, so a few rows decide the metric",
        f"hold out at least {_FEW_HELD_OUT_ROWS} rows for a meaningful result",
    )


def unknown_labels(places: Mapping[str, str], labels: Iterable[str]) -> Finding | None:
    """Names the labels of held-out rows that no training row has.

    Args:
        places: The file and line of the first held-out row with each label.
        labels: The labels of the job.
    """
    unknown = sorted(places.keys() - set(labels))
    if not unknown:
        return None
    listed = say_some([f"{label} ({places[label]})" for label in unknown])
    return _warning(
        "held-out data",
        f"no training row has the label {listed}. Held-out rows with it count as errors",
        "correct them, or add training rows with the label",
    )


def long_rows(
    kind: str,
    max_length: int,
    train: tuple[int, int],
    held_out: tuple[int, int],
    *,
    is_trained: bool = False,
) -> Finding | None:
    """Says what becomes of rows that are longer than `task.max_length`.

    Args:
        max_length: The most tokens of a row.
        train: How many training rows are longer, and how many the training has.
        held_out: The same of the held-out rows.
        is_trained: Whether the job has ended its training.
    """
    (long, num_rows), (held_out_long, num_held_out_rows) = train, held_out
    if kind == "instruction":
        num_rows += long  # The training has only the others.
    fate, fate_of_held_out = _FATES_OF_LONG_ROWS.get(kind, ("are cut", "are cut"))
    parts = [f"{long} of {num_rows} training rows {fate}"] * (long > 0)
    parts += [f"{held_out_long} of {num_held_out_rows} held-out rows {fate_of_held_out}"] * (
        held_out_long > 0
    )
    if not parts:
        return None
    remedy = (
        "shorten them, or train a job with a larger value"
        if is_trained
        else "raise it if they matter"
    )
    return _note(
        "task.max_length",
        f"{', and '.join(parts)}, because they are longer than task.max_length = {max_length} tokens",
        remedy,
    )


def refuse_warnings(job: JobConfig, findings: Iterable[Finding]) -> None:
    """Raises `InvalidInputError` if `data.strict` is set and there is a warning."""
    warnings = [replace(each, severity="note") for each in findings if each.is_warning]
    if job.data.strict and warnings:
        listed = "\n".join(map(str, shortened(warnings)))
        raise InvalidInputError(
            f"--strict (data.strict) turns warnings about the data into errors, and there are at least {len(warnings)}: correct the data, or "
            f"leave out --strict:\n{listed}"
        )


def alike_labels(labels: Iterable[str]) -> list[list[str]]:
    """Returns the groups of labels that differ only in case, blanks or the way of writing, each sorted."""
    groups: dict[str, list[str]] = {}
    for label in sorted(labels):
        key = folded(label)
        groups.setdefault(repr(float(key)) if _NUMBER.fullmatch(key) else key, []).append(label)
    return [group for group in groups.values() if len(group) > 1]


def folded(text: str) -> str:
    """Returns a text without what readers overlook: case, kinds and numbers of blanks, invisible characters, forms of letters."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        text = "".join(c for c in text if unicodedata.category(c) != "Cf")
    return " ".join(text.casefold().split())


def _number(number: int, what: str) -> str:
    return f"{number} {what if number == 1 else _plural(what)}"


def _plural(what: str) -> str:
    return f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"


def _classes(job: JobConfig, labels: Iterable[str]) -> set[str]:
    """Returns the classes of labels: for ner, the types of entities."""
    if job.task.kind == "ner":
        return {label[2:] for label in labels if label != "O"}
    return set(labels)
