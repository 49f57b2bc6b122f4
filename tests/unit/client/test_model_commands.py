"""`collapipe predict` and `collapipe evaluate`, against a scheduler that answers from a list."""

from pathlib import Path

import pytest

from collapipe.v1.job_pb2 import Evaluation
from collapipe.v1.model_use_pb2 import AnswerPiece, ModelOutput
from collapipe.v1.scheduler_pb2 import JOB_STATE_FAILED, JobStatus
from collapipe_client import client
from collapipe_client.message_json import to_document

from .commands import run, run_json, run_lines
from .fake_services import FakeServices


@pytest.fixture
def two_answers(fake: FakeServices) -> FakeServices:
    """The second answer is complete first."""
    fake.jobs = [JobStatus(job_id="job-1", name="demo")]
    pieces = [
        AnswerPiece(text_index=1, text="x", tokens=[7]),
        AnswerPiece(text_index=0, text="a", tokens=[5]),
        AnswerPiece(text_index=1, text="y", tokens=[8], is_last=True),
        AnswerPiece(text_index=0, tokens=[6]),
        AnswerPiece(text_index=0, text="b", tokens=[9], is_last=True),
    ]
    waiting = [ModelOutput(waiting_for="job j to end")] * 2
    fake.outputs = [*waiting, *(ModelOutput(piece=piece) for piece in pieces)]
    return fake


def test_answers_are_printed_in_the_order_of_the_texts(two_answers: FakeServices) -> None:
    options = ("--top-k", "4", "--seed", "2", *two_answers.options)
    result = run("predict", "demo", "one", "two", *options)
    assert result.stdout == "ab\nxy\n"
    assert result.stderr == "waiting for job j to end\n"
    [start] = two_answers.uses
    prediction = start.use.prediction
    assert (start.job_id, list(prediction.texts)) == ("job-1", ["one", "two"])
    assert (prediction.options.top_k, prediction.options.seed) == (4, 2)


def test_lines_of_standard_input_are_texts_and_json_has_the_tokens(
    two_answers: FakeServices,
) -> None:
    told = run_lines("predict", "demo", *two_answers.options, typed="one\n\n two \n")
    assert {"event": "waiting", "for": "job j to end"} in told
    answers = [each for each in told if each["event"] == "answer"]
    assert [(a["row"], a["text"], a["answer"], a["tokens"]) for a in answers] == [
        (2, "", "", []),  # An empty row has an empty answer.
        (3, " two ", "xy", [7, 8]),  # A text is as it was typed.
        (1, "one", "ab", [5, 6, 9]),
    ]
    [use] = two_answers.uses
    assert list(use.use.prediction.texts) == ["one", " two "]
    assert list(use.use.prediction.numbers) == [1, 3]
    result = run("predict", "demo", *two_answers.options, typed="one\n\ntwo\n")
    assert result.stdout == "ab\n\nxy\n"
    assert "1 of 3 rows" in result.stderr and "row 2\n" in result.stderr


def test_rows_that_the_model_answers_with_nothing_are_named(fake: FakeServices) -> None:
    fake.jobs = [JobStatus(job_id="job-1", name="demo")]
    pieces = [
        AnswerPiece(text_index=0, text=" ", tokens=[5], is_last=True),
        AnswerPiece(text_index=1, text="a", tokens=[6], is_last=True),
    ]
    fake.outputs = [ModelOutput(piece=piece) for piece in pieces]
    result = run("predict", "demo", *fake.options, typed="one\n\ntwo\n")
    assert result.stdout == " \n\na\n"
    assert "1 of 3 rows with nothing" in result.stderr and result.stderr.endswith("row 1\n")


def test_row_of_a_file_that_cannot_be_answered_is_named_and_the_others_are_answered(
    fake: FakeServices, tmp_path: Path
) -> None:
    fake.jobs = [JobStatus(job_id="job-1", name="demo")]
    pieces = [
        AnswerPiece(text_index=1, is_last=True, refusal="it has 99 tokens"),
        AnswerPiece(text_index=0, text="a", tokens=[5], is_last=True),
        AnswerPiece(text_index=2, text="c", tokens=[7], is_last=True),
    ]
    fake.outputs = [ModelOutput(piece=piece) for piece in pieces]
    file = tmp_path / "rows.txt"
    file.write_text("one\n\ntwo\nthree\n", encoding="utf-8")
    result = run("predict", "demo", "--data", str(file), *fake.options, code=1)
    assert result.stdout == "a\n\n\nc\n"
    assert "row 3 has an empty answer: it has 99 tokens" in result.stderr
    [use] = fake.uses
    assert use.use.prediction.skips_refused
    told = run_lines("predict", "demo", "--data", str(file), *fake.options, code=1)
    refusals = {each["row"]: each["refusal"] for each in told if each["event"] == "answer"}
    assert refusals == {1: "", 2: "", 3: "it has 99 tokens", 4: ""}


def test_job_that_ended_without_a_model_names_the_older_one(two_answers: FakeServices) -> None:
    failed = JobStatus(job_id="job-2", name="demo", state=JOB_STATE_FAILED)
    two_answers.jobs = [JobStatus(job_id="job-1", name="demo", num_rounds_committed=1), failed]
    result = run("predict", "demo", "one", *two_answers.options, code=1)
    assert "job-2" in result.stderr and "job-1" in result.stderr
    assert two_answers.uses == []
    assert run("predict", "job-1", "one", "two", *two_answers.options).stdout == "ab\nxy\n"


def test_many_texts_become_several_uses(
    two_answers: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_MOST_TEXTS", 2)
    result = run("predict", "demo", "1", "2", "3", "4", *two_answers.options)
    assert [list(start.use.prediction.texts) for start in two_answers.uses] == [
        ["1", "2"],
        ["3", "4"],
    ]
    assert [list(start.use.prediction.numbers) for start in two_answers.uses] == [[1, 2], [3, 4]]
    assert result.stdout == "ab\nxy\nab\nxy\n"


def test_evaluate_sends_the_files_and_prints_the_metrics_and_notes(
    two_answers: FakeServices, tmp_path: Path
) -> None:
    for name, content in (("a.en", "abc"), ("a.de", "de")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    evaluation = Evaluation(num_rounds=3, metric="bleu", value=12.5, num_rows=1, one_answer=True)
    evaluation.definitions["bleu"] = "by a tool"
    evaluation.other_metrics.update({"z": 2, "a": 1})
    evaluation.findings.add(place="held-out data", what="a label is unknown", is_warning=True)
    two_answers.outputs = [ModelOutput(evaluation=evaluation)]
    files = f"{tmp_path}/a.en,{tmp_path}/a.de"
    command = ("evaluate", "demo", "--data", files, *two_answers.options)
    result = run(*command)
    values, *definitions = result.stdout.splitlines()
    assert values == "bleu 12.5000, a 1.0000, z 2.0000 after 3 rounds (1 row)"
    assert definitions == ["  bleu: by a tool"]
    noted, warned = result.stderr.splitlines()
    assert noted == "warning: held-out data: a label is unknown"
    assert warned.startswith("warning: the model")
    assert two_answers.evaluated == b"abcde"
    [start] = two_answers.uses
    assert [(f.name, f.total_bytes) for f in start.use.evaluation.files] == [
        (f"{tmp_path}/a.en", 3),
        (f"{tmp_path}/a.de", 2),
    ]
    document = run_json(*command)
    assert document == {"event": "evaluation", **to_document(evaluation)}
    assert document["other_metrics"] == {"a": 1.0, "z": 2.0} and document["one_answer"]


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("rows.csv", 'text,label\n"one, or",x\ntwo,y\n', []),
        ("rows.tsv", "id\tbody\n1\tone, or\n2\ttwo\n", ["--column", "body"]),
        ("rows.jsonl", '{"text": "one, or"}\n{"text": "two"}\n', []),
        ("rows.txt", "one, or\n\ntwo\n", []),
        ("rows.conll", "one,\tO\nor\tO\n\ntwo\tB-x\n", []),
    ],
)
def test_rows_of_a_file_are_texts_and_need_no_labels(
    two_answers: FakeServices, tmp_path: Path, name: str, content: str, options: list[str]
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    options += two_answers.options
    result = run("predict", "demo", "--data", tmp_path / name, *options)
    empty = "\n" * (name == "rows.txt")
    assert result.stdout == f"ab\n{empty}xy\n", result.output
    [start] = two_answers.uses
    assert list(start.use.prediction.texts) == ["one, or", "two"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "demo", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["evaluate", "demo", "--data", "/dev/zero"], "/dev/zero is a folder, a pipe or a device"),
        (["predict", "demo", "text", "--temperature", "inf"], "temperature is inf"),
        (["predict", "other", "text"], "'other'"),
        (["predict", "demo", "text", "--data", "a.csv"], "--data"),
        (["predict", "demo", "--data", "nowhere.csv"], "nowhere.csv does not exist"),
        (["predict", "demo", "--data", __file__], "not supported"),
    ],
)
def test_bad_input_exits_2(two_answers: FakeServices, arguments: list[str], message: str) -> None:
    assert message in run(*arguments, *two_answers.options, code=2).stderr
    assert two_answers.uses == []
