"""Tests that real processes train the same weights on the same rows, whatever the format of the files."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.tiny_jobs import make_job, write_rows
from stored_jobs import StoredRow

from collapipe.job import JobConfig
from collapipe_client import LocalTestbed
from integration.running import FinishedJob, run_job

NUM_ROWS = (40, 30)


def with_data(job: JobConfig, **data: Any) -> JobConfig:
    return job.model_copy(update={"data": job.data.model_copy(update=data)})


def run(testbed: LocalTestbed, job: JobConfig) -> tuple[FinishedJob, list[str]]:
    """Returns also the notes about held-out rows and about how rows were read."""
    notes: list[str] = []

    def listen(event: Any) -> None:
        message = event.data_note.message
        if any(
            words in message for words in ("is not set", "no training row", "read with", "span")
        ):
            notes.append(message)

    return run_job(testbed, job, on_event=listen), notes


def test_csv_and_parquet_train_the_weights_of_json_lines(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    job = make_job(tmp_path, num_rows=NUM_ROWS, devices_per_cluster=[2, 1])
    assert isinstance(job.data.train, list)
    as_csv, as_parquet = [], []
    for name in job.data.train:
        rows = [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]
        as_csv.append(name.replace(".jsonl", ".csv"))
        with Path(as_csv[-1]).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["label", "text"])
            writer.writeheader()
            writer.writerows(rows)
        as_parquet.append(name.replace(".jsonl", ".parquet"))
        datasets.Dataset.from_list(rows).to_parquet(as_parquet[-1])
    expected, notes = run(testbed, job)
    assert notes == []
    for files in (as_csv, as_parquet):
        finished, notes = run(testbed, with_data(job, train=files))
        assert notes == []
        assert finished.losses(0) == expected.losses(0)
        weights = finished.weights()
        assert all(torch.equal(weights[key], tensor) for key, tensor in expected.weights().items())


def test_held_out_rows_are_told_and_unknown_labels_count_as_errors(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(tmp_path, num_rows=NUM_ROWS, devices_per_cluster=[2, 1])
    finished, [note] = run(testbed, with_data(job, held_out=None))
    num_held_out = finished.evaluations[-1].num_rows
    assert f"data.held_out is not set: {num_held_out} of 70 rows are held out" in note
    held_out = Path(write_rows(tmp_path, "classification", "held-out", 4))
    with held_out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "a stone", "label": "animal"}) + "\n")
    finished, [note] = run(testbed, job)
    assert f"no training row has the label animal ({held_out}:5)" in note
    evaluation = finished.evaluations[-1]
    assert (evaluation.num_rows, evaluation.metric) == (5, "accuracy")
    assert evaluation.value <= 0.8


def test_resumed_job_holds_out_the_rows_that_it_chose_when_the_files_were_short(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(tmp_path, num_rows=NUM_ROWS, devices_per_cluster=[2, 1])
    assert isinstance(job.data.train, list)
    job = with_data(job, held_out=None, max_held_out_rows=3)
    shorter = job.training.model_copy(update={"rounds": 1})
    run(testbed, job.model_copy(update={"training": shorter}))
    for name in job.data.train:
        with Path(name).open("a", encoding="utf-8") as file:
            for number in range(60):
                file.write(json.dumps({"text": f"a new stone {number}", "label": "thing"}) + "\n")
    finished = run_job(testbed, job, resume=True)
    assert finished.evaluations[-1].num_rows <= 6
    row = StoredRow(finished.state / "scheduler", "job", finished.job_id)
    assert row.read()["num_first_rows"] == list(NUM_ROWS)
