"""Texts are packed into rows of a language model, and its losses become perplexity."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from collapipe.errors import InvalidInputError
from collapipe.tasks import Task, load_task

LoadRows = Callable[..., Task]
Load = Callable[..., Task]
WORDS = ["river", "stone", "lamp", "green", "quiet", "seven", "paper"]


def lines(count: int, start: int = 0) -> list[str]:
    """Returns texts of 1 to 7 words."""
    return [
        " ".join(WORDS[(number + i) % 7] for i in range(1 + number % 7))
        for number in range(start, start + count)
    ]


@pytest.fixture
def load(load_rows: LoadRows) -> Load:
    def load_lines(
        family: str = "llama", count: int = 60, held_out: int = 20, max_length: int = 8
    ) -> Task:
        train, test = lines(count), lines(held_out, start=3)
        sections = {"task": {"max_length": max_length}, "model": {"family": family}}
        return load_rows("causal_lm", "\n".join(train) + "\n", "\n".join(test) + "\n", **sections)

    return load_lines


def tokens(task: Task) -> list[int]:
    """Returns the training rows, one after the other."""
    rows = task.micro_batches(range(task.num_rows), 1)[0].tensors["input_ids"]
    assert rows.shape[1] == 8
    return rows.flatten().tolist()


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_rows_are_the_joined_texts(load: Load, family: str) -> None:
    task = load(family)
    tokenizer = Tokenizer.from_str(task.vocabulary.decode())
    end = tokenizer.token_to_id("</s>" if family == "llama" else "<|endoftext|>")
    expected = [token for text in lines(60) for token in [*tokenizer.encode(text).ids, end]]
    assert tokens(task) == expected[: len(expected) // 8 * 8]
    assert len(expected) % 8 > 0
    assert expected.count(end) == 60


def test_a_label_is_the_next_token_and_the_last_token_has_none(load: Load) -> None:
    [batch] = load().micro_batches([0, 1], 1)
    rows, labels = batch.tensors["input_ids"], batch.tensors["labels"]
    assert torch.equal(labels[:, :-1], rows[:, 1:])
    assert labels[:, -1].tolist() == [-100, -100]
    assert batch.num_targets == 14
    assert bool(batch.tensors["attention_mask"].all())


def test_appended_texts_continue_the_last_row(load: Load, tmp_path: Path) -> None:
    growing = load(count=31)
    before = tokens(growing)
    with (tmp_path / "train.txt").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines(29, start=31)) + "\n")
    job = growing._rows._job
    assert growing.refresh() > len(before) // 8
    whole = load_task(job, 0, growing.vocabulary)
    assert tokens(growing) == tokens(whole)
    assert tokens(growing)[: len(before)] == before


@pytest.mark.parametrize("has_held_out_file", [True, False])
def test_limit_of_held_out_rows_counts_rows_of_tokens(
    load_rows: LoadRows, tmp_path: Path, has_held_out_file: bool
) -> None:
    texts = "".join(f"{text} {number}\n" for number, text in enumerate(lines(300)))
    sections = {"task": {"max_length": 8}, "model": {"family": "llama"}}
    job = load_rows("causal_lm", texts, texts, **sections)._rows._job
    held_out = job.data.held_out if has_held_out_file else None
    num_rows = []
    for most in (None, 5):
        data = job.data.model_copy(update={"held_out": held_out, "max_held_out_rows": most})
        task = load_task(job.model_copy(update={"data": data}), 0, None)
        num_rows.append((task.num_rows, task.num_held_out_rows))
    (trained, measured), (trained_with_limit, measured_with_limit) = num_rows
    assert measured_with_limit == 5 < measured
    # What is not measured trains: of a text that is cut at the limit, less than a row is lost.
    gained = 0 if has_held_out_file else measured - 5
    assert 0 <= trained + gained - trained_with_limit <= 2


@pytest.mark.parametrize("has_held_out_file", [True, False])
def test_limit_of_held_out_rows_cuts_a_long_text(
    load_rows: LoadRows, tmp_path: Path, has_held_out_file: bool
) -> None:
    books = [" ".join(lines(200, start=start)) for start in range(30)]
    sections = {"task": {"max_length": 8}, "model": {"family": "llama"}}
    texts = "\n".join(books) + "\n"
    job = load_rows("causal_lm", texts, texts, **sections)._rows._job
    held_out = job.data.held_out if has_held_out_file else None
    data = job.data.model_copy(update={"held_out": held_out, "max_held_out_rows": 5})
    task = load_task(job.model_copy(update={"data": data}), 0, None)
    assert task.num_held_out_rows == 5
    with (tmp_path / "train.txt").open("a", encoding="utf-8") as file:
        file.write(texts.replace("river", "stream"))
    trained = task.num_rows
    assert task.refresh() > trained
    assert task.num_held_out_rows == 5


def test_perplexity_and_accuracy_count_every_target_once(load: Load) -> None:
    task = load()
    sizes = [batch.num_rows for batch in task.held_out_micro_batches(3)]
    assert sum(sizes) == task.num_held_out_rows > 3
    # Each of the 7 targets of a row costs log 5, and 2 of them are right.
    predictions = [torch.tensor([[7 * math.log(5), 2.0]] * size) for size in sizes]
    values = task.score(predictions)
    assert list(values) == [task.metric, "token_accuracy"]
    assert values == pytest.approx({"perplexity": 5.0, "token_accuracy": 2 / 7})


def test_blank_texts_do_not_count(load: Load, load_rows: LoadRows) -> None:
    expected = tokens(load())
    texts = lines(60)
    given = [
        "\n" + "".join(f"{text}\n \n" for text in texts),
        [{"text": text} for text in [*texts[:9], "", " ", *texts[9:]]],
    ]
    for rows in given:
        sections = {"task": {"max_length": 8}, "model": {"family": "llama"}}
        assert (
            tokens(load_rows("causal_lm", rows, "\n".join(lines(20, start=3)), **sections))
            == expected
        )


@pytest.mark.parametrize(
    ("count", "held_out", "message"),
    [(200, 1, r"\d+ tokens.*max_length = 16"), (3, 40, r"has \d .*max_length \(16 ")],
)
def test_too_little_text_is_refused(load: Load, count: int, held_out: int, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load(count=count, held_out=held_out, max_length=16)
