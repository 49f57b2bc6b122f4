"""Small real files, and jobs that read them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from collapipe.job import JobConfig
from collapipe.tasks import Task, load_task

JobMaker = Callable[..., JobConfig]


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., str]:
    """Writes a classification file; its labels alternate."""

    def write(name: str, count: int, labels: tuple[str, ...] = ("cold", "warm")) -> str:
        path = tmp_path / name
        each = [labels[number % len(labels)] for number in range(count)]
        rows = [
            {"text": f"{name} text {number} is {label}", "label": label}
            for number, label in enumerate(each)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def make_job() -> JobMaker:
    """Makes a job of a task kind; keyword arguments are its sections."""

    def make(kind: str, data: dict[str, Any], **sections: Any) -> JobConfig:
        document: dict[str, Any] = {
            "task": {"kind": kind, **sections.pop("task", {})},
            "data": data,
            "model": {"vocabulary_size": 300, **sections.pop("model", {})},
            "training": {"mini_batch": 4},
            "schedule": {"num_micro_batches": 2},
            **sections,
        }
        return JobConfig.from_dict(document, "job")

    return make


@pytest.fixture
def load_rows(tmp_path: Path, make_job: JobMaker) -> Callable[..., Task]:
    """Writes rows to files, and loads the task of a job that reads them.

    Its arguments are the kind of the task, the training rows, the held-out rows, which may be the same, and sections of the
    job. Objects become a .jsonl file, and a text becomes a .conll or a .txt file.
    """

    def load(
        kind: str,
        rows: str | Sequence[dict[str, Any]],
        held_out: str | Sequence[dict[str, Any]] | None = None,
        **sections: Any,
    ) -> Task:
        data = sections.pop("data", {})
        for name, given in (("train", rows), ("held_out", rows if held_out is None else held_out)):
            is_text = isinstance(given, str)
            suffix = "jsonl" if not is_text else "conll" if kind == "ner" else "txt"
            content = given if is_text else "".join(json.dumps(row) + "\n" for row in given)
            data[name] = f"{tmp_path}/{name}.{suffix}"
            Path(data[name]).write_text(content, encoding="utf-8")
        task = load_task(make_job(kind, data, **sections), 0, None)
        task.set_labels(task.labels)
        return task

    return load
