"""A client finds mistakes in data before anything starts, without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collapipe.data.cluster_rows import check_data
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig


def make_job(tmp_path: Path, data: dict[str, Any], **more: Any) -> JobConfig:
    paths = {key: [f"{tmp_path}/{name}" for name in names] for key, names in data.items()}
    if "held_out" in paths:
        paths["held_out"] = paths["held_out"][0]  # type: ignore[assignment]
    if len(data["train"]) == 1:
        paths["train"] = paths["train"][0]  # type: ignore[assignment]
    document = {"task": {"kind": "classification"}, "data": paths, **more}
    return JobConfig.from_dict({"training": {"mini_batch": 8}, **document}, "job")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    rows = [
        json.dumps({"text": f"text {number}", "label": "ab"[number % 2]}) for number in range(60)
    ]
    (tmp_path / "good.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text("\n".join([*rows, "{}", ""]), encoding="utf-8")
    (tmp_path / "short.jsonl").write_text("\n".join(rows[:20]), encoding="utf-8")


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        ({"train": ["bad.jsonl"]}, {}, r"bad\.jsonl:61: has no column 'text'"),
        ({"train": ["good.jsonl"], "held_out": ["bad.jsonl"]}, {}, r"bad\.jsonl:61: has no column"),
        ({"train": ["good.jsonl", "bad.jsonl"]}, {"clusters": 2}, r"bad\.jsonl:61: has no column"),
        (
            {"train": ["short.jsonl"]},
            {"clusters": 4},
            r"cluster 0 has \d training rows as its share.*fewer than one mini-batch of 8",
        ),
        (
            {"train": ["good.jsonl", "short.jsonl"]},
            {"clusters": 2, "training": {"mini_batch": 32}, "schedule": {"num_micro_batches": 4}},
            r"short\.jsonl: cluster 1 has \d\d training rows, fewer than one mini-batch of 32",
        ),
    ],
)
def test_mistakes_are_found(
    tmp_path: Path, data: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check_data(make_job(tmp_path, data, **more))


def test_good_data_pass_without_torch(tmp_path: Path) -> None:
    job = make_job(tmp_path, {"train": ["good.jsonl", "good.jsonl"]}, clusters=2)
    code = (
        "import sys; from collapipe.data.cluster_rows import check_data; from collapipe.job import JobConfig; "
        "check_data(JobConfig.from_json(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, job.to_json()], check=True, timeout=120)
