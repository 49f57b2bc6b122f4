"""Tests wrong input: the error names the value, its place and the remedy, and no service ends."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import Result
from reference.tiny_jobs import write_rows
from typer.testing import CliRunner

from collapipe_client import LocalTestbed
from collapipe_client.cli import app

JOB = """
name = "bad-input"
devices_per_cluster = 3

[task]
kind = "classification"
max_length = 16

[data]
train = "FOLDER/train.jsonl"
held_out = "FOLDER/held-out.jsonl"

[model]
family = "bert"
vocabulary_size = 300

[model.config]
hidden_size = 16
num_hidden_layers = 7
num_attention_heads = 2
intermediate_size = 24

[training]
rounds = 1
local_steps = 2
mini_batch = 8

[schedule]
num_micro_batches = 4
silence_seconds = 60
"""

FOUR_CLUSTERS = "clusters = 4\ndevices_per_cluster = [3, 1, 1, 1]"
"""The device of the last cluster has little memory."""


CHAT = json.dumps({"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]})
"""A row."""


@dataclass
class Folder:
    """The files of a valid job, which a test then changes."""

    path: Path
    settings: list[str] = field(default_factory=list)
    """Values for the option --set."""

    def append(self, name: str, text: str) -> None:
        """Appends text to a file."""
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(text)

    def edit_job(self, old: str, new: str) -> None:
        """Replaces text in the job file."""
        text = (self.path / "job.toml").read_text()
        assert old in text
        (self.path / "job.toml").write_text(text.replace(old, new))

    def train(self, *options: str) -> Result:
        """Runs `collapipe train` on the job."""
        settings = [part for setting in self.settings for part in ("--set", setting)]
        output = ["--output", str(self.path / "model")]
        return collapipe("train", str(self.path / "job.toml"), *settings, *output, *options)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    write_rows(tmp_path, "classification", "train", 33)
    write_rows(tmp_path, "classification", "held-out", 4)
    (tmp_path / "job.toml").write_text(JOB.replace("FOLDER", str(tmp_path)))
    return Folder(tmp_path)


@pytest.fixture(autouse=True)
def no_service_ends(testbed: LocalTestbed) -> Iterator[None]:
    """Checks after each test that no service has ended."""
    yield
    assert testbed.lost() == []


def collapipe(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def write_bomb(path: Path) -> None:
    """Writes a table of 1,000 rows with the same text of 15 MB."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    indices = pa.array([0] * 1000, pa.int32())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * (15 << 20)]))
    table = pa.table({"text": texts, "label": ["a", "b"] * 500})
    parquet.write_table(table, path, compression="zstd", write_statistics=False)


Change = Callable[[Folder], object]

AT_SERVICES: dict[str, tuple[Change, Sequence[str]]] = {
    "malformed JSON": (
        lambda f: f.append("train.jsonl", '{"text": "a", "label"\n{"text": "b", "label": "c"}\n'),
        ["train.jsonl:34: is not JSON", '{"text": "a", "label"', "one object in each line"],
    ),
    "not an object": (
        lambda f: f.append("train.jsonl", '["a", "thing"]\n'),
        ["train.jsonl:34", '["a", "thing"]', "not a JSON object"],
    ),
    "empty file": (
        lambda f: (f.path / "train.jsonl").write_text(""),
        ["train.jsonl: has no rows", "8"],
    ),
    "empty held-out file": (
        lambda f: (f.path / "held-out.jsonl").write_text("\n"),
        ["held-out.jsonl: has no rows"],
    ),
    "not UTF-8": (
        lambda f: (f.path / "train.jsonl").write_bytes(b'{"text": "caf\xe9", "label": "a"}\n'),
        ["train.jsonl", "UTF-8"],
    ),
    "pipe": (
        lambda f: (os.remove(f.path / "train.jsonl"), os.mkfifo(f.path / "train.jsonl")),
        ["train.jsonl: is no regular file", "a pipe"],
    ),
    "terabyte": (
        lambda f: os.truncate(f.path / "held-out.jsonl", 1 << 40),
        ["held-out.jsonl: its 1,099,511,627,776 bytes", "MB of memory"],
    ),
    "4 KB of Parquet that are 15 GB": (
        lambda f: (
            write_bomb(f.path / "train.parquet"),
            f.edit_job("train.jsonl", "train.parquet"),
        ),
        ["train.parquet: cannot be read as Parquet", "bytes of memory"],
    ),
    "missing column": (
        lambda f: f.settings.append("data.label_column=intent"),
        ["train.jsonl:1: has no column 'intent'", "'text', 'label'", "data.label_column"],
    ),
    "column of another type": (
        lambda f: f.append("train.jsonl", '{"text": ["a"], "label": "thing"}\n'),
        ["train.jsonl:34: column 'text' is ['a']", "must be a string"],
    ),
    "fewer rows than a mini-batch": (
        lambda f: f.settings.append("training.mini_batch=40"),
        ["33 training rows", "mini-batch of 40", "lower training.mini_batch"],
    ),
    "files of clusters without a row that is held out": (
        lambda f: (
            (f.path / "alike.jsonl").write_text(
                "".join(
                    json.dumps({"text": "all alike", "label": label}) + "\n" for label in "ab" * 9
                )
            ),
            f.edit_job("devices_per_cluster = 3", "clusters = 2\ndevices_per_cluster = [3, 1]"),
            f.edit_job(
                f'train = "{f.path}/train.jsonl"',
                f'train = ["{f.path}/alike.jsonl", "{f.path}/alike.jsonl"]',
            ),
            f.edit_job(f'held_out = "{f.path}/held-out.jsonl"', ""),
        ),
        ["data.train has a file for each cluster", "held out", "data.held_out"],
    ),
    "unknown family": (
        lambda f: f.settings.append("model.family=bart3"),
        ["model.family", "'bart3'", "use one of bert"],
    ),
    "family that cannot do the task": (
        lambda f: f.settings.append("model.family=marian"),
        ["'marian'", "'classification'", "use one of bert"],
    ),
    "family that cannot answer": (
        lambda f: f.settings.append("task.kind=instruction"),
        ["'bert'", "'instruction'", "use one of gpt2, llama"],
    ),
    "chats without a chat template": (
        lambda f: (
            f.settings.extend(["task.kind=instruction", "model.family=llama"]),
            *((f.path / f"{name}.jsonl").write_text(CHAT) for name in ("train", "held-out")),
        ),
        ["model.pretrained is not set", "no chat template", "a prompt and a completion"],
    ),
    "misspelt configuration": (
        lambda f: f.edit_job("hidden_size", "hiden_size"),
        ["hiden_size", "hidden_size"],
    ),
    "impossible configuration": (
        lambda f: f.edit_job("num_attention_heads = 2", "num_attention_heads = 3"),
        ["16", "3", "model.config"],
    ),
    "more devices than blocks": (
        lambda f: f.edit_job("num_hidden_layers = 7", "num_hidden_layers = 2"),
        ["3 devices", "2 blocks", "devices_per_cluster", "proportional"],
    ),
    "device too small for a block": (
        lambda f: (
            f.edit_job(
                "devices_per_cluster = 3", "clusters = 4\ndevices_per_cluster = [3, 1, 1, 1]"
            ),
            f.settings.append("schedule.strategy=proportional"),
        ),
        ["no device can hold a block", "device-3-0, may use 1 kB:", "raise its --memory-bytes"],
    ),
    "device too small for its share": (
        lambda f: f.edit_job("devices_per_cluster = 3", FOUR_CLUSTERS),
        ["device-3-0 would run 7 of 7 blocks", "which need", "has 1 kB:", "proportional"],
    ),
    "more devices than there are": (
        lambda f: f.settings.extend(["devices_per_cluster=6", "schedule.wait_for_hosts_seconds=1"]),
        ["2 more devices in cluster 0 (have 4)", "schedule.wait_for_hosts_seconds allows 1 s"],
    ),
    "segments of another model": (
        lambda f: f.settings.extend(["schedule.strategy=manual", "schedule.segments=[[1, 1, 1]]"]),
        ["[1, 1, 1]", "3 blocks", "sum must be 7"],
    ),
}


@pytest.mark.parametrize("mistake", AT_SERVICES)
def test_train_fails_clearly_when_services_refuse(
    testbed: LocalTestbed, folder: Folder, mistake: str
) -> None:
    change, expected = AT_SERVICES[mistake]
    change(folder)
    result = folder.train(*testbed.endpoint_options)
    assert result.exit_code == 1, result.output
    for part in expected:
        assert part in result.output
    assert "Traceback" not in result.output
    assert not (folder.path / "model").exists()


AT_THE_CLIENT: dict[str, tuple[Change, Sequence[str]]] = {
    "misspelt key": (
        lambda f: f.edit_job("local_steps", "locl_steps"),
        ["job.toml", "'training.locl_steps'", "did you mean 'local_steps'"],
    ),
    "misspelt section": (
        lambda f: f.edit_job("[training]", "[trainig]"),
        ["job.toml", "'trainig'", "did you mean 'training'"],
    ),
    "misspelt setting": (
        lambda f: f.settings.append("training.rouds=3"),
        ["training.rouds", "did you mean 'training.rounds'"],
    ),
    "not TOML": (lambda f: f.append("job.toml", "rounds 3"), ["job.toml: is not valid TOML"]),
    "no devices": (
        lambda f: f.settings.append("devices_per_cluster=0"),
        ["devices_per_cluster is 0", "at least 1"],
    ),
    "no devices in one cluster": (
        lambda f: f.edit_job(
            "devices_per_cluster = 3", "clusters = 2\ndevices_per_cluster = [3, 0]"
        ),
        ["devices_per_cluster", "[3, 0]", "at least 1"],
    ),
    "no rounds": (lambda f: f.settings.append("training.rounds=0"), ["training.rounds", "0"]),
    "uneven micro-batches": (
        lambda f: f.settings.append("schedule.num_micro_batches=3"),
        ["schedule.num_micro_batches is 3", "training.mini_batch (8)", "[1, 2, 4, 8]"],
    ),
    "row that is not JSON": (
        lambda f: f.append("held-out.jsonl", "{oops\n{}"),
        ["held-out.jsonl:5: is not JSON", "{oops"],
    ),
    "misspelt column": (
        lambda f: f.settings.append("data.text_column=txt"),
        ["train.jsonl:1: has no column 'txt'", "set data.text_column=text"],
    ),
    "too few rows": (
        lambda f: f.settings.append("training.mini_batch=40"),
        ["33 training rows", "mini-batch of 40"],
    ),
    "text for a number": (
        lambda f: f.settings.append("training.learning_rate=fast"),
        ["training.learning_rate", "'fast'"],
    ),
}


@pytest.mark.parametrize("mistake", AT_THE_CLIENT)
def test_train_refuses_job_before_anything_starts(folder: Folder, mistake: str) -> None:
    change, expected = AT_THE_CLIENT[mistake]
    change(folder)
    result = folder.train("--workspace", str(folder.path / "workspace"))
    assert result.exit_code == 2
    for part in expected:
        assert part in result.output
    assert "Traceback" not in result.output
    assert not (folder.path / "workspace").exists()


def test_train_names_missing_data_file(folder: Folder) -> None:
    (folder.path / "held-out.jsonl").unlink()
    result = folder.train("--workspace", str(folder.path / "workspace"))
    assert result.exit_code == 2
    assert "data.held_out" in result.output
    assert "held-out.jsonl does not exist" in result.output
    assert not (folder.path / "workspace").exists()


def test_train_refuses_no_devices_on_the_command_line(folder: Folder) -> None:
    result = folder.train("--workspace", str(folder.path / "workspace"), "--devices", "0")
    assert result.exit_code == 2
    assert "--devices 0: give positive numbers" in result.output
    assert not (folder.path / "workspace").exists()


def test_train_names_the_scheduler_that_it_cannot_reach(folder: Folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    result = folder.train("--scheduler", address, "--insecure")
    assert result.exit_code == 1
    assert f"the scheduler at {address} cannot be reached" in result.output


def test_up_refuses_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        result = collapipe("up", "--workspace", str(tmp_path / "w"), "--listen", address)
    assert result.exit_code == 2
    assert f"scheduler cannot listen on {address}" in result.output
    assert "free the port" in result.output
    assert not (tmp_path / "w" / "testbed.json").exists()


def test_service_refuses_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        line = ["--insecure", "--state-dir", str(tmp_path), "--listen", address]
        scheduler = subprocess.run(
            [sys.executable, "-m", "collapipe.scheduler", *line],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
    assert scheduler.returncode == 2
    assert f"cannot listen on {address}" in scheduler.stderr
    assert "choose another one with --listen" in scheduler.stderr
    assert "Traceback" not in scheduler.stderr


def test_too_long_text_is_cut_and_told(testbed: LocalTestbed, folder: Folder) -> None:
    folder.append("train.jsonl", json.dumps({"text": "stone " * 500, "label": "thing"}) + "\n")
    result = folder.train(*testbed.endpoint_options)
    assert result.exit_code == 0, result.output
    told = (
        r"[1-9]\d* of 34 training rows are cut, .* longer than task.max_length = 16 tokens: raise"
    )
    assert re.search(told, " ".join(result.output.split()))
    assert (folder.path / "model" / "model.safetensors").exists()


def test_divergence_keeps_the_rounds_before_it(testbed: LocalTestbed, folder: Folder) -> None:
    folder.settings += ["name=diverges", "training.learning_rate=1e30"]
    folder.settings += ["training.rounds=3", "training.local_steps=1", "schedule.retry_seconds=0"]
    result = folder.train(*testbed.endpoint_options)
    assert result.exit_code == 1
    for part in ("not finite", "step 0 of round 2", "1e+30", "lower training.learning_rate"):
        assert part in result.output
    assert "1 of 3 rounds are committed" in result.output
    exported = collapipe("export", "diverges", str(folder.path / "kept"), *testbed.endpoint_options)
    assert exported.exit_code == 0, exported.output
    assert (folder.path / "kept" / "model.safetensors").exists()
