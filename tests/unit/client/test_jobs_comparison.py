"""`collapipe jobs compare`: what jobs reached after equal rounds and equal time."""

import json
from typing import Any

import pytest

from collapipe.v1.scheduler_pb2 import GetRecordsResponse, JobStatus
from collapipe_client.jobs_comparison import compare_jobs

from .commands import run, run_json
from .fake_services import FakeServices


def record(
    name: str, rate: float, seconds: list[float], losses: list[float], metrics: dict[int, float]
) -> list[dict[str, Any]]:
    """Returns the parts of a job with so many rounds. `metrics` has the accuracy after a round."""
    job = {
        "id": f"{name}-1",
        "name": name,
        "state": "succeeded",
        "committed": len(seconds),
        "evaluation": {"metric": "accuracy", "value": 0.5},
        "settings": {"name": name, "clusters": 1, "training": {"learning_rate": rate}},
    }
    pipeline = [{"id": host} for host in ("control-unit-0", "device-0-0", "edge-server")]
    cluster = {"pipeline": pipeline, "devices": ["device-0-0"]}
    rounds = [
        {
            "round": number,
            "every": 1,
            "seconds": taken,
            "seconds_without_evaluation": taken - 1.0,
            "predicted_seconds": 1.0,
            "samples_per_second": 8.0,
            "losses": [loss + 1, None, loss - 1],
            "metrics": {"accuracy": metrics[number], "macro_f1": metrics[number] / 2}
            if number in metrics
            else {},
            "clusters": [cluster],
            "pushed_bytes": 3_000_000,
            "fetched_bytes": 1_000_000,
        }
        for number, (taken, loss) in enumerate(zip(seconds, losses, strict=True), start=1)
    ]
    return [job, *rounds]


SLOW = record("slow", 1e-4, [10.0, 20.0], [5.0, 4.0], {2: 0.4})
FAST = record("fast", 1e-3, [4.0, 5.0, 6.0, 7.0], [5.0, 3.0, 2.0, 1.0], {1: 0.2, 3: 0.6})


def test_losses_and_metrics_are_those_after_equal_rounds_and_after_equal_time() -> None:
    document = compare_jobs([SLOW, FAST])
    assert document["at_rounds"] == [
        {
            "round": 1,
            "loss": [5.0, 5.0],
            "metric": [None, 0.2],
            "other_metrics": {"macro_f1": [None, 0.1]},
        },
        {
            "round": 2,
            "loss": [4.0, 3.0],
            "metric": [0.4, 0.2],
            "other_metrics": {"macro_f1": [0.2, 0.1]},
        },
    ]
    # The fast job has ended after 22 s, and the slow one has committed only its first round by then.
    assert document["at_seconds"] == {
        "seconds": 22.0,
        "loss": [5.0, 1.0],
        "metric": [None, 0.6],
        "other_metrics": {"macro_f1": [None, 0.3]},
    }
    assert document["settings"] == {"training.learning_rate": [1e-4, 1e-3]}
    slow, fast = document["jobs"]
    assert (slow["round_seconds"], fast["round_seconds"]) == (15.0, 5.5)
    assert slow["devices"] == ["device-0-0"] and slow["weights_bytes_of_a_round"] == 4_000_000


def test_rounds_that_are_left_out_count_from_the_next_one_on() -> None:
    job, *rounds = FAST
    sampled = [job, *({**each, "every": 2} for each in (rounds[0], rounds[2]))]
    document = compare_jobs([sampled, FAST])
    # Round 1 took 4 s. Round 2 is not in the records, and counts like round 3, which took 6 s.
    assert [each["seconds"] for each in document["jobs"]] == [16.0, 22.0]
    assert document["at_seconds"]["loss"] == [2.0, 2.0]


def test_a_job_without_rounds_can_be_compared() -> None:
    document = compare_jobs([record("none", 1e-4, [], [], {}), FAST])
    assert document["at_rounds"] == []
    reached = document["at_seconds"]
    assert (reached["loss"], reached["metric"]) == ([None, None], [None, None])
    assert document["jobs"][0]["round_seconds"] is None


@pytest.fixture
def remote(fake: FakeServices) -> list[str]:
    fake.jobs = [JobStatus(job_id=f"{name}-1", name=name) for name in ("slow", "fast")]
    fake.records = {
        parts[0]["id"]: [GetRecordsResponse(part_json=json.dumps(part)) for part in parts]
        for parts in (SLOW, FAST)
    }
    return fake.options


def test_command_prints_a_table_that_fits_80_columns(remote: list[str]) -> None:
    printed = run("jobs", "compare", "slow", "fast", *remote).stdout.splitlines()
    lines = [line.split() for line in printed]
    assert ["slow-1", "fast-1"] in lines
    assert ["seconds", "of", "a", "round", "15", "5.5"] in lines
    assert ["seconds", "without", "evaluation", "14", "4.5"] in lines
    assert ["seconds", "of", "a", "round,", "predicted", "1", "1"] in lines
    assert ["loss", "after", "22", "s", "5", "1"] in lines
    assert ["training.learning_rate", "0.0001", "0.001"] in lines
    assert max(map(len, printed)) <= 80
    assert run_json("jobs", "compare", "slow", "fast", *remote) == compare_jobs([SLOW, FAST])


def test_table_has_settings_that_look_like_markup(fake: FakeServices, remote: list[str]) -> None:
    for name, path in (("slow", "/data/[/x]"), ("fast", "[b]:key:")):
        job, *rounds = fake.records[f"{name}-1"]
        document = json.loads(job.part_json)
        document["settings"]["data"] = {"train": path}
        fake.records[f"{name}-1"] = [GetRecordsResponse(part_json=json.dumps(document)), *rounds]
    printed = run("jobs", "compare", "slow", "fast", *remote).stdout.splitlines()
    [line] = [line for line in printed if line.startswith("data.train")]
    assert line.split() == ["data.train", "/data/[/x]", "[b]:key:"]


def test_one_job_is_nothing_to_compare(remote: list[str]) -> None:
    assert "at least 2" in run("jobs", "compare", "slow", "slow-1", *remote, code=2).stderr
