"""`collapipe train --dry-run` and `collapipe plan estimate` estimate a job, and start nothing."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from collapipe.emulation.device_profiles import device_profile
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.planning import estimate
from collapipe.stage_runtime.unit_counts import count_jobs
from collapipe.v1.scheduler_pb2 import (
    HOST_ROLE_CONTROL_UNIT,
    HOST_ROLE_DEVICE_AGENT,
    Host,
    HostStatus,
    JobStatus,
)
from collapipe_client.box_options import read_boxes
from collapipe_client.dry_run import site_here
from collapipe_client.job_files import load_preset
from collapipe_client.quantities import say_duration
from collapipe_client.testbed_processes import Device

from .commands import run, run_json
from .fake_services import FakeServices
from .pretended_processes import PretendedProcesses

_TINY = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def _counts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts units in the process of the test, instead of in one that imports models."""
    monkeypatch.setattr(estimate, "count_in_process", count_jobs)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options of a small job with data, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["collapipe", "train", "--dry-run", "--resume"])
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


def test_dry_run_refuses_a_strict_job_of_texts_with_few_held_out_rows(
    job: list[str], tmp_path: Path
) -> None:
    rows = "".join(f"question {number},answer {number}\n" for number in range(40))
    for name in ("rows.csv", "test.csv"):
        text = f"prompt,completion\n{rows}".replace("question", name)
        (tmp_path / name).write_text(text, encoding="utf-8")
    asked = [each if each != "classification" else "instruction" for each in job]
    for setting in ("data.source=files", "clusters=1", "devices_per_cluster=2"):
        asked += ["--set", setting]
    [estimate] = run_json(*asked)["estimates"]
    assert any("only 40 rows" in each for each in estimate["warnings"])
    refused = run(*asked, "--strict", code=2).stderr
    assert "data.strict" in refused and "only 40 rows" in refused


def test_dry_run_names_a_file_that_two_clusters_have(job: list[str]) -> None:
    asked = [*job, "--set", 'data.train=["rows.csv", "rows.csv"]', "--set", "clusters=2"]
    [estimate] = run_json(*asked, "--set", "devices_per_cluster=2")["estimates"]
    assert any("clusters 0 and 1" in each for each in estimate["warnings"])


def test_job_that_fits_is_estimated_and_nothing_starts(job: list[str], tmp_path: Path) -> None:
    answer = run_json(*job, "--set", "clusters=1", "--set", "devices_per_cluster=2")
    assert answer["fits"] and answer["command"] == "collapipe train --resume"
    assert answer["job_seconds"] >= 10 * answer["round_seconds"] > 0
    # A scheduler, an edge server, a control unit and two devices would start.
    assert 5 * 430e6 < answer["memory_bytes"] < 5 * 430e6 + 1e9
    [estimate] = answer["estimates"]
    blocks = [host["num_blocks"] for host in estimate["clusters"][0]["hosts"]]
    assert blocks == [0, 2, 2, 0]
    counts, labels, passes, lengths = estimate["notes"]
    assert counts == "40 training rows, 2 held-out rows, 2 labels"
    assert labels.endswith(": a 20, b 20")
    assert " take each of the 40 training rows " in passes
    assert re.search(r" \d tokens", lengths) and "task.max_length = 64" in lengths
    unknown, few = estimate["warnings"][-2:]
    assert f"label c ({tmp_path}/test.csv:3)" in unknown
    assert "only 2 rows" in few
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv", "test.csv"}


def test_data_set_in_a_folder_of_this_machine_is_read(job: list[str], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(40)]
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "set/train-00000-of-00001.parquet")
    hub = ("data.source=hub", "data.hub_name=set", "data.train=train", "data.held_out=train[:4]")
    options = [part for each in (*hub, "clusters=1") for part in ("--set", each)]
    answer = run_json(*job, *options, "--set", "devices_per_cluster=2")
    assert answer["estimates"][0]["notes"][0] == "40 training rows, 4 held-out rows, 2 labels"
    few, leak = answer["estimates"][0]["warnings"][-2:]
    assert "4 of 4 held-out rows" in leak and "only 4 rows" in few


def test_job_that_does_not_fit_exits_1_and_says_what_would_help(job: list[str]) -> None:
    small = ("--devices", "2", "--device-memory", "10kB", "--set", "devices_per_cluster=2")
    printed = run(*job, *small, code=1).stdout
    verdict, _, change, *_ = printed.splitlines()
    for words in ("device-0-0", "2 of 4 blocks", "3 micro-batches", "10 kB"):
        assert words in verdict
    assert "10 MB" in change
    assert "bytes" not in printed and "\nround: " not in printed


def test_state_that_the_disk_cannot_hold_does_not_fit(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job += ["--set", "clusters=2", "--set", "devices_per_cluster=2", "--set", "training.rounds=3"]
    answer = run_json(*job)
    hosts = answer["estimates"][0]["clusters"][0]["hosts"]
    weights = sum(host["weights_bytes"] for host in hosts)
    # Four commits, two pushes and the averages, and two moments of two commits in each of two clusters.
    assert answer["disk_bytes"] == pytest.approx((4 + 3 + 8) * weights, abs=1)
    assert answer["free_disk_bytes"] > answer["disk_bytes"]
    few = SimpleNamespace(free=answer["disk_bytes"] - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: few)
    full = run_json(*job, code=1)
    assert not full["fits"] and full["free_disk_bytes"] == few.free
    assert "--workspace" in run(*job, code=1).stdout


def test_warnings_that_training_would_begin_with_are_told(job: list[str]) -> None:
    one, unknown, _ = job_warnings(
        job, "clusters=1", "training.local_steps=5", "training.warm_up_steps=90"
    )
    assert "90 steps" in one and "50" in one
    assert "label c" in unknown
    few, *_ = job_warnings(job, "clusters=2", "training.local_steps=3")
    for words in ("cluster 0 has 20", " 24,", "training.local_steps to 2"):
        assert words in few


def job_warnings(job: list[str], *settings: str) -> list[str]:
    """Returns the warnings of a dry run, which prints each after "warning: "."""
    options = [part for each in (*settings, "devices_per_cluster=2") for part in ("--set", each)]
    printed = run(*job, *options).stdout.splitlines()
    return [line[9:] for line in printed if line.startswith("warning: ")]


def test_rounds_that_are_left_of_a_resumed_job_are_counted(
    fake: FakeServices, job: list[str]
) -> None:
    cluster = [
        Host(host_id="c", role=HOST_ROLE_CONTROL_UNIT),
        Host(host_id="d", role=HOST_ROLE_DEVICE_AGENT),
    ]
    fake.hosts += [HostStatus(host=host, alive=True) for host in cluster]
    job += ["--resume", *fake.options, "--set", "clusters=1"]
    assert "you have no such job" in run(*job, code=2).stderr
    fake.jobs = [JobStatus(job_id="job-1", num_rounds_committed=60)]
    job += ["--set", "devices_per_cluster=1", "--set", "training.rounds=70"]
    assert "20 of 70 rounds" in run(*job).stdout
    assert "all 60 rounds" in run(*job, "--set", "training.rounds=60").stdout
    answer = run_json(*job)
    [estimate] = answer["estimates"]
    first = estimate["clusters"][0]["first_fetch_seconds"]
    assert answer["job_seconds"] == pytest.approx(first + 20 * answer["round_seconds"], rel=1e-6)
    assert answer["num_rounds"] == 20
    assert fake.submitted == []


def test_job_to_resume_is_looked_for_before_a_testbed_starts(
    job: list[str], tmp_path: Path, processes: PretendedProcesses
) -> None:
    job.remove("--dry-run")
    assert "no testbed" in run(*job, "--resume", code=2).stderr
    (tmp_path / ".collapipe").mkdir()
    processes.behaviours["scheduler"] = "dies"
    done = run(*job, "--resume", code=1)
    assert "no such device" in done.stderr
    assert "starting a testbed" not in done.output


def test_wrong_data_and_a_model_that_cannot_be_cut_are_refused(
    job: list[str], tmp_path: Path
) -> None:
    shape = ("--set", "clusters=1", "--set", "devices_per_cluster=5")
    assert "5 devices" in run(*job, *shape, code=1).stdout
    (tmp_path / "rows.csv").write_text("text\nno label\n", encoding="utf-8")
    assert "rows.csv:1" in run(*job, *shape, code=2).stderr


def test_a_deployment_is_asked_for_its_devices(fake: FakeServices, job: list[str]) -> None:
    hosts = [Host(host_id="cu", role=HOST_ROLE_CONTROL_UNIT, cluster_index=3)]
    for name in ("d0", "d1", "d2"):
        device = Host(host_id=name, role=HOST_ROLE_DEVICE_AGENT, cluster_index=3)
        device.memory_bytes = 2_000_000_000
        hosts.append(device)
    fake.hosts += [HostStatus(host=host, alive=host.host_id != "d2") for host in hosts]
    remote = fake.options
    job += ["--set", "training.rounds=10000"]
    answer = run_json(*job, *remote)
    assert say_duration(answer["job_seconds"]) in run(*job, *remote).stdout
    assert answer["fits"] and answer["free_bytes"] is None
    assert "times are those of laptops" in answer["notes"][0]
    [estimate] = answer["estimates"]
    devices = estimate["clusters"][0]["hosts"][1:-1]
    assert [device["given_bytes"] for device in devices] == [2_000_000_000] * 2
    short = run(*job, "--set", "use_clusters=[3]", "--set", "clusters=1", *remote, code=2)
    assert re.search("3 devices in cluster 3.* 2 ", short.stderr)
    assert fake.submitted == []


def test_emulated_devices_have_the_speed_of_their_profile_and_others_that_of_this_machine(
    tmp_path: Path,
) -> None:
    job = load_preset("demo", ["clusters=1", "devices_per_cluster=2"])
    emulated = EmulatedDevice(profile="pi4", slowdown=2)
    emulation = Emulation(devices={"device-0-0": emulated}, time_scale=3)
    devices = [Device(), Device(memory_bytes=7), Device()]
    site = site_here(job, [devices], emulation, tmp_path, is_up=True)
    [[slow, fast]] = site.clusters
    assert slow.device.flops_per_second == pytest.approx(device_profile("pi4").flops_per_second / 6)
    assert slow.training_bytes == slow.device.memory_bytes
    assert fast.flops_per_second is None and fast.memory_bytes == 7


_COMMAND = ["plan", "estimate", "--preset", "classification", "--set", "clusters=1"]


def test_boxes_have_a_number_a_profile_a_memory_and_a_link() -> None:
    one, other, laptop = read_boxes("2xpi4:3GB@20Mbit/s, laptop@wifi", "--devices")
    assert one == other
    assert (one.profile, one.memory_bytes, one.link.rate_bps) == ("pi4", 3_000_000_000, 20e6)
    assert one.training_bytes == 3_000_000_000
    assert laptop.link.in_direction("up").rate_bps == 50e6
    assert laptop.training_bytes == laptop.device.memory_bytes


def test_estimate_of_a_preset_without_data_fits_three_raspberry_pis() -> None:
    answer = run_json(*_COMMAND, "--devices", "3xpi4@20mbit")
    assert answer["fits"]
    assert "labels" in answer["notes"][0]
    (cluster,) = answer["clusters"]
    assert [host["num_blocks"] for host in cluster["hosts"]] == [0, 2, 2, 2, 0]
    # MiniLM has six layers of 1,774,464 parameters. Headers of the blobs come on top.
    assert cluster["hosts"][1]["pushed_bytes"] == pytest.approx(2 * 4 * 1_774_464, rel=1e-3)


def test_exit_code_and_text_say_that_a_model_does_not_fit() -> None:
    said = run(*_COMMAND, "--devices", "2xpi4:60MB", code=1).output
    assert "does not fit: device-0-0" in said
    assert "--set model.lora.r=8" in said
