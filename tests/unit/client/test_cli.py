import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from killed_processes import kill
from typer.testing import CliRunner

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
from collapipe_client.cli import _check_alive, _free_folder, app
from collapipe_client.client import CollaPipeClient
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.processes import ProcessRecord, start_seconds
from collapipe_client.testbed_options import LocalTestbedOptions
from collapipe_client.workspace import WorkspaceRecord

from .conftest import Event, FakeServices

_RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["collapipe", "train", "--preset", "demo"])


def _remote(fake: FakeServices) -> list[str]:
    return ["--scheduler", fake.address, "--insecure"]


def test_successful_train_exports_the_model_and_says_how_to_load_it(
    fake: FakeServices, tmp_path: Path
) -> None:
    fake.succeed_with(name="demo", files={"config.json": b"{}"})
    result = _RUNNER.invoke(
        app, ["train", "--preset", "demo", "--set", "training.rounds=2", *_remote(fake)]
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "collapipe-models/demo/config.json").exists()
    assert "final: accuracy 0.7500" in result.output
    assert 'pipeline("text-classification"' in result.output
    assert JobConfig.from_json(fake.submitted[0].config_json).training.rounds == 2


def test_watch_prefers_a_job_that_has_not_ended(fake: FakeServices) -> None:
    fake.succeed_with(name="demo", files={})
    fake.jobs = [
        JobStatus(job_id="job-1", state=JOB_STATE_RUNNING),
        JobStatus(job_id="job-2", name="old", state=JOB_STATE_FAILED),
    ]
    assert "no job runs" not in _RUNNER.invoke(app, ["watch", *_remote(fake)]).output
    del fake.jobs[0]
    said = _RUNNER.invoke(app, ["watch", *_remote(fake)]).output
    assert "no job runs or waits: this is the last one, old (job-2)" in said
    assert [request.job_id for request in fake.watched] == ["job-1", "job-2"]


def test_model_of_another_job_is_not_overwritten(fake: FakeServices, tmp_path: Path) -> None:
    fake.succeed_with(name="demo", files={"config.json": b"{}"})
    mine = tmp_path / "collapipe-models" / "demo" / "config.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    result = _RUNNER.invoke(app, ["train", "--preset", "demo", *_remote(fake)])
    assert result.exit_code == 0, result.output
    assert mine.read_text() == "mine"
    assert (tmp_path / "collapipe-models" / "job-1" / "config.json").exists()
    assert "the model is in collapipe-models/job-1" in result.output
    again = _RUNNER.invoke(app, ["train", "--preset", "demo", "--overwrite", *_remote(fake)])
    assert again.exit_code == 0, again.output
    assert mine.read_text() == "{}"


def test_model_goes_to_another_folder_if_a_file_has_the_name_of_the_job(
    fake: FakeServices, tmp_path: Path
) -> None:
    fake.succeed_with(name="demo", files={"config.json": b"{}"})
    (tmp_path / "collapipe-models").mkdir()
    (tmp_path / "collapipe-models" / "demo").write_text("mine")
    result = _RUNNER.invoke(app, ["train", "--preset", "demo", *_remote(fake)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "collapipe-models" / "job-1" / "config.json").exists()


def test_train_as_json_prints_one_document_a_line(fake: FakeServices) -> None:
    fake.succeed_with(name="demo", files={"config.json": b"{}"})
    result = _RUNNER.invoke(app, ["train", "--preset", "demo", "--json", *_remote(fake)])
    job, status, exported = [json.loads(line) for line in result.stdout.splitlines()]
    assert (job["event"], JobConfig.model_validate(job["config"]).name) == ("job", "demo")
    assert (status["event"], status["state"], status["num_rounds"]) == ("status", "succeeded", 2)
    assert (exported["event"], exported["metric"], exported["value"]) == (
        "exported",
        "accuracy",
        0.75,
    )


def test_train_of_a_failing_job_exits_1_with_the_reason_and_the_resume_command(
    fake: FakeServices,
) -> None:
    status = JobStatus(
        state=JOB_STATE_FAILED, message="the loss is nan", num_rounds=5, num_rounds_committed=3
    )
    fake.events = [Event(status=status)]
    result = _RUNNER.invoke(app, ["train", "--preset", "demo", *_remote(fake)])
    assert result.exit_code == 1
    assert "the loss is nan" in result.stderr
    assert "3 of 5 rounds are committed" in result.stderr
    assert "collapipe train --preset demo --resume" in result.stderr


def test_interrupted_train_cancels_the_job_and_exits_130(
    fake: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object):  # type: ignore[no-untyped-def]
        status = JobStatus(state=JOB_STATE_RUNNING, num_rounds=5, num_rounds_committed=1)
        yield Event(status=status)
        raise KeyboardInterrupt

    monkeypatch.setattr(CollaPipeClient, "watch", interrupted)
    result = _RUNNER.invoke(app, ["train", "--preset", "demo", *_remote(fake)])
    assert result.exit_code == 130
    assert fake.cancelled == ["job-1"]
    assert "1 of 5 rounds are committed" in result.stderr


@pytest.mark.parametrize("begins_anew", [False, True])
def test_rollback_says_what_becomes_of_the_optimizer_states(
    fake: FakeServices, begins_anew: bool
) -> None:
    fake.jobs, fake.begins_anew = [JobStatus(job_id="job-1", name="demo")], begins_anew
    fake.jobs[0].num_rounds_committed = 5
    refused = _RUNNER.invoke(app, ["rollback", "demo", "2", *_remote(fake)], input="n\n")
    assert refused.exit_code == 1 and not fake.rolled_back
    # Nothing is lost.
    same = _RUNNER.invoke(app, ["rollback", "demo", "5", *_remote(fake)])
    assert same.exit_code == 0 and fake.rolled_back.pop().num_rounds == 5
    assert "from 5 to 2 committed rounds of job-1" in refused.stderr
    result = _RUNNER.invoke(app, ["rollback", "demo", "2", "--yes", *_remote(fake)])
    assert result.exit_code == 0, result.output
    (request,) = fake.rolled_back
    assert (request.job_id, request.num_rounds) == ("job-1", 2)
    assert "is back at 2 committed rounds" in result.stdout
    assert f"optimizer states {'begin anew' if begins_anew else 'are kept'}" in result.stdout
    result = _RUNNER.invoke(app, ["rollback", "demo", "0", "--yes", "--json", *_remote(fake)])
    assert json.loads(result.stdout) == {
        "job_id": "job-1",
        "num_rounds_committed": 0,
        "keeps_optimizer_states": not begins_anew,
    }


def test_train_without_a_testbed_runs_one_and_ends_it(
    behaviours: dict[str, str], fake: FakeServices, monkeypatch: pytest.MonkeyPatch
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
    result = _RUNNER.invoke(
        app,
        ["train", "--preset", "demo", "--set", "devices_per_cluster=1", "--set", "clusters=1"],
    )
    assert result.exit_code == 1
    assert "device-0-0 is lost" in result.output
    assert not any(process.alive for process in testbeds[0].processes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "give either a job file or --preset"),
        (["train", "--preset", "dmeo"], "did you mean 'demo'"),
        (
            ["train", "--preset", "demo", "--device-memory", "3", "GB"],
            "such as --device-memory '3 GB'",
        ),
        (["train", "--preset", "demo", "--set", "rounds=1"], "did you mean 'training.rounds'?"),
        (
            ["train", "--preset", "demo", "--set", "schedule.strategy=dsra"],
            "did you mean 'dssra'? Input should be",
        ),
        (["train", "--preset", "demo", "--output", "/usr"], "/usr is not empty"),
        (["export", "demo", "/usr"], "/usr is not empty: give another folder, or --overwrite"),
        (["train", "absent.toml"], "does not exist"),
        (["train", "--preset", "demo", "--set", "training.round=1"], "training.rounds"),
        (["train", "--preset", "ner"], "data.train is not set"),
        (["train", "--preset", "ner", "--set", "data.train=x.conll"], "x.conll does not exist"),
        (["train", "--preset", "demo", "--devices", "0"], "positive numbers"),
        (["train", "--preset", "demo", "--devices", "1"], "needs 2 clusters of 3, 3 devices"),
        (["train", "--preset", "demo", "--device-memory", "5 apples"], "is not a size"),
        (["train", "--preset", "demo", "--device-speed", "-1"], "not a positive number"),
        (["train", "--preset", "demo", "--emulate", "raspberry-pi-9"], "use one of raspberry-pi-4"),
        (
            ["train", "--preset", "demo", "--emulate", "laptop,none"],
            "2 values for clusters of 3, 3",
        ),
        (["train", "--preset", "demo", "--emulation", "w.json"], "emulation file w.json cannot be"),
        (["up", "--emulate", "laptop", "--emulation", "w.json"], "give one of them"),
        (["train", "--preset", "demo", "--scheduler", "nowhere"], "is not HOST:PORT"),
        (["train", "--preset", "demo", "--scheduler", "h:1"], "--insecure"),
        (["export", "demo", "out"], "there is no testbed"),
        (["watch", "demo"], "no scheduler"),
        (["logs", "device-0-0"], "there is no log"),
        (["up", "--devices", "1,2", "--clusters", "3"], "2 numbers for 3 clusters"),
        (["up", "--listen", "7070"], "is not HOST:PORT"),
    ],
)
def test_bad_input_exits_2_with_a_remedy(arguments: list[str], message: str) -> None:
    result = _RUNNER.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_error_about_an_unreachable_scheduler_names_it_and_exits_1() -> None:
    result = _RUNNER.invoke(app, ["status", "--scheduler", "127.0.0.1:9", "--insecure"])
    assert result.exit_code == 1
    assert "127.0.0.1:9" in result.stderr


def test_error_with_json_is_printed_as_a_document() -> None:
    result = _RUNNER.invoke(app, ["train", "--preset", "nope", "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["exit_code"] == 2


def test_up_status_and_down_start_show_and_end_a_testbed(behaviours: dict[str, str]) -> None:
    result = _RUNNER.invoke(app, ["up", "--devices", "1", "--json"])
    assert result.exit_code == 0, result.output
    up = json.loads(result.stdout)
    assert [p["alive"] for p in up["testbed"]["processes"]] == [True] * 4
    again = _RUNNER.invoke(app, ["up"])  # takes the shape of the running testbed, not the default
    assert again.exit_code == 0 and "up: 4 processes" in again.stdout, again.output

    job = ["train", "--preset", "demo", "--set", "devices_per_cluster=3"]
    assert "the testbed has 1 cluster of 1 device" in _RUNNER.invoke(app, job).stderr
    assert "leave them out" in _RUNNER.invoke(app, [*job, "--devices", "3"]).stderr

    down = json.loads(_RUNNER.invoke(app, ["down", "--json"]).stdout)
    assert down["ended"] == [p["name"] for p in up["testbed"]["processes"]]
    assert "nothing is up" in _RUNNER.invoke(app, ["status"]).stdout


def test_status_as_json_lists_hosts_and_jobs(fake: FakeServices) -> None:
    fake.jobs = [JobStatus(job_id="job-1", name="a", state=JOB_STATE_RUNNING)]
    document = json.loads(_RUNNER.invoke(app, ["status", "--json", *_remote(fake)]).stdout)
    assert document["hosts"][0]["host"]["role"] == "edge_server"
    assert document["jobs"][0]["state"] == "running"
    text = _RUNNER.invoke(app, ["status", *_remote(fake)]).stdout
    assert "edge-server" in text and "running" in text


def test_status_says_who_is_missing_since_when_and_what_is_suspected(fake: FakeServices) -> None:
    now = time.time()
    lost = HostStatus(host=Host(host_id="device-0"), alive=False)
    lost.last_seen.FromMilliseconds(int((now - 42) * 1000))
    suspect = HostStatus(host=Host(host_id="device-1"), alive=True, suspicion="it broke its stream")
    suspect.suspected_until.FromMilliseconds(int((now + 20) * 1000))
    fake.hosts += [lost, suspect]
    trouble = JobTrouble(waiting=True, num_failures=2, failure="device-0 is lost")
    trouble.missing.add(host_id="device-0", last_seen=lost.last_seen)
    trouble.gives_up_at.FromMilliseconds(int((now + 500) * 1000))
    fake.jobs = [JobStatus(job_id="job-1", state=JOB_STATE_PREPARING, trouble=trouble)]
    text = _RUNNER.invoke(app, ["status", *_remote(fake)]).stdout
    assert re.search(
        r"job job-1: waits for device-0 \(last heartbeat 4\d s ago, at [-\d: ]+\); "
        r"2 attempts have failed since the last commit \(device-0 is lost\); ends at [-\d: ]+ if no round is committed before\n",
        text,
    )
    assert re.search(r"device-1 is suspected until [-\d: ]+: it broke its stream\n", text)
    document = json.loads(_RUNNER.invoke(app, ["status", "--json", *_remote(fake)]).stdout)
    missing = document["jobs"][0]["trouble"]["missing"]
    assert missing[0]["last_seen"] == lost.last_seen.ToJsonString()


def test_emulate_gives_profiles_to_devices_in_the_order_of_device_memory() -> None:
    emulation = LocalTestbedOptions(emulate="raspberry-pi-4,none").read_emulation([2, 2])
    assert emulation is not None
    assert {name: device.profile for name, device in emulation.devices.items()} == {
        "device-0-0": "raspberry-pi-4",
        "device-1-0": "raspberry-pi-4",
    }
    assert LocalTestbedOptions().read_emulation([2]) is None


def test_emulation_is_read_from_a_file(tmp_path: Path) -> None:
    emulation = Emulation(
        devices={"edge-server": EmulatedDevice(profile="laptop")},
        links={"*": LinkDescription(rate_bps=1e7)},
    )
    (tmp_path / "emulation.json").write_text(emulation.model_dump_json())
    options = LocalTestbedOptions(emulation=tmp_path / "emulation.json")
    assert options.read_emulation([1]) == emulation


def test_model_goes_into_the_first_free_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(4):
        folder = _free_folder("demo", "demo-7", overwrite=False)
        folder.mkdir(parents=True)
        (folder / "model").touch()
        found.append(folder.name)
    assert found == ["demo", "demo-7", "demo-7-2", "demo-7-3"]
    assert _free_folder("demo", "demo-7", overwrite=True).name == "demo"


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
    processes = tuple(ProcessRecord(name, os.getpid(), began - (name in ended)) for name in names)
    record = WorkspaceRecord(True, [[(0, 0.0)] * 2, [(0, 0.0)]], processes)
    settings = ["clusters=1", f"devices_per_cluster={devices_per_cluster}"]
    job = load_preset("classification", settings)
    if named is None:
        _check_alive(job, record)
        return
    with pytest.raises(InvalidInputError, match=f"would wait for {named}, because"):
        _check_alive(job, record)
