"""Small files with a fault each: every one is read right, warned about or refused, and none is silently wrong."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from collapipe.data.cluster_rows import check_data
from collapipe.data.sources import open_file
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig

RIGHT, WARNED, REFUSED = "right", "warned", "refused"
Pairs = list[tuple[object, object]]
GOOD: Pairs = [(f"a good text {number}", ("café", "bar")[number % 2]) for number in range(30)]
HELD_OUT: Pairs = [(f"another text {number}", ("café", "bar")[number % 2]) for number in range(100)]
TABLES = {
    "csv": ("csv", ","),
    "semicolons": ("csv", ";"),
    "bars": ("csv", "|"),
    "tsv": ("tsv", "\t"),
}
LINES = ("jsonl", "ndjson")
FORMATS = (*TABLES, *LINES, "json")
POSITIONS = (0, 13, 29)


def write(pairs: Pairs, form: str, header: tuple[str, str] = ("text", "label")) -> str:
    if form in TABLES:
        file = io.StringIO()
        rows = csv.writer(file, delimiter=TABLES[form][1], lineterminator="\n")
        rows.writerows([header, *pairs])
        return file.getvalue()
    records = [json.dumps(dict(zip(header, pair, strict=True))) for pair in pairs]
    return f"[{','.join(records)}]" if form == "json" else "\n".join(records) + "\n"


@dataclass(frozen=True)
class Case:
    """A file with a fault.

    Args:
        truth: The rows that a person means, if they can be read.
    """

    name: str
    form: str
    content: str | bytes
    outcome: str
    truth: Pairs

    @property
    def suffix(self) -> str:
        return TABLES[self.form][0] if self.form in TABLES else self.form


ROWS: dict[str, tuple[Callable[[str, str], tuple[object, object]], str]] = {
    "blank behind a label": (lambda text, label: (text, f"{label} "), RIGHT),
    "blank before a label": (lambda text, label: (text, f" {label}"), RIGHT),
    "NBSP behind a label": (lambda text, label: (text, f"{label}\u00a0"), RIGHT),
    "label in upper case": (lambda text, label: (text, label.upper()), WARNED),
    "invisible character in a label": (lambda text, label: (text, f"{label}\u200b"), WARNED),
    "wide letters in a label": (
        lambda text, label: (text, "".join(chr(ord(c) + 0xFEE0) for c in "bar")),
        WARNED,
    ),
    "blank text": (lambda text, label: (" ", label), REFUSED),
    "blank label": (lambda text, label: (text, " "), REFUSED),
    "NUL in a text": (lambda text, label: (f"a\0{text}", label), REFUSED),
    "separators in a text": (lambda text, label: (f"{text}, ; | {{", label), RIGHT),
    "quotes in a text": (lambda text, label: (f'"{text}" he said', label), RIGHT),
}
"""What becomes of a row, and of its file."""


def of_rows() -> Iterator[Case]:
    for name, (change, outcome) in ROWS.items():
        for form in FORMATS:
            for position in POSITIONS:
                pairs = list(GOOD)
                text, label = map(str, pairs[position])
                pairs[position] = change(text, label)
                truth = [(text, str(label).strip()) for text, label in pairs]
                # JSON escapes the character, so it is one of a text.
                is_escaped = name.startswith("NUL") and form not in TABLES
                yield Case(name, form, write(pairs, form), RIGHT if is_escaped else outcome, truth)
    for form in FORMATS:
        for position in POSITIONS:
            pairs = list(GOOD)
            pairs.insert(position, (f"a good text {2 * position % 29}", "bar"))
            pairs.insert(position + 1, (f"a good text {2 * position % 29}", "café"))
            yield Case("contradiction", form, write(pairs, form), WARNED, pairs)
            broken = (f"line one\nline two {position}", "bar")
            pairs = [*GOOD[:position], broken, *GOOD[position:]]
            outcome = REFUSED if form == "tsv" else RIGHT
            yield Case("line break in a text", form, write(pairs, form), outcome, pairs)


def of_bytes() -> Iterator[Case]:
    for form in FORMATS:
        whole = write(GOOD, form)
        nfd = whole.replace("é", "e\u0301").replace("\\u00e9", "e\\u0301")
        is_array, is_table = form == "json", form in TABLES
        cases: list[tuple[str, str | bytes, str]] = [
            ("accents in two characters", nfd, RIGHT),
            ("byte order mark", f"\ufeff{whole}", RIGHT),
            ("line ends of Windows", whole.replace("\n", "\r\n"), RIGHT),
            ("no line end", whole.rstrip("\n"), RIGHT),
            ("blank lines", whole.replace("\n", "\n\n") + "\n", RIGHT),
            ("UTF-16", whole.encode("utf-16"), REFUSED),
            ("nothing", "", REFUSED),
            ("one label", write([(text, "bar") for text, _ in GOOD], form), REFUSED),
            ("labels that are texts", write([(t, f"l {t}") for t, _ in GOOD], form), REFUSED),
            ("columns exchanged", write([(b, a) for a, b in GOOD], form, ("x", "y")), REFUSED),
            ("usual columns", write(GOOD, form, ("utterance", "intent")), RIGHT),
            ("usual columns in capitals", write(GOOD, form, ("Tweet", "SENTIMENT")), RIGHT),
            ("other columns", write(GOOD, form, ("what", "which")), REFUSED),
            ("a column that is missing", write(GOOD, form, ("text", "other")), REFUSED),
        ]
        if not is_array:
            cases.append(("line ends of old Macs", whole.replace("\n", "\r"), REFUSED))
        if is_table:
            cases += of_tables(form)
        else:
            cases += of_objects(form)
        for name, content, outcome in cases:
            yield Case(name, form, content, outcome, GOOD)


def of_tables(form: str) -> Iterator[tuple[str, str | bytes, str]]:
    by = TABLES[form][1]
    header, *lines = write(GOOD, form).splitlines()
    for position in POSITIONS:

        def changed(change: Callable[[str], str], at: int = position) -> str:
            return "\n".join([header, *lines[:at], change(lines[at]), *lines[at + 1 :]]) + "\n"

        yield "value too many", changed(lambda line: f"{line}{by}more"), REFUSED
        yield "value missing", changed(lambda line: line.partition(by)[0]), REFUSED
        yield "open quote", changed(lambda line: f'"{line}'), REFUSED
        if position < 20:
            torn = list(lines)
            torn[position] = f'"{torn[position]}'
            torn[position + 2] = torn[position + 2].replace(by, f'"{by}')
            outcome = REFUSED if form == "tsv" else WARNED
            yield "quotes of two rows", "\n".join([header, *torn]) + "\n", outcome
    yield "Latin-1", "\n".join([header, *lines]).encode("latin-1"), REFUSED
    yield "no header", "\n".join(lines), REFUSED
    yield "header twice", "\n".join([f"text{by}text", *lines]), REFUSED
    yield "blanks in the header", "\n".join([f" text{by} label ", *lines]) + "\n", RIGHT


def of_objects(form: str) -> Iterator[tuple[str, str | bytes, str]]:
    for value in ("null", "[1]", '{"a": 1}', "NaN"):
        content = write(GOOD, form).replace('"bar"', value, 1)
        yield f"label that is {value}", content, REFUSED
    for value in ("5", "null", '["a"]', '"a\\ud800"'):
        content = write(GOOD, form).replace('"a good text 3"', value, 1)
        yield f"text that is {value}", content, REFUSED
    yield "object that is cut off", write(GOOD, form).replace('"label": ', '"label"', 1), REFUSED
    yield "row that is a list", write(GOOD, form).replace('{"text"', '["text"', 1), REFUSED
    yield "comma behind a value", write(GOOD, form).replace('"}', '",}', 1), REFUSED
    yield "key twice", write(GOOD, form).replace('{"text"', '{"id": 1, "id": 2, "text"', 1), RIGHT


CASES = [*of_rows(), *of_bytes()]


def outcome_of(case: Case, folder: Path) -> str:
    path = folder / f"train.{case.suffix}"
    content = case.content if isinstance(case.content, bytes) else case.content.encode()
    path.write_bytes(content)
    held_out = folder / "held-out.csv"
    if not held_out.exists():
        held_out.write_text(write(HELD_OUT, "csv"), encoding="utf-8")
    document = {
        "task": {"kind": "classification"},
        "data": {"train": str(path), "held_out": str(held_out)},
        "training": {"mini_batch": 4},
        "schedule": {"num_micro_batches": 2},
    }
    job = JobConfig.from_dict(document, "job")
    try:
        findings = check_data(job)
    except InvalidInputError as error:
        assert str(path) in str(error)
        return REFUSED
    if any(each.severity == "warning" for each in findings):
        return WARNED
    rows = open_file(str(path), "classification", job.data).read()
    found = [(row.texts[0], row.labels[0]) for row in rows]
    return RIGHT if found == case.truth else "silently wrong"


def test_at_least_200_files_with_faults_are_read_right_warned_about_or_refused(
    tmp_path: Path,
) -> None:
    outcomes = [outcome_of(case, tmp_path) for case in CASES]
    unexpected = [
        (case.name, case.form, case.outcome, outcome)
        for case, outcome in zip(CASES, outcomes, strict=True)
        if outcome != case.outcome
    ]
    assert unexpected == []
    assert len({(case.form, case.content) for case in CASES}) > 400
    assert min(Counter(outcomes).values()) > 50


@pytest.mark.parametrize("suffix", ["csv.gz", "csv.zip", "xlsx", "txt", "conll", "xml"])
def test_file_of_another_format_is_refused_by_its_name(tmp_path: Path, suffix: str) -> None:
    case = Case("another format", suffix, write(GOOD, "csv"), REFUSED, GOOD)
    assert outcome_of(case, tmp_path) == REFUSED
