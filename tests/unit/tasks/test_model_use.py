"""Tasks without the data of their job: questions, answers, and rows of a file that is stored elsewhere."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.tasks import Task, load_task_for_use
from collapipe.tasks.vocabulary import make_vocabulary

JobMaker = Callable[..., JobConfig]
WORDS = "the river is green and the lamp is quiet in Z\u00fcrich \u2603"


def task_of(make_job: JobMaker, kind: str, family: str, labels: tuple[str, ...] = ()) -> Task:
    job = make_job(kind, {"train": "gone"}, task={"max_length": 12}, model={"family": family})
    return load_task_for_use(job, make_vocabulary([WORDS], 300, family), labels)


def test_classification_answers_with_a_label(make_job: JobMaker) -> None:
    task = task_of(make_job, "classification", "bert", ("cold", "warm"))
    question = task.question("the river")
    tensors = task.inputs(question).tensors
    assert tensors["attention_mask"].tolist() == [[1] * tensors["input_ids"].shape[1]]
    assert task.answer(question, torch.tensor([1])) == "warm"


def test_ner_answers_with_a_line_for_each_word(make_job: JobMaker) -> None:
    task = task_of(make_job, "ner", "bert", ("O", "B-place", "I-place"))
    question = task.question("  river   Z\u00fcrich ")
    length = task.inputs(question).tensors["input_ids"].shape[1]
    first = question.first_tokens.tolist()
    prediction = torch.zeros((1, length), dtype=torch.int64)
    prediction[0, first[1]] = 1
    assert task.answer(question, prediction) == "river\tO\nZ\u00fcrich\tB-place\n"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_pieces_of_an_answer_continue_the_text(make_job: JobMaker, family: str) -> None:
    task = task_of(make_job, "causal_lm", family)
    whole, before = task.question(WORDS).input_ids.tolist(), task.question("the river is")
    num_before = len(before.input_ids)
    assert whole[:num_before] == before.input_ids.tolist()
    decode = task.answer_stream(before)
    pieces = [decode(token) for token in [*whole[num_before:], task.end_id]]
    assert "".join(pieces) == WORDS.removeprefix("the river is")
    assert "" in pieces, "a token that ends within a character has no characters"


def test_text_that_is_blank_or_too_long_is_refused(make_job: JobMaker) -> None:
    for kind, family in (("classification", "bert"), ("translation", "marian")):
        task = task_of(make_job, kind, family, ("cold",))
        with pytest.raises(InvalidInputError, match=r"task\.max_length = 12"):
            task.question("river " * 30)
        with pytest.raises(InvalidInputError, match="blank"):
            task.question(" ")
    with pytest.raises(InvalidInputError, match="blank"):
        task_of(make_job, "causal_lm", "gpt2").question("\n")


def test_error_in_an_evaluated_file_names_it_as_the_client_does(
    make_job: JobMaker, tmp_path: Path
) -> None:
    stored = tmp_path / "0"
    rows = ['{"text": "the river", "label": "cold"}', '{"text": "the lamp", "label": "wet"}']
    stored.write_text("\n".join(rows), encoding="utf-8")
    job = make_job("classification", {"train": "gone"}, model={"family": "bert"})
    vocabulary = make_vocabulary([WORDS], 300, "bert")
    for labels in (
        ["cold"],
        ["cold", "wet"],
    ):  # An unknown label counts as an error, as in training.
        task = load_task_for_use(job, vocabulary, labels, ("mine.jsonl", [stored]))
        assert (task.num_rows, task.num_held_out_rows) == (0, 2)
        assert task.score([torch.tensor([0, 0])])["accuracy"] == 0.5
        assert task.held_out_labels["wet"] == "mine.jsonl:2"
    stored.write_text(rows[0] + "\n{}", encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"^mine\.jsonl:2: "):
        load_task_for_use(job, vocabulary, ["cold"], ("mine.jsonl", [stored]))
    stored.write_text("", encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"^mine\.jsonl: "):
        load_task_for_use(job, vocabulary, ["cold"], ("mine.jsonl", [stored]))
