"""What the page shows of past rounds, from the records of the job store."""

from pathlib import Path

import pytest

from collapipe.errors import NotFoundError
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobDocument, JobStore, RoundDocument
from collapipe.scheduler.web import records
from collapipe.scheduler.web.records import Records
from collapipe.v1.job_pb2 import Evaluation, RoundSummary
from collapipe.v1.scheduler_pb2 import RoundCommitted

from .jobs import Clock, Source, hosts, job, knowledge, planner


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path)


@pytest.fixture
def read(store: JobStore) -> Records:
    return Records(HostRegistry(), store, ChannelPool(Security.insecure()))


def commit(store: JobStore, document: JobDocument, index: int, *losses: float) -> None:
    """Plans and commits a round with two clusters, of which the second is late."""
    of = hosts(budget_joules=5.0)
    known = knowledge(of)
    known.backlogs = {"device-0": 2.5}
    plans, decision = planner(of, known, Source(), Clock(), document.job).decide(index, ())
    record = RoundDocument(attempt=0, plans=plans, decision=decision.to_json(), total_steps=1)
    store.save_round(document.job_id, index, record)
    summary = RoundSummary(
        losses=losses,
        evaluation_seconds=1.25,
        training_seconds=4.0,
        local_steps=len(losses),
        gather_seconds=0.5,
    )
    # The last step was busier than the others.
    stage = summary.stages.add(host_id="device-0", busy_ratio=0.9)
    stage.times.forward_seconds, stage.times.backward_seconds = 1.0, 2.0
    stage.times.total_seconds = 4.0
    committed = RoundCommitted(
        num_rounds=index + 1,
        round_seconds=6.0,
        summaries=[summary, RoundSummary(evaluation_seconds=9.0)],
        late_clusters=[1],
    )
    progress = JobProgress(document, store, EventLog())
    document.num_rounds_committed = index + 1
    progress.round_committed(committed)
    progress.evaluated(
        Evaluation(num_rounds=index + 1, metric="accuracy", value=0.5, other_metrics={"loss": 1.0})
    )


def test_round_has_prediction_and_result_after_a_restart(
    store: JobStore, read: Records, tmp_path: Path
) -> None:
    document = store.create(job())
    commit(store, document, 0, 3.0, 1.0)
    store.save(document)
    restarted = Records(HostRegistry(), JobStore(tmp_path), ChannelPool(Security.insecure()))
    page = restarted.rounds(document.job_id, 0)
    assert page == read.rounds(document.job_id, 0) and page["done"]
    [round_] = page["rounds"]  # type: ignore[misc]
    assert round_["seconds"] == 6.0 and round_["predicted_seconds"] > 0
    # The evaluation of the late cluster is longer.
    assert round_["seconds_without_evaluation"] == pytest.approx(round_["seconds"] - 1.25)
    assert round_["losses"] == [3.0, 1.0] and round_["samples_per_second"] == 16 * 2 / 4
    assert round_["metrics"] == {"accuracy": 0.5, "loss": 1.0} and round_["late"] == [1]
    assert round_["queues"] == {"device-0": 2.5}
    assert ["edge-server", "head"] in round_["holders"][0]


def test_round_tells_who_held_what_and_why(store: JobStore, read: Records) -> None:
    document = store.create(job())
    commit(store, document, 0, 2.0)
    told = read.round(document.job_id, 0)
    [cluster] = told["clusters"]  # type: ignore[misc]
    assert cluster["pipeline"][0]["id"] == "control-unit"
    assert cluster["busy"] == {"device-0": 0.75} and cluster["phases"]["gather"] == 0.5
    assert cluster["bottleneck"] and cluster["devices"] == ["device-0", "device-1", "device-2"]
    assert any("the bottleneck is" in line for line in told["why"])  # type: ignore[attr-defined]
    with pytest.raises(NotFoundError, match="round 8"):
        read.round(document.job_id, 7)


def test_long_job_shows_every_second_round_and_few_losses(
    store: JobStore, read: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MOST_ROUNDS", 2)
    monkeypatch.setattr(records, "_MOST_LOSSES", 4)
    document = store.create(job())
    for index in range(4):
        commit(store, document, index, 4.0, 2.0, 3.0, 1.0)
    page = read.rounds(document.job_id, 0)
    rounds: list[dict[str, object]] = page["rounds"]  # type: ignore[assignment]
    assert page["every"] == 2 and [each["round"] for each in rounds] == [1, 3]
    assert [each["losses"] for each in rounds] == [[3.0, 2.0], [3.0, 2.0]]
    assert read.rounds(document.job_id, 1)["rounds"] == rounds[1:]


def test_reading_large_records_pauses_and_goes_on(
    store: JobStore, read: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = store.create(job())
    for index in range(2):
        commit(store, document, index, 1.0)
    clock = iter([0.0, 0.0, 1.0])
    monkeypatch.setattr(records.time, "monotonic", lambda: next(clock))
    page = read.rounds(document.job_id, 0)
    assert len(page["rounds"]) == 1 and page["next"] == 1 and not page["done"]  # type: ignore[arg-type]


def test_rounds_of_an_older_version_and_damaged_decisions_are_shown_as_far_as_possible(
    store: JobStore, read: Records
) -> None:
    document = store.create(job())
    store.save_round(
        document.job_id, 0, RoundDocument(attempt=0, plans=[], decision={}, total_steps=1)
    )
    document.num_rounds_committed = 1
    [round_] = read.rounds(document.job_id, 0)["rounds"]  # type: ignore[misc]
    assert "seconds" not in round_ and round_["predicted_seconds"] is None
    [why] = read.round(document.job_id, 0)["why"]  # type: ignore[misc]
    assert why.startswith("the record of the decision cannot be used")
