"""What is counted in the data of a job becomes findings, each with its place, and warnings stop a strict job."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from collapipe.data.cluster_rows import check_data, join_findings
from collapipe.data.findings import JobFacts, alike_labels, find, folded, unknown_labels
from collapipe.data.row_counts import count_rows
from collapipe.data.rows import Row, TaggedRow
from collapipe.data.sources import SourceFacts
from collapipe.errors import InvalidInputError
from collapipe.finding import MOST_LINES, Finding, in_order, shortened
from collapipe.job import JobConfig

TRAIN = [(f"text {number}", "pn"[number % 2]) for number in range(40)]
HELD_OUT = [(f"other {number}", "pn"[number % 2]) for number in range(120)]
Pairs = Sequence[tuple[str, str]]


def rows_of(file: str, pairs: Pairs) -> list[Row]:
    return [Row(file, line, (text,), (label,)) for line, (text, label) in enumerate(pairs, 1)]


def findings(train: Pairs, held_out: Pairs) -> list[Finding]:
    sources = [SourceFacts("train"), SourceFacts("held-out")]
    rows = rows_of("train", train), rows_of("held-out", held_out)
    return find(count_rows("classification", sources, *rows))


def warnings(train: Pairs, held_out: Pairs) -> list[Finding]:
    return [each for each in findings(train, held_out) if each.severity == "warning"]


def test_plain_data_has_only_a_note_with_the_number_of_rows_of_each_label() -> None:
    [note] = findings(TRAIN, HELD_OUT)
    assert (note.severity, note.place) == ("note", "train")
    assert note.what.endswith(": p 20, n 20")


def test_findings_about_huge_labels_stay_short() -> None:
    huge = [f"{number}{end}" for number in range(50) for end in ("x" * 1_000_000, "X" * 1_000_000)]
    found = findings([(f"text {label[:3]}", label) for label in huge], [])
    unknown = unknown_labels({label: f"f:{label}" for label in huge}, [])
    assert unknown is not None and len(found) > 2
    assert max(len(each.text) for each in [*found, unknown]) < 5000


def test_at_most_20_labels_are_listed_the_largest_first() -> None:
    pairs = [
        (f"{label} {number}", f"l{label:02}") for label in range(30) for number in range(label)
    ]
    single, note = findings(pairs, [])
    assert single.what.endswith(": l01")
    listed = note.what.rpartition(": ")[2].split(", ")
    assert listed == [*(f"l{label:02} {label}" for label in range(29, 9, -1)), "..."]
    assert " 29 labels" in note.what


@pytest.mark.parametrize(
    "text",
    ["text 7", " text  7 ", "TEXT 7", "text\u00a07", "te\u200bxt 7", "ｔｅｘｔ 7"],
    ids=["same", "blanks", "case", "NBSP", "invisible", "wide"],
)
def test_held_out_row_that_is_a_training_row_is_named(text: str) -> None:
    [leak] = warnings(TRAIN, [*HELD_OUT, (text, "n")])
    assert leak.place == "held-out:121" and "1 of 121 held-out rows" in leak.what


def test_pair_is_shared_only_if_both_texts_are() -> None:
    pairs = [Row("train", 1, ("a b", "c d"), ())], [Row("test", 1, ("a b", "e f"), ())]
    facts = count_rows("translation", [SourceFacts("train")], *pairs)
    assert facts.shared.number == 0


def test_repeated_rows_are_a_note_and_contradicting_ones_a_warning() -> None:
    repeated, *_ = findings([*TRAIN, *TRAIN[3:5]], HELD_OUT)
    assert (repeated.severity, repeated.place) == (
        "note",
        "train:41",
    ) and "2 of 42" in repeated.what
    [other] = warnings([*TRAIN, ("text 3", "p")], HELD_OUT)
    assert other.place == "train:41"


@pytest.mark.parametrize(
    "text", ["\u0093quoted\u0094", "caf\ufffd", "caf\u00c3\u00a9", "a\x08", "it\u00e2\u20ac\u2122s"]
)
def test_text_of_a_wrong_encoding_is_noted(text: str) -> None:
    found, _ = findings([*TRAIN, (text, "p")], HELD_OUT)
    assert (found.severity, found.place) == ("note", "train:41") and "1 of 41" in found.what


@pytest.mark.parametrize(
    "text", ["caf\u00e9", "AMANH\u00c3\u00a0!", "\u00e0\u00a0!", "a\tb\nc", "a\x0cb", "\U0001f600"]
)
def test_ordinary_letters_are_no_sign_of_a_wrong_encoding(text: str) -> None:
    assert len(findings([*TRAIN, (text, "p")], HELD_OUT)) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Pos", "pos"),
        ("card arrival", "card\u00a0arrival"),
        ("card arrival", "card  arrival"),
        ("pos", "pos\u200b"),
        ("fine", "\ufb01ne"),
        ("1", "1.0"),
        ("01", "1"),
    ],
)
def test_labels_that_look_alike_are_named_with_their_numbers(one: str, other: str) -> None:
    [found] = warnings([*TRAIN, ("a", one), ("b", one), ("c", other)], HELD_OUT)
    assert f"{one!r} (2 rows, train:41)" in found.what
    assert f"{other!r} (1 row, train:43)" in found.what


def test_many_alike_labels_are_one_warning_that_names_some() -> None:
    pairs = [(f"row {n}", f"{'aA'[n % 2]} {n // 2:03}") for n in range(600)]
    [found] = warnings(pairs, HELD_OUT)
    assert " 600 classes" in found.what and len(str(found)) < 1000
    assert "'A 000' (1 row, train:2) and 'a 000' (1 row, train:1), 'A 001'" in found.what


def test_label_of_a_held_out_row_may_look_like_one_of_a_training_row() -> None:
    [found] = warnings(TRAIN, [*HELD_OUT, ("a", "P")])
    assert "'P' (1 row, held-out:121)" in found.what


@pytest.mark.parametrize(
    "labels", [["-1", "1"], ["1234567", "1234568"], ["a b", "ab"], ["a-b", "a_b"], ["", "0"]]
)
def test_labels_that_differ_in_more_are_not_alike(labels: list[str]) -> None:
    assert alike_labels(labels) == []
    assert folded("\u00c4 B") == folded("a\u0308  b")


def test_label_with_one_row_is_noted() -> None:
    found, _ = findings([*TRAIN, ("a", "q")], HELD_OUT)
    assert (found.severity, found.place) == ("note", "train:41") and found.what.endswith(": q")


def test_entities_are_counted_by_type() -> None:
    tags = ("B-x", "I-x", "B-y", "O", "B-x")
    row = TaggedRow("train", 1, ("a b c d e",), tags, tuple("abcde"))
    single, note = find(count_rows("ner", [SourceFacts("train")], [row], []))
    assert single.what.endswith(": y")
    assert note.what.endswith(": x 2, y 1")


def test_translations_that_are_their_source_or_in_other_letters_are_named() -> None:
    rows = [
        Row("train", line, (f"a river {line}", f"ein Fluss {line}"), ()) for line in range(1, 9)
    ]
    rows += [Row("train", 9, ("a river", "a river"), ())]
    rows += [Row("train", line, (f"a {line}", "река"), ()) for line in (10, 11)]
    found = find(count_rows("translation", [SourceFacts("train")], rows, []))
    same, script = [each for each in found if each.severity == "warning"]
    assert (same.place, script.place) == ("train:9", "train:10")
    assert "Cyrillic" in script.what


def scripts_of(targets: Sequence[str]) -> list[str]:
    """Returns the places of warnings about translations whose sources are all different."""
    rows = [Row("train", n, (f"row {n}", text), ()) for n, text in enumerate(targets, 1)]
    found = find(count_rows("translation", [SourceFacts("train")], rows, []))
    return [each.place for each in found if each.severity == "warning"]


@pytest.mark.parametrize(
    "targets",
    [
        ["東京都", "ありがとう", "コンピューター", "ｺﾝﾋﾟｭｰﾀｰ", "々々", "ーー"] * 9,
        ["ありがとう"] * 999 + ["Sony"] * 3,
        ["река"] * 9 + ["Sony"],
        ["río", "ﬁne", "Ｓｏｎｙ", "𝐒𝐨𝐧𝐲"] * 9,
    ],
    ids=["Japanese", "brands", "one brand", "Latin"],
)
def test_letters_of_one_language_and_single_names_are_no_warning(targets: list[str]) -> None:
    assert scripts_of(targets) == []


@pytest.mark.parametrize("others", [2, 10])
def test_letters_of_a_hundredth_of_the_translations_are_a_warning(others: int) -> None:
    rows = ["река"] * (100 * others - others)
    assert scripts_of([*rows, *["ありがとう"] * others]) == [f"train:{len(rows) + 1}"]


def test_blank_texts_of_a_language_model_are_counted() -> None:
    rows = [Row("train", line, (text,), ()) for line, text in enumerate(["a", "", " "], 1)]
    [note] = find(count_rows("causal_lm", [SourceFacts("train")], rows, []))
    assert note.place == "train:2" and "2 blank" in note.what


def test_labels_that_the_limit_of_rows_leaves_out_are_named() -> None:
    rows = rows_of("train", [*TRAIN, ("a", "late"), ("b", "n")])
    facts = count_rows("classification", [SourceFacts("train")], rows[:40], [], rows[40:])
    [found] = [each for each in find(facts) if each.severity == "warning"]
    assert found.place == "data.max_rows" and found.what.endswith(": late")


def test_warnings_come_first_and_at_most_ten_lines_are_shown() -> None:
    note, warning = Finding("note", "a", "b"), Finding("warning", "a", "c", "do d")
    assert in_order([note, warning, note]) == [warning, note]
    assert str(warning) == "warning: a: c: do d"
    many = [Finding("note", str(number), "b") for number in range(25)]
    assert shortened(many[:10]) == many[:10]
    *first, rest = shortened(many)
    assert first == many[:9] and rest.what.startswith("16 ") and MOST_LINES == 10
    assert shortened(many, "--json prints all")[-1].what.endswith(": --json prints all")


# --- whole jobs


Write = Callable[[str, Pairs], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, pairs: Pairs) -> str:
        lines = [json.dumps({"text": text, "label": label}) for text, label in pairs]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return write_file


def job_of(clusters: int = 1, **data: Any) -> JobConfig:
    document = {
        "clusters": clusters,
        "task": {"kind": "classification"},
        "data": data,
        "training": {"mini_batch": 4},
        "schedule": {"num_micro_batches": 2},
    }
    return JobConfig.from_dict(document, "job")


def test_strict_job_is_refused_for_a_warning_and_not_for_a_note(write: Write) -> None:
    good = {"train": write("a.jsonl", [*TRAIN, TRAIN[0]]), "held_out": write("b.jsonl", HELD_OUT)}
    assert {each.severity for each in check_data(job_of(strict=True, **good))} == {"note"}
    bad = {**good, "held_out": write("c.jsonl", [*HELD_OUT, TRAIN[0]])}
    [first, *_] = check_data(job_of(**bad))
    assert (first.severity, first.place) == ("warning", f"{bad['held_out']}:121")
    with pytest.raises(InvalidInputError, match=r"data\.strict.* 1: (.|\n)*c\.jsonl:121"):
        check_data(job_of(strict=True, **bad))


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_link_to_the_training_file_is_refused_as_held_out_file(
    write: Write, tmp_path: Path, link: Callable[[str, str], None]
) -> None:
    train, held_out = write("a.jsonl", TRAIN), str(tmp_path / "b.jsonl")
    link(train, held_out)
    with pytest.raises(InvalidInputError, match=r"both data\.train and data\.held_out"):
        check_data(job_of(train=train, held_out=held_out))


def test_file_that_cannot_be_looked_up_is_refused_by_its_name(write: Write) -> None:
    long = (
        "a" * 300 + ".jsonl"
    )  # As for a file in a folder of somebody else, the system refuses to look it up.
    with pytest.raises(InvalidInputError, match="aaa"):
        check_data(job_of(train=long, held_out=write("b.jsonl", HELD_OUT)))


@pytest.mark.parametrize("is_held_out", [True, False])
def test_parallel_files_are_those_of_the_training_if_both_are(
    tmp_path: Path, is_held_out: bool
) -> None:
    for name in ("a.en", "a.de", "b.en"):
        (tmp_path / name).write_text("".join(f"{name} row {n}\n" for n in range(40)), "utf-8")
    held_out = ["a.en" if is_held_out else "b.en", "a.de"]
    data = {
        "train": f"{tmp_path}/a.en,{tmp_path}/a.de",
        "held_out": ", ".join(f"{tmp_path}/{name}" for name in held_out),
    }
    job = job_of(**data)
    job = job.model_copy(update={"task": job.task.model_copy(update={"kind": "translation"})})
    if not is_held_out:
        assert all("training rows" not in each.what for each in check_data(job))
        return
    with pytest.raises(InvalidInputError, match=r"both data\.train and data\.held_out"):
        check_data(job)


def test_file_that_two_clusters_have_is_a_warning(write: Write) -> None:
    train = write("a.jsonl", TRAIN)
    job = job_of(2, train=[train, train], held_out=write("b.jsonl", HELD_OUT))
    [found] = [each for each in check_data(job) if each.severity == "warning"]
    assert found.place == train and "clusters 0 and 1" in found.what


def test_copy_of_the_training_file_is_a_warning(write: Write) -> None:
    pairs = TRAIN * 3
    data = {"train": write("a.jsonl", pairs), "held_out": write("b.jsonl", pairs)}
    [leak] = [each for each in check_data(job_of(**data)) if each.severity == "warning"]
    assert "120 of 120 held-out rows" in leak.what


def test_rows_that_are_all_of_their_own_label_are_refused(write: Write) -> None:
    data = {"train": write("a.jsonl", [(f"text {n}", f"label {n}") for n in range(40)])}
    with pytest.raises(InvalidInputError, match=r"a\.jsonl: each of the 40 .*label_column"):
        check_data(job_of(**data))


def test_files_of_clusters_are_told_together(write: Write) -> None:
    files = [write("a.jsonl", TRAIN), write("b.jsonl", TRAIN[:8])]
    data = {"train": files, "held_out": write("c.jsonl", [("x", "p"), ("y", "z")])}
    found = [str(each) for each in check_data(job_of(clusters=2, **data))]
    [unknown] = [each for each in found if f"label z ({data['held_out']}:2)" in each]
    [few] = [each for each in found if "only 2 rows" in each]
    assert sum(" 2 labels" in each for each in found) == 2
    assert [each.startswith("warning: ") for each in (unknown, few)] == [True, True]


def test_findings_about_all_clusters_come_first_and_count_in_a_strict_job(write: Write) -> None:
    train = write("a.jsonl", TRAIN)
    facts = JobFacts(40, 5, ["p", "n"], {"p": "b:1"}, (3, 0))
    of_clusters = [Finding("warning", "a", "b"), Finding("note", "c", "d")]
    job = job_of(2, train=[train, train])
    found = join_findings(job, facts, of_clusters)
    places = [each.place for each in found]
    assert places[:3] == [train, "held-out data", "a"]
    assert places[3:] == ["data.held_out is not set", "task.max_length", "c"]
    strict = job_of(1, strict=True, train=train)
    assert join_findings(strict, None, of_clusters[1:]) == of_clusters[1:]
    with pytest.raises(InvalidInputError, match=r"data\.strict.* 1: "):
        join_findings(strict, facts, [])
