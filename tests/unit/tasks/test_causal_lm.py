"""Texts are packed into rows of a language model, and its losses become perplexity."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.tasks import Task, load_task

JobMaker = Callable[..., JobConfig]
WORDS = ["river", "stone", "lamp", "green", "quiet", "seven", "paper"]


def lines(count: int, start: int = 0) -> list[str]:
    """Returns texts of 1 to 7 words."""
    return [
        " ".join(WORDS[(number + i) % 7] for i in range(1 + number % 7))
        for number in range(start, start + count)
    ]


def load(make_job: JobMaker, folder: Path, family: str = "llama", count: int = 60) -> Task:
    for name, texts in (("train", lines(count)), ("held_out", lines(20, start=3))):
        (folder / f"{name}.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    data = {name: f"{folder}/{name}.txt" for name in ("train", "held_out")}
    job = make_job("causal_lm", data, task={"max_length": 8}, model={"family": family})
    task = load_task(job, 0, None)
    task.set_labels(task.labels)
    return task


def tokens(task: Task) -> list[int]:
    """Returns the training rows, one after the other."""
    rows = task.micro_batches(range(task.num_rows), 1)[0].tensors["input_ids"]
    assert rows.shape[1] == 8
    return rows.flatten().tolist()


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_rows_are_the_joined_texts(make_job: JobMaker, tmp_path: Path, family: str) -> None:
    task = load(make_job, tmp_path, family)
    tokenizer = Tokenizer.from_str(task.vocabulary.decode())
    end = tokenizer.token_to_id("</s>" if family == "llama" else "<|endoftext|>")
    expected = [token for text in lines(60) for token in [*tokenizer.encode(text).ids, end]]
    assert tokens(task) == expected[: len(expected) // 8 * 8]
    assert len(expected) % 8 > 0
    assert expected.count(end) == 60


def test_a_label_is_the_next_token_and_the_last_token_has_none(
    make_job: JobMaker, tmp_path: Path
) -> None:
    [batch] = load(make_job, tmp_path).micro_batches([0, 1], 1)
    rows, labels = batch.tensors["input_ids"], batch.tensors["labels"]
    assert torch.equal(labels[:, :-1], rows[:, 1:])
    assert labels[:, -1].tolist() == [-100, -100]
    assert batch.num_targets == 14
    assert bool(batch.tensors["attention_mask"].all())


def test_appended_texts_continue_the_last_row(make_job: JobMaker, tmp_path: Path) -> None:
    growing = load(make_job, tmp_path, count=31)
    before = tokens(growing)
    with (tmp_path / "train.txt").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines(29, start=31)) + "\n")
    job = growing._rows._job
    assert growing.refresh() > len(before) // 8
    whole = load_task(job, 0, growing.vocabulary)
    assert tokens(growing) == tokens(whole)
    assert tokens(growing)[: len(before)] == before


def test_perplexity_and_accuracy_count_every_target_once(
    make_job: JobMaker, tmp_path: Path
) -> None:
    task = load(make_job, tmp_path)
    sizes = [batch.num_rows for batch in task.held_out_micro_batches(3)]
    assert sum(sizes) == task.num_held_out_rows > 3
    # Each of the 7 targets of a row costs log 5, and 2 of them are right.
    predictions = [torch.tensor([[7 * math.log(5), 2.0]] * size) for size in sizes]
    values = task.score(predictions)
    assert list(values) == [task.metric, "token_accuracy"]
    assert values == pytest.approx({"perplexity": 5.0, "token_accuracy": 2 / 7})


def test_blank_texts_of_json_lines_do_not_count(make_job: JobMaker, tmp_path: Path) -> None:
    expected = tokens(load(make_job, tmp_path))
    for name, texts in (("train", lines(60)), ("held_out", lines(20, start=3))):
        rows = [json.dumps({"text": text}) + "\n" for text in [*texts[:9], "", " ", *texts[9:]]]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    data = {name: f"{tmp_path}/{name}.jsonl" for name in ("train", "held_out")}
    job = make_job("causal_lm", data, task={"max_length": 8}, model={"family": "llama"})
    assert tokens(load_task(job, 0, None)) == expected


def test_blank_lines_do_not_count(make_job: JobMaker, tmp_path: Path) -> None:
    expected = tokens(load(make_job, tmp_path))
    path = tmp_path / "train.txt"
    path.write_text("\n" + path.read_text().replace("\n", "\n \n"), encoding="utf-8")
    data = {"train": str(path), "held_out": str(tmp_path / "held_out.txt")}
    job = make_job("causal_lm", data, task={"max_length": 8}, model={"family": "llama"})
    assert tokens(load_task(job, 0, None)) == expected


def test_docstrings_are_divided_by_package(make_job: JobMaker) -> None:
    """With skewed classes, the clusters have much more different shares of a package than without."""
    differences = []
    for sharding in ("iid", "dirichlet"):
        data = {
            "source": "stdlib_docstrings",
            "sharding": sharding,
            "max_rows": 900,
            "max_held_out_rows": 50,
        }
        job = make_job("causal_lm", data, model={"family": "gpt2"}, clusters=2, seed=1)
        first = load_task(job, 0, None)
        second = load_task(job, 1, first.vocabulary)
        shares = []
        for task in (first, second):
            task.set_labels([])
            groups = Counter(example.row.group for example in task._train)
            shares.append({group: count / task.num_rows for group, count in groups.items()})
        names = {*shares[0], *shares[1]}
        differences.append(
            sum(abs(shares[0].get(name, 0) - shares[1].get(name, 0)) for name in names)
        )
    assert differences[1] > 2 * differences[0]


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        (200, 1, r"held-out texts have \d+ tokens, fewer than one row of task.max_length = 16"),
        (
            3,
            40,
            r"has \d training rows, fewer than .* lower task.max_length \(16 tokens in a row\)",
        ),
    ],
)
def test_too_little_text_is_refused(
    make_job: JobMaker, tmp_path: Path, train: int, held_out: int, message: str
) -> None:
    for name, count in (("train", train), ("held_out", held_out)):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines(count)), encoding="utf-8")
    data = {name: f"{tmp_path}/{name}.txt" for name in ("train", "held_out")}
    job = make_job("causal_lm", data, task={"max_length": 16}, model={"family": "llama"})
    with pytest.raises(InvalidInputError, match=message):
        load_task(job, 0, None)


def test_another_format_is_refused(make_job: JobMaker) -> None:
    job = make_job("causal_lm", {"train": "a.conll"}, model={"family": "llama"})
    with pytest.raises(InvalidInputError, match=r"for causal_lm: use \.jsonl, or \.txt"):
        load_task(job, 0, None)
