"""Small real files, and jobs that read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collapipe.job import JobConfig

JobMaker = Callable[..., JobConfig]


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., str]:
    """Writes a classification file; its labels alternate."""

    def write(name: str, count: int, labels: tuple[str, ...] = ("cold", "warm")) -> str:
        path = tmp_path / name
        rows = [
            {
                "text": f"{name} text {i} is {labels[i % len(labels)]}",
                "label": labels[i % len(labels)],
            }
            for i in range(count)
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
