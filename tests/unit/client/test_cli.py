import os
import re
import sys
import time
from pathlib import Path

import pytest
from killed_processes import kill

from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.emulation.links import LinkDescription
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.rpc import Security
from collapipe.v1.scheduler_pb2 import (
    JOB_STATE_FAILED,
    JOB_STATE_PREPARING,
    JOB_STATE_RUNNING,
    Host,
    HostStatus,
    JobStatus,
    JobTrouble,
)
from collapipe_client import load_preset
from collapipe_client.cli import _check_alive
from collapipe_client.client import CollaPipeClient
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.processes import ProcessRecord, start_seconds
from collapipe_client.testbed_options import LocalTestbedOptions
from collapipe_client.workspace import WorkspaceRecord

from .commands import run, run_json, run_lines
from .fake_services import Event, FakeServices
from .pretended_processes import PretendedProcesses

_DEMO = ("train", "--preset", "demo")


@pytest.fixture(autouse=True)
def _typed(in_empty_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["collapipe", *_DEMO])


def test_successful_train_exports_the_model_and_says_how_to_load_it(
    fake: FakeServices, tmp_path: Path
) -> None:
    fake.succeed_with(name="demo", files={"config.json": b"{}"})
    result = run(*_DEMO, "--set", "training.rounds=2", *fake.options)
    assert (tmp_path / "collapipe-models/demo/config.json").exists()
    assert "accuracy 0.7500" in result.output
    assert 'pipeline("text-classification"' in result.output
    assert JobConfig.from_json(fake.submitted[0].config_json).training.rounds == 2


def test_watch_prefers_a_job_that_has_not_ended(fake: FakeServices) -> None:
    fake.succeed_with(name="demo", files={})
    fake.jobs = [
        JobStatus(job_id="job-1", state=JOB_STATE_RUNNING),
        JobStatus(job_id="job-2", name="old", state=JOB_STATE_FAILED),
    ]
    assert "job-2" not in run("watch", *fake.options).output
    del fake.jobs[0]
    assert "old (job-2)" in run("watch", *fake.options).output
    assert [request.job_id for request in fake.watched] == ["job-1", "job-2"]


def test_model_goes_into_another_folder_if_that_of_its_name_is_taken(
    fake: FakeServices, tmp_path: Path
) -> None:
    fake.succeed_with(name="demo", files={"config.json": b"{}"})
    models = tmp_path / "collapipe-models"
    models.mkdir()
    (models / "demo").write_text("a file")
    run(*_DEMO, *fake.options)
    assert (models / "job-1" / "config.json").read_text() == "{}"
    (models / "demo").unlink()
    (models / "demo").mkdir()
    (models / "demo" / "config.json").write_text("mine")
    assert "collapipe-models/job-1-2" in run(*_DEMO, *fake.options).output
    assert (models / "demo" / "config.json").read_text() == "mine"
    run(*_DEMO, "--overwrite", *fake.options)
    assert (models / "demo" / "config.json").read_text() == "{}"


def test_train_as_json_prints_one_document_a_line(fake: FakeServices) -> None:
    fake.succeed_with(name="demo", files={"config.json": b"{}"})
    job, status, exported = run_lines(*_DEMO, *fake.options)
    assert (job["event"], JobConfig.model_validate(job["config"]).name) == ("job", "demo")
    assert (status["event"], status["state"], status["num_rounds"]) == ("status", "succeeded", 2)
    assert exported["event"] == "exported"
    assert (exported["metric"], exported["value"]) == ("accuracy", 0.75)


def test_train_of_a_failing_job_exits_1_with_the_reason_and_the_resume_command(
    fake: FakeServices,
) -> None:
    status = JobStatus(
        state=JOB_STATE_FAILED, message="the loss is nan", num_rounds=5, num_rounds_committed=3
    )
    fake.events = [Event(status=status)]
    said = run(*_DEMO, *fake.options, code=1).stderr
    for words in ("the loss is nan", "3 of 5 rounds", "collapipe train --preset demo --resume"):
        assert words in said


def test_interrupted_train_cancels_the_job_and_exits_130(
    fake: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object):  # type: ignore[no-untyped-def]
        yield Event(status=JobStatus(state=JOB_STATE_RUNNING, num_rounds=5, num_rounds_committed=1))
        raise KeyboardInterrupt

    monkeypatch.setattr(CollaPipeClient, "watch", interrupted)
    assert "1 of 5 rounds" in run(*_DEMO, *fake.options, code=130).stderr
    assert fake.cancelled == ["job-1"]


@pytest.mark.parametrize("begins_anew", [False, True])
def test_rollback_says_what_becomes_of_the_optimizer_states(
    fake: FakeServices, begins_anew: bool
) -> None:
    fake.jobs, fake.begins_anew = [JobStatus(job_id="job-1", name="demo")], begins_anew
    fake.jobs[0].num_rounds_committed = 5
    refused = run("rollback", "demo", "2", *fake.options, typed="n\n", code=1)
    assert "from 5 to 2" in refused.stderr and not fake.rolled_back
    run("rollback", "demo", "5", *fake.options)  # Nothing is lost, so it does not ask.
    assert fake.rolled_back.pop().num_rounds == 5
    said = run("rollback", "demo", "2", "--yes", *fake.options).stdout
    (request,) = fake.rolled_back
    assert (request.job_id, request.num_rounds) == ("job-1", 2)
    assert "at 2 committed rounds" in said and ("begin anew" in said) == begins_anew
    assert run_json("rollback", "demo", "0", "--yes", *fake.options) == {
        "job_id": "job-1",
        "num_rounds_committed": 0,
        "keeps_optimizer_states": not begins_anew,
    }


def test_train_without_a_testbed_runs_one_and_ends_it(
    processes: PretendedProcesses, fake: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbeds: list[LocalTestbed] = []

    def watch(self: CollaPipeClient, *_: object, **__: object):  # type: ignore[no-untyped-def]
        kill(testbeds[0], "device-0-0")
        yield Event(status=JobStatus(state=JOB_STATE_FAILED, message="device-0-0 is lost"))

    def client(self: LocalTestbed) -> CollaPipeClient:
        testbeds.append(self)
        return CollaPipeClient(fake.address, Security.insecure())

    monkeypatch.setattr(CollaPipeClient, "watch", watch)
    monkeypatch.setattr(LocalTestbed, "client", client)
    result = run(*_DEMO, "--set", "devices_per_cluster=1", "--set", "clusters=1", code=1)
    assert "device-0-0 is lost" in result.output
    assert not any(process.alive for process in testbeds[0].processes)


def test_error_with_json_is_printed_as_a_document() -> None:
    assert run_json("train", "--preset", "nope", code=2)["exit_code"] == 2


def test_up_status_and_down_start_show_and_end_a_testbed(processes: PretendedProcesses) -> None:
    up = run_json("up", "--devices", "1")
    assert [p["alive"] for p in up["testbed"]["processes"]] == [True] * 4
    # It takes the shape of the running testbed, not the default.
    assert "4 processes" in run("up").stdout

    job = [*_DEMO, "--set", "devices_per_cluster=3"]
    assert "1 cluster of 1 device" in run(*job, code=2).stderr
    assert "--devices" in run(*job, "--devices", "3", code=2).stderr

    assert run_json("down")["ended"] == [p["name"] for p in up["testbed"]["processes"]]
    assert "nothing is up" in run("status").stdout


def test_status_lists_hosts_and_jobs(fake: FakeServices) -> None:
    fake.jobs = [JobStatus(job_id="job-1", name="a", state=JOB_STATE_RUNNING)]
    document = run_json("status", *fake.options)
    assert document["hosts"][0]["host"]["role"] == "edge_server"
    assert document["jobs"][0]["state"] == "running"
    text = run("status", *fake.options).stdout
    assert "edge-server" in text and "running" in text


def test_status_says_who_is_missing_since_when_and_what_is_suspected_or_unshaped(
    fake: FakeServices,
) -> None:
    now = time.time()
    lost = HostStatus(host=Host(host_id="device-0"), alive=False)
    lost.last_seen.FromMilliseconds(int((now - 7500) * 1000))
    suspect = HostStatus(host=Host(host_id="device-1"), alive=True, suspicion="it broke its stream")
    suspect.suspected_until.FromMilliseconds(int((now + 500) * 1000))
    unshaped = HostStatus(host=Host(host_id="device-2"), alive=True, unshaped="no netem")
    fake.hosts += [lost, suspect, unshaped]
    trouble = JobTrouble(waiting=True, num_failures=2, failure="device-0 is lost")
    trouble.missing.add(host_id="device-0", last_seen=lost.last_seen)
    trouble.gives_up_at.FromMilliseconds(int((now + 500) * 1000))
    fake.jobs = [JobStatus(job_id="job-1", state=JOB_STATE_PREPARING, trouble=trouble)]
    text = run("status", *fake.options).stdout
    parts = [
        r"job job-1: .*device-0 \(.* 2 h ago, at [-\d: ]+\)",
        r"2 attempts .*\(device-0 is lost\)",
        r"ends at [-\d: ]+ ",
    ]
    assert re.search(".*".join(parts), text)
    assert re.search(r"device-1 .* until [-\d: ]+: it broke its stream\n", text)
    assert "device-2 has unshaped links: no netem\n" in text
    missing = run_json("status", *fake.options)["jobs"][0]["trouble"]["missing"]
    assert missing[0]["last_seen"] == lost.last_seen.ToJsonString()


def test_emulation_is_of_profiles_in_the_order_of_the_devices_or_of_a_file(tmp_path: Path) -> None:
    emulation = LocalTestbedOptions(emulate="raspberry-pi-4,none").read_emulation([2, 2])
    assert emulation is not None
    assert {name: device.profile for name, device in emulation.devices.items()} == {
        "device-0-0": "raspberry-pi-4",
        "device-1-0": "raspberry-pi-4",
    }
    assert LocalTestbedOptions().read_emulation([2]) is None
    given = Emulation(
        devices={"edge-server": EmulatedDevice(profile="laptop")},
        links={"*": LinkDescription(rate_bps=1e7)},
    )
    (tmp_path / "emulation.json").write_text(given.model_dump_json())
    options = LocalTestbedOptions(emulation=tmp_path / "emulation.json")
    assert options.read_emulation([1]) == given


@pytest.mark.parametrize(
    ("ended", "devices_per_cluster", "named"),
    [
        ((), 2, None),
        (("device-0-1",), 1, None),  # Another device is enough.
        (("device-0-1",), 2, "device-0-1"),
        (("device-1-0",), 2, None),  # The job does not use this cluster.
        (("control-unit-0", "edge-server"), 1, "control-unit-0, edge-server"),
    ],
)
def test_dry_run_names_processes_that_have_ended(
    ended: tuple[str, ...], devices_per_cluster: int, named: str | None
) -> None:
    names = ["control-unit-0", "device-0-0", "device-0-1", "device-1-0", "edge-server"]
    began = start_seconds(os.getpid())
    assert began is not None
    records = tuple(ProcessRecord(name, os.getpid(), began - (name in ended)) for name in names)
    record = WorkspaceRecord(True, [[(0, 0.0)] * 2, [(0, 0.0)]], records)
    settings = ["clusters=1", f"devices_per_cluster={devices_per_cluster}"]
    job = load_preset("classification", settings)
    if named is None:
        _check_alive(job, record)
        return
    with pytest.raises(InvalidInputError, match=f" {named},"):
        _check_alive(job, record)
