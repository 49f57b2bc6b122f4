"""`collapipe train --dry-run` checks a job and estimates it, and starts nothing."""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner, Result

from collapipe.emulation.device_profiles import device_profile
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.v1.scheduler_pb2 import (
    HOST_ROLE_CONTROL_UNIT,
    HOST_ROLE_DEVICE_AGENT,
    Host,
    HostStatus,
    JobStatus,
)
from collapipe_client.cli import app
from collapipe_client.dry_run import site_here
from collapipe_client.job_files import load_preset
from collapipe_client.quantities import say_duration
from collapipe_client.testbed_processes import Device

from .conftest import FakeServices

_RUNNER = CliRunner()
_TINY = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options of a small job with data, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"text {number},{'ab'[number % 2]}\n" for number in range(40))
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    (tmp_path / "test.csv").write_text("text,label\none,a\ntwo,c\n", encoding="utf-8")
    settings = {
        "data.train": "rows.csv",
        "data.held_out": "test.csv",
        "model.pretrained": "",
        "training.mini_batch": 8,
        **{f"model.config.{key}": value for key, value in _TINY.items()},
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return ["train", "--dry-run", "--preset", "classification", *options]


def run(*arguments: str) -> Result:
    with patch.object(sys, "argv", ["collapipe", *arguments]):
        return _RUNNER.invoke(app, arguments)


def test_job_that_fits_is_estimated_and_nothing_starts(job: list[str], tmp_path: Path) -> None:
    done = run(*job, "--set", "clusters=1", "--set", "devices_per_cluster=2", "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["fits"] and answer["command"].startswith("collapipe ")
    assert "--dry-run" not in answer["command"]
    assert answer["job_seconds"] >= 10 * answer["round_seconds"] > 0
    # A scheduler, an edge server, a control unit and two devices would start.
    assert 5 * 430e6 < answer["memory_bytes"] < 5 * 430e6 + 1e9
    [estimate] = answer["estimates"]
    blocks = [host["num_blocks"] for host in estimate["clusters"][0]["hosts"]]
    assert blocks == [0, 2, 2, 0]
    assert estimate["notes"] == ["40 training rows, 2 held-out rows, 2 labels"]
    *_, unknown = estimate["warnings"]
    assert f"no training row has the label c ({tmp_path}/test.csv:3)" in unknown
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv", "test.csv"}


def test_job_that_does_not_fit_exits_1_and_says_what_would_help(job: list[str]) -> None:
    done = run(*job, "--devices", "2", "--device-memory", "10kB", "--set", "devices_per_cluster=2")
    assert done.exit_code == 1, done.output
    verdict, _, change, *_, last = done.stdout.splitlines()
    assert verdict.startswith("it does not fit: device-0-0 would run 2 of 4 blocks, which need ")
    assert " MB with 3 micro-batches in flight, but has 10 kB: " in verdict
    assert change == "  10 MB of memory for training in every box"
    assert "bytes" not in done.stdout and "\nround: " not in done.stdout
    assert last == "nothing was started"


def test_warnings_that_training_would_begin_with_are_told(job: list[str]) -> None:
    one, unknown = job_warnings(
        job, "clusters=1", "training.local_steps=5", "training.warm_up_steps=90"
    )
    assert one.startswith("the warm-up takes 90 steps, but the whole training has 50")
    assert unknown.startswith("no training row has the label c")
    few, _ = job_warnings(job, "clusters=2", "training.local_steps=3")
    assert few.startswith("cluster 0 has 20 training rows, but a round takes 24, so it repeats")
    assert few.endswith("add rows, or set training.local_steps to 2")


def job_warnings(job: list[str], *settings: str) -> list[str]:
    """Returns the warnings of a dry run, which prints each after "warning: "."""
    options = [part for each in (*settings, "devices_per_cluster=2") for part in ("--set", each)]
    done = run(*job, *options)
    assert done.exit_code == 0, done.output
    return [line[9:] for line in done.stdout.splitlines() if line.startswith("warning: ")]


def test_rounds_that_are_left_of_a_resumed_job_are_counted(
    fake: FakeServices, job: list[str]
) -> None:
    cluster = [
        Host(host_id="c", role=HOST_ROLE_CONTROL_UNIT),
        Host(host_id="d", role=HOST_ROLE_DEVICE_AGENT),
    ]
    fake.hosts += [HostStatus(host=host, alive=True) for host in cluster]
    job += ["--resume", "--scheduler", fake.address, "--insecure", "--set", "clusters=1"]
    refused = run(*job)
    assert refused.exit_code == 2 and refused.stderr == "error: you have no such job\n"
    fake.jobs = [JobStatus(job_id="job-1", num_rounds_committed=60)]
    job += ["--set", "devices_per_cluster=1", "--set", "training.rounds=70"]
    assert "and the 20 of 70 rounds that would run about" in run(*job).stdout
    done = run(*job, "--set", "training.rounds=60")
    assert "all 60 rounds are committed, so none would run" in done.stdout
    answer = json.loads(run(*job, "--json").stdout)
    [estimate] = answer["estimates"]
    first = estimate["clusters"][0]["first_fetch_seconds"]
    assert answer["job_seconds"] == pytest.approx(first + 20 * answer["round_seconds"], rel=1e-6)
    assert answer["num_rounds"] == 20 and "--resume" in answer["command"]
    assert fake.submitted == []


def test_job_to_resume_is_looked_for_before_a_testbed_starts(
    job: list[str], tmp_path: Path, behaviours: dict[str, str]
) -> None:
    job.remove("--dry-run")
    done = run(*job, "--resume")
    assert done.exit_code == 2 and "there is no testbed in" in done.stderr
    (tmp_path / ".collapipe").mkdir()
    behaviours["scheduler"] = "dies"
    done = run(*job, "--resume")
    assert done.exit_code == 1 and "last lines of" in done.stderr
    assert "starting a testbed" not in done.output


def test_wrong_data_and_a_model_that_cannot_be_cut_are_refused(
    job: list[str], tmp_path: Path
) -> None:
    shape = ("--set", "clusters=1", "--set", "devices_per_cluster=5")
    done = run(*job, *shape)
    assert done.exit_code == 1
    assert "5 devices cannot share 4 blocks equally" in done.stdout
    (tmp_path / "rows.csv").write_text("text\nno label\n", encoding="utf-8")
    done = run(*job, *shape)
    assert done.exit_code == 2 and "rows.csv:1" in done.stderr


def test_a_deployment_is_asked_for_its_devices(fake: FakeServices, job: list[str]) -> None:
    fake.hosts += [
        HostStatus(
            host=Host(host_id="cu", role=HOST_ROLE_CONTROL_UNIT, cluster_index=3), alive=True
        ),
        *(
            HostStatus(
                host=Host(
                    host_id=f"d{number}",
                    role=HOST_ROLE_DEVICE_AGENT,
                    cluster_index=3,
                    memory_bytes=2_000_000_000,
                ),
                alive=number < 2,
            )
            for number in range(3)
        ),
    ]
    remote = ("--scheduler", fake.address, "--insecure")
    job += ["--set", "training.rounds=10000"]
    answer = json.loads(run(*job, "--json", *remote).stdout)
    assert (
        f"rounds about {say_duration(answer['job_seconds'])}, without" in run(*job, *remote).stdout
    )
    assert answer["fits"] and answer["free_bytes"] is None
    assert "times are those of laptops" in answer["notes"][0]
    [estimate] = answer["estimates"]
    devices = estimate["clusters"][0]["hosts"][1:-1]
    assert [device["given_bytes"] for device in devices] == [2_000_000_000] * 2
    short = run(*job, "--set", "use_clusters=[3]", "--set", "clusters=1", *remote)
    assert (
        short.exit_code == 2
        and "needs 3 devices in cluster 3, but only 2 registered there" in short.stderr
    )
    assert fake.submitted == []


def test_emulated_devices_have_the_speed_of_their_profile_and_others_that_of_this_machine() -> None:
    job = load_preset("demo", ["clusters=1", "devices_per_cluster=2"])
    emulated = EmulatedDevice(profile="pi4", slowdown=2)
    emulation = Emulation(devices={"device-0-0": emulated}, time_scale=3)
    site = site_here(job, [[Device(), Device(memory_bytes=7), Device()]], emulation, is_up=True)
    [[slow, fast]] = site.clusters
    assert slow.device.flops_per_second == pytest.approx(device_profile("pi4").flops_per_second / 6)
    assert slow.training_bytes == slow.device.memory_bytes
    assert fast.flops_per_second is None and fast.memory_bytes == 7
