"""Tests that the scheduler's knowledge about a job survives a restart."""

import json
from pathlib import Path
from typing import Any

import pytest

from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.job import JobConfig
from collapipe.scheduler.decisions import RoundDecision
from collapipe_client import LocalTestbed
from collapipe_client.testbed_processes import Device

pytestmark = pytest.mark.timeout(300)

EMULATION = Emulation(
    devices={
        "device-0-0": EmulatedDevice(profile="raspberry-pi-4"),
        "device-0-1": EmulatedDevice(profile="raspberry-pi-5"),
    },
    time_scale=4.0,
)
DEVICES = [Device(energy_budget_joules=0.01), Device(energy_budget_joules=0.01)]


def make_job(rounds: int) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "restarted",
            "task": {"kind": "classification", "max_length": 16},
            "data": {"source": "stdlib_docstrings", "max_rows": 200, "max_held_out_rows": 16},
            "model": {
                "vocabulary_size": 500,
                "config": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 2,
                },
            },
            "training": {
                "rounds": rounds,
                "local_steps": 2,
                "mini_batch": 8,
                "evaluate_every": 0,
                "replicate_every": 2,
            },
            "schedule": {"strategy": "dssra", "num_micro_batches": 4, "silence_seconds": 60},
        }
    )


def run(directory: Path, rounds: int, *, resume: bool) -> list[RoundDecision]:
    with (
        LocalTestbed([DEVICES], directory, emulation=EMULATION) as testbed,
        testbed.client() as client,
    ):
        job_id = client.submit(make_job(rounds), resume=resume)
        *_, event = client.watch(job_id)
        assert event.status.num_rounds_committed == rounds, event.status.message
        decisions = []
        for index in range(rounds):
            answer = client.explain(job_id, index)
            decisions.append(RoundDecision.from_json(json.loads(answer.decision_json)))
            replayed = client.replay(job_id, index)
            assert list(replayed.replayed) == list(replayed.recorded)
        return decisions


def stored_knowledge(directory: Path) -> dict[str, Any]:
    (path,) = directory.rglob("planner.json")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_energy_queues_plan_and_profiles_are_restored(tmp_path: Path) -> None:
    run(tmp_path, 2, resume=False)
    before = stored_knowledge(tmp_path)
    backlogs = before["knowledge"]["backlogs"]
    assert max(backlogs.values()) > 0  # the energy budgets are too small for a round
    third = run(tmp_path, 3, resume=True)[2].question.problem
    devices = third.clusters[0].devices
    assert {device.host_id: device.backlog for device in devices} == backlogs
    assert third.clusters[0].previous is not None
    assert third.reference_seconds == before["knowledge"]["reference_seconds"]
    hosts = before["knowledge"]["hosts"]
    for device in devices:
        assert device.seconds_per_sample == hosts[device.host_id]["seconds_per_sample"]
