"""Tests that all clusters evaluate, and that the metrics are those of all held-out rows together."""

from pathlib import Path

import pytest
import torch
from reference.tiny_jobs import make_job, write_rows
from stored_jobs import StoredRow

from collapipe.models import adapter_for
from collapipe.tasks import load_task
from collapipe_client import LocalTestbed
from integration.running import FinishedJob, run_job

NUM_ROWS = 7
FAMILIES = {"classification": "bert", "translation": "marian", "instruction": "llama"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_two_clusters_measure_what_one_process_measures_on_all_rows(
    testbed: LocalTestbed, tmp_path: Path, kind: str
) -> None:
    job = make_job(
        tmp_path,
        FAMILIES[kind],
        kind,
        num_rows=(20, 31),
        devices_per_cluster=[2, 1],
        training={"evaluate_every": 1},
    )
    write_rows(tmp_path, kind, "held-out", NUM_ROWS)
    finished = run_job(testbed, job)
    assert [each.num_rounds for each in finished.evaluations] == [1, 2]
    assert {each.num_rows for each in finished.evaluations} == {NUM_ROWS}
    last = finished.evaluations[-1]
    with testbed.client() as client:
        assert client.find_job(finished.job_id).evaluation == last
    expected = measure_alone(finished)
    assert last.metric == next(iter(expected))
    measured = {last.metric: last.value, **last.other_metrics}
    assert measured == pytest.approx(expected, rel=1e-6)
    measured.pop("perplexity", None)
    assert measured.items() <= expected.items()  # Counts are exact.


def measure_alone(finished: FinishedJob) -> dict[str, float]:
    """Evaluates the final model on all held-out rows in this process."""
    directory = finished.state / "edge-server" / "jobs" / finished.job_id
    document = StoredRow(finished.state / "edge-server", "job", finished.job_id).read()
    job = finished.job
    data = job.data.model_copy(update={"train": job.data.train[0]})
    vocabulary = (directory / "blobs" / document["vocabulary_digest"]).read_bytes()
    alone = job.model_copy(update={"clusters": 1, "data": data})
    task = load_task(alone, 0, vocabulary)
    task.set_labels(task.labels)
    model = document["model"]
    adapter = adapter_for(model["family"], model["task"], model["config_json"])
    weights = finished.weights()
    units = []
    for index in range(adapter.num_units):
        unit = adapter.build_unit(index).eval()
        unit.load_state_dict({name: weights[name] for name in adapter.state_names(index)})
        units.append(unit)
    *body, head = units
    predictions = []
    for batch in task.held_out_micro_batches(3):
        activation = None
        with torch.no_grad():
            for unit in body:
                activation = unit(activation, batch.tensors)
        predictions.append(head.predict(activation, batch.tensors))
    return task.score(predictions)
