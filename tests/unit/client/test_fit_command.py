import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from collapipe.job import JobConfig
from collapipe.v1.plan_pb2 import LinkPlan, Plan, Stage
from collapipe.v1.scheduler_pb2 import RoundCommitted, RoundStarted, WatchJobResponse
from collapipe.v1.tensor_pb2 import CODEC_FP32, CODEC_INT8
from collapipe_client.job_files import load_preset
from collapipe_client.live_view import event_document
from collapipe_client.recorded_run import read_run

from .commands import run, run_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TRUE = (4.0, 2.0, 0.001)
_VARIANCE = 3.0


def _event(**event: Any) -> dict[str, object]:
    (kind,) = event
    return event_document(kind, WatchJobResponse(elapsed_seconds=1.0, **event))


def _job(
    rounds: int, local_steps: int, mini_batch: int, clusters: int = 1, **training: Any
) -> dict[str, object]:
    training |= {"rounds": rounds, "local_steps": local_steps, "mini_batch": mini_batch}
    settings = [f"training.{key}={value}" for key, value in training.items()]
    others = [f"clusters={clusters}", "schedule.num_micro_batches=4"]
    job = load_preset("demo", [*settings, *others])
    return {"event": "job", "config": job.model_dump(mode="json")}


def _round(
    index: int,
    norms: Sequence[float],
    *,
    attempt: int = 0,
    codec: int = CODEC_FP32,
    upload_codec: str = "",
    committed: bool = True,
) -> list[dict[str, object]]:
    """Returns the events of a round in which each cluster makes one step with the given gradient norm."""
    names = ("control-unit", "device", "edge-server")
    stages = [Stage(host_id=name, start_unit=u, stop_unit=u + 1) for u, name in enumerate(names)]
    plans = [
        Plan(
            cluster_index=cluster,
            stages=stages,
            num_micro_batches=4,
            links=[LinkPlan(codec=codec), LinkPlan(codec=codec)],  # type: ignore[arg-type]
            upload_codec=upload_codec,
        )
        for cluster in range(len(norms))
    ]
    started = RoundStarted(round_index=index, attempt=attempt, plans=plans)
    events = [_event(round_started=started)]
    if committed:
        done = RoundCommitted(num_rounds=index + 1)
        for norm in norms:
            done.summaries.add(gradient_norms=[norm] if norm else [])
        events.append(_event(round_committed=done))
    return events


def _write(path: Path, *events: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return str(path)


def _run(path: Path, rounds: int, steps: int, size: int, clusters: int = 2) -> str:
    """Writes a run whose gradient norms follow docs/scheduling.md (11) and the sampling noise exactly."""
    c0, c1, c2 = _TRUE
    term = c0 / (steps * rounds) + c1 / (clusters * size) + c2 * steps**2
    norms = [(term + _VARIANCE / size) ** 0.5] * clusters
    each = [event for index in range(rounds) for event in _round(index, norms)]
    return _write(path, _job(rounds, steps, size, clusters), *each)


def _some_runs(folder: Path) -> list[str]:
    return [
        _run(folder / "a.jsonl", 2, 10, 8),
        _run(folder / "b.jsonl", 4, 10, 64),
        _run(folder / "c.jsonl", 2, 40, 8),
        _run(folder / "d.jsonl", 3, 10, 8, clusters=1),
        _run(folder / "e.jsonl", 3, 5, 16),
        _run(folder / "f.jsonl", 2, 5, 32),
    ]


def _fit_with(folder: Path, *events: dict[str, object]) -> dict[str, Any]:
    """Fits the runs and one of these events. Returns what is said of that one."""
    fitted = run_json("fit", *_some_runs(folder), _write(folder / "run.jsonl", *events))
    return dict(fitted["runs"][-1])


def _refusal(*files: str) -> str:
    return run("fit", *files, code=2).stderr


def test_late_cluster_has_no_norms_to_count(tmp_path: Path) -> None:
    norms = [[3.0, 4.0], [5.0, 0.0]]  # without the second cluster in the second round
    rounds = [event for index in range(2) for event in _round(index, norms[index])]
    path = _write(tmp_path / "late.jsonl", _job(2, 10, 8, 2), *rounds)
    assert read_run(Path(path)).trained_run().squared_gradient_norm == (12.5 + 25) / 2


def test_fit_finds_the_constants_that_the_runs_were_made_with(tmp_path: Path) -> None:
    document = run_json("fit", *_some_runs(tmp_path))
    assert document["convergence_constants"] == pytest.approx([*_TRUE, 0, 0])
    assert document["sampling_variance"]["value"] == pytest.approx(_VARIANCE)
    assert document["runs"][0]["features"] == pytest.approx([1 / 20, 1 / 16, 100, 0, 0])
    assert document["runs"][0]["relative_residual"] == pytest.approx(0, abs=1e-9)
    assert "zero" in document["constants"][3]["note"]
    # Without --json, it prints a section for a job file.
    printed = run("fit", *_some_runs(tmp_path)).stdout
    section = tomllib.loads(printed[printed.index("[schedule]") :])
    job = JobConfig.model_validate({"task": {"kind": "ner"}, **section})
    assert job.schedule.convergence_constants == pytest.approx((*_TRUE, 0, 0))


def test_features_are_means_over_rounds_and_norms_over_clusters(tmp_path: Path) -> None:
    events = [
        _job(2, 1, 8, clusters=2),
        *_round(0, [1.0, 3.0]),
        *_round(1, [2.0, 4.0], codec=CODEC_INT8, upload_codec="bf16"),
    ]
    run = _fit_with(tmp_path, *events)
    assert run["squared_gradient_norm"] == pytest.approx((1 + 9 + 4 + 16) / 4)
    errors = 2 * 2**-7 + 2**-9  # of two links and of the uploads
    assert run["features"][3] == pytest.approx(errors / 2)  # in half of the rounds


def test_aborted_attempts_give_the_loss_probability(tmp_path: Path) -> None:
    events = [_job(2, 1, 8), *_round(0, [1.0], committed=False), *_round(0, [1.0], attempt=1)]
    run = _fit_with(tmp_path, *events, *_round(1, [1.0]))
    assert run["features"][4] == pytest.approx(1 / 3)
    assert run["features"][0] == pytest.approx(1 / 2)  # two rounds, of three tries


def test_committed_round_that_a_later_attempt_repeats_counts_as_two_starts(tmp_path: Path) -> None:
    events = [*_round(0, [9.0]), *_round(1, [1.0], committed=False), *_round(0, [1.0], attempt=1)]
    run = _fit_with(tmp_path, _job(2, 1, 8), *events, *_round(1, [1.0], attempt=1))
    assert run["features"][4] == pytest.approx(1 / 2)
    assert run["features"][0] == pytest.approx(1 / 2)


def test_update_per_micro_batch_has_the_samples_of_a_micro_batch(tmp_path: Path) -> None:
    job = _job(1, 10, 8, update_per="micro_batch")
    run = _fit_with(tmp_path, job, *_round(0, [1.0]))
    assert run["features"][:3] == pytest.approx([1 / 40, 4 / 2, 40**2])
    assert run["samples_per_update"] == 2


def test_fit_of_runs_of_different_learning_rates_names_the_key(tmp_path: Path) -> None:
    other = _write(tmp_path / "other.jsonl", _job(2, 1, 8, learning_rate=0.5), *_round(0, [1.0]))
    assert "training.learning_rate is 0.5" in _refusal(*_some_runs(tmp_path), other)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([_job(2, 1, 8), *_round(1, [1.0], attempt=1)], "cat FIRST.jsonl RESUMED.jsonl"),
        ([_job(1, 1, 8), *_round(0, [1.0]), *_round(0, [1.0])], "round 1"),
    ],
)
def test_file_of_a_part_or_of_several_runs_is_refused(
    tmp_path: Path, events: list[dict[str, object]], words: str
) -> None:
    assert words in _refusal(_write(tmp_path / "run.jsonl", *events))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "does not exist"),
        ("", "no.jsonl"),
        (json.dumps(_job(1, 1, 8)), "round"),
        ('{"event": "round_committed"}', "no.jsonl"),
        ("[1, 2]", "no.jsonl"),
        ("step 1 of 10", "line 1"),
        pytest.param("[" * 100_000, "line 1", id="deep"),
    ],
)
def test_fit_of_a_file_that_is_no_run_says_why_and_how_to_record_one(
    tmp_path: Path, text: str | None, found: str
) -> None:
    path = tmp_path / "no.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    message = _refusal(str(path))
    assert found in message
    assert "collapipe train JOB.toml --json > RUN.jsonl" in message


def test_fit_of_too_few_runs_is_bad_input(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a.jsonl", 2, 10, 8), _run(tmp_path / "b.jsonl", 4, 20, 64)]
    assert "at least 4 runs" in _refusal(*runs)
