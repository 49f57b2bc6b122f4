"""When a person is warned of a job that goes on, and that they are told once, with an advice."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collapipe.job import JobConfig
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.job_warnings import (
    FlatLoss,
    OneAnswer,
    WaitingDevices,
    few_rows,
    long_warm_up,
    random_base,
    slow_emulation,
)
from collapipe.telemetry.sources import Series
from collapipe.v1 import scheduler_pb2
from collapipe.v1.job_pb2 import Evaluation, RoundSummary
from collapipe.v1.scheduler_pb2 import RoundCommitted
from collapipe_client import load_preset

from .jobs import job


@pytest.mark.parametrize(
    ("warm_up", "warns"), [(31, True), (15, False), ("auto", False), (0, False)]
)
def test_warm_up_that_takes_most_of_the_training(warm_up: int | str, warns: bool) -> None:
    found = long_warm_up(job({"rounds": 6, "local_steps": 5, "warm_up_steps": warm_up}))
    assert (found is not None) == warns
    if found is not None:
        assert "takes 31 steps, but the whole training has 30" in found.message
        assert "training.warm_up_steps" in found.advice


def test_short_training_with_the_preset_of_ner_has_a_short_warm_up() -> None:
    short = load_preset("ner", ["training.rounds=2", "training.local_steps=12"])
    assert short.training.num_warm_up_steps(short.total_steps) == 2
    assert long_warm_up(short) is None


@pytest.mark.parametrize(
    ("settings", "warns"),
    [([], False), (["model.lora.r=4"], False), (["model.lora.r=4", "model.pretrained="], True)],
)
def test_adapter_of_random_weights(settings: list[str], warns: bool) -> None:
    warning = random_base(load_preset("classification", settings))
    assert (warning is not None) == warns
    if warning is not None:
        assert "are random" in warning.message and "model.pretrained" in warning.advice


def test_cluster_with_fewer_rows_than_a_round_takes() -> None:
    warning = few_rows(job(), [500, 32])
    assert warning is not None
    assert "cluster 1 has 32 training rows, but a round takes 80" in warning.message
    assert "2.5 times" in warning.message and "training.local_steps to 2" in warning.advice
    assert few_rows(job(), [500, 80]) is None


def answers(config: JobConfig, *one_answer: bool) -> list[bool]:
    """Returns whether each evaluation leads to a warning."""
    looking = OneAnswer()
    return [
        looking.look_at(config, Evaluation(num_rounds=index + 1, one_answer=each)) is not None
        for index, each in enumerate(one_answer)
    ]


def test_same_answer_for_all_rows_is_told_at_the_end_or_if_it_lasts() -> None:
    six = job({"rounds": 6})
    assert answers(six, True, True, False, False, False, True) == [False] * 5 + [True]
    assert answers(six, True, True, True) == [False, False, True]
    assert answers(six, *[False] * 6) == [False] * 6
    assert answers(job({"rounds": 20}), *[True] * 6) == [False] * 4 + [True] * 2


def train(
    config: JobConfig, loss: Callable[[int], float], noise: float = 0.1, first: int = 1
) -> list[Any]:
    """Trains two clusters whose losses are normal around a mean, and returns the warnings."""
    chance, looking, found = random.Random(7), FlatLoss(), []
    steps = config.training.local_steps
    for number in range(first, config.training.rounds + 1):
        means = [loss(step) for step in range((number - 1) * steps, number * steps)]
        summaries = [
            RoundSummary(losses=[mean * chance.gauss(1.0, noise) for mean in means])
            for _ in range(2)
        ]
        found.append(
            looking.look_at(config, RoundCommitted(num_rounds=number, summaries=summaries))
        )
    return [warning for warning in found if warning is not None]


def test_loss_that_stays_or_rises_is_told() -> None:
    demo = load_preset("demo")
    [warning] = train(demo, lambda step: 2.0, noise=0.03)
    assert warning.code == scheduler_pb2.WARNING_CODE_FLAT_LOSS
    assert (
        "the loss does not fall: its mean was 1.9921 in the first quarter of 40 steps"
        in warning.message
    )
    assert "training.learning_rate" in warning.advice
    assert train(demo, lambda step: 2.0 + step / 40)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("rounds", [4, 40])
def test_loss_that_falls_by_a_fifth_is_not_told(noise: float, rounds: int) -> None:
    config = load_preset("demo", [f"training.rounds={rounds}"])
    total = config.total_steps
    assert not train(config, lambda step: 2.0 * (1 - 0.2 * step / total), noise)


def test_flat_end_after_a_fall_a_warm_up_and_a_resumed_job_are_not_told() -> None:
    assert not train(load_preset("demo"), lambda step: max(1.0, 2.0 - step / 10))
    warming_up = load_preset("demo", ["training.warm_up_steps=30"])
    assert not train(warming_up, lambda step: 2.0)
    assert not train(load_preset("demo", ["training.rounds=40"]), lambda step: 2.0, first=20)


def test_loss_of_a_long_job_is_looked_at_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapipe.scheduler.job_warnings._MOST_LOSSES", 64)
    config = load_preset("demo", ["training.rounds=60"])
    [*_, warning] = train(config, lambda step: 2.0, noise=0.03)
    assert not train(config, lambda step: 2.0 / (1 + step / 600))
    assert "the loss does not fall" in warning.message


def committed(number: int, **busy: float) -> RoundCommitted:
    """Returns a round of 30 s in which hosts were busy for so many seconds."""
    summary = RoundSummary()
    for host_id, seconds in busy.items():
        report = summary.stages.add(host_id=host_id)
        report.times.forward_seconds, report.times.total_seconds = seconds, 30.0
        report.times.waiting_seconds = 30.0 - seconds
    return RoundCommitted(num_rounds=number, summaries=[summary])


def test_device_that_waits_in_two_rounds_is_told_with_its_seconds() -> None:
    looking = WaitingDevices()
    busy = {"unit": 0.1, "fast": 1.0, "slow": 20.0, "edge": 0.1}
    assert looking.look_at(committed(1, **busy)) is None
    assert looking.look_at(committed(2, **{**busy, "fast": 5.0})) is None
    assert looking.look_at(committed(3, **busy)) is None
    warning = looking.look_at(committed(4, **busy))
    assert warning is not None
    assert "round 4, fast waited for 29.0 of 30.0 s, as in" in warning.message
    assert "slow" not in warning.message and "edge" not in warning.message
    hanging = WaitingDevices()
    for number in (1, 2, 3):
        late = committed(number, **busy)
        late.late_clusters.append(0)
        assert hanging.look_at(late) is None


def counters(busy: float, overrun: float) -> list[Series]:
    at = 1000.0
    names = {
        "collapipe_stage_forward_seconds_sum": busy,
        "collapipe_emulation_overrun_seconds_total": overrun,
    }
    return [
        Series("a:1", name, (), ((at, 5.0), (at + 60, 5.0 + seconds)))
        for name, seconds in names.items()
    ]


def test_emulation_that_does_not_hold_is_told_with_the_host() -> None:
    hosts = {"a:1": "device-0"}
    warning = slow_emulation(counters(20.0, 1.0), hosts)
    assert warning is not None
    assert "took 1.0 s longer than it should, 5% of the 20.0 s" in warning.message
    assert "most of it on device-0" in warning.message and "time_scale" in warning.advice
    assert slow_emulation(counters(20.0, 0.3), hosts) is None
    assert slow_emulation(counters(2.0, 0.1), hosts) is None
    assert slow_emulation(counters(20.0, 1.0), {"b:1": "device-1"}) is None


def test_warning_is_an_event_and_is_told_once(tmp_path: Path) -> None:
    events, jobs = EventLog(), JobStore(tmp_path)
    progress = JobProgress(jobs.create(job({"rounds": 1})), jobs, events)
    for _ in range(2):
        progress.evaluated(Evaluation(num_rounds=1, num_rows=9, one_answer=True))
        for number in (1, 2):
            progress.round_committed(committed(number, unit=1.0, fast=0.1, edge=1.0))
    events.close()
    told = [event.warning for event in events.watch(20.0) if event and event.HasField("warning")]
    assert [warning.code for warning in told] == [
        scheduler_pb2.WARNING_CODE_ONE_CLASS,
        scheduler_pb2.WARNING_CODE_WAITING_DEVICE,
    ]
    assert all(warning.message and warning.advice for warning in told)
