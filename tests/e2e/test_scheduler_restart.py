"""Tests that the scheduler's knowledge about a job survives a restart."""

import json
from pathlib import Path
from typing import Any

import pytest
from reference.tiny_jobs import make_job
from stored_jobs import StoredRow, stored_ids

from collapipe.database import FILE_NAME
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.planning.decisions import RoundDecision
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


def run(directory: Path, rounds: int, *, resume: bool) -> list[RoundDecision]:
    job = make_job(
        directory / "data",
        name="restarted",
        num_blocks=4,
        devices_per_cluster=2,
        training={"rounds": rounds, "replicate_every": 2},
        schedule={"strategy": "dssra"},
    )
    with (
        LocalTestbed([DEVICES], directory, emulation=EMULATION) as testbed,
        testbed.client() as client,
    ):
        # A resumed job would begin without a device that registers late.
        testbed.wait_until_registered()
        job_id = client.submit(job, resume=resume)
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
    (path,) = directory.rglob(f"scheduler/{FILE_NAME}")
    [job_id] = stored_ids(path.parent)
    document: dict[str, Any] = StoredRow(path.parent, "planner", job_id).read()
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
