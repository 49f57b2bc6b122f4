"""The README's commands, run as they are written, in a copy of the checkout and with files as its formats say."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.timeout(600)


def shell_blocks() -> list[list[str]]:
    """Returns the commands of each shell block of the README, without their comments."""
    blocks = re.findall(
        r"```sh\n(.*?)```", (REPOSITORY / "README.md").read_text("utf-8"), re.DOTALL
    )
    return [
        [re.sub(r"\s{2,}#.*", "", line) for line in block.splitlines() if line] for block in blocks
    ]


SET_UP, OWN_DATA = shell_blocks()
SHORTER = "--set training.local_steps=2"
"""What a test adds to a command that trains."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the checkout whose `.venv` is the environment of this test, so that nothing is installed twice."""
    folder = tmp_path_factory.mktemp("readme") / "collapipe"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", ".collapipe", "*_cache", "__pycache__"
    )
    shutil.copytree(REPOSITORY, folder, ignore=ignored, symlinks=True)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    yield folder
    subprocess.run([folder / ".venv/bin/collapipe", "down"], cwd=folder, check=False)


def test_set_up_is_a_clone_and_two_commands() -> None:
    assert SET_UP[0].startswith("git clone ")
    assert SET_UP[1:] == ["make demo", "make test"]


def test_demo_trains_and_leaves_a_model(checkout: Path) -> None:
    done = subprocess.run(
        ["bash", "-ec", SET_UP[1]], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / "collapipe-models" / "demo" / "model.safetensors").is_file()
    # An ordinary job gives no warning, and no line comes twice.
    lines = [re.sub(r"^\[.*? s\] ", "", line) for line in done.stdout.splitlines() if line]
    assert "warning" not in done.stdout
    assert len(lines) == len(set(lines)), lines


def write_own_data(folder: Path) -> None:
    """Writes the files that the commands name, in the formats that docs/running.md gives."""
    texts = [
        ("the card never came", "card"),
        ("my rate is wrong", "rate"),
        ("top up failed", "top"),
    ]
    rows = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in texts * 30)
    table = "text,label\n" + "".join(f"{text},{label}\n" for text, label in texts * 30)
    sentence = "Anna\tB-person\nlives\tO\nin\tO\nBonn\tB-place\n\n"
    pair = json.dumps({"en": "A man rides a horse.", "de": "Ein Mann reitet ein Pferd."}) + "\n"
    # A hash of each text decides whether it is held out, so the texts differ.
    lines = "".join(f"Lamp {number} stands by the river.\n" for number in range(5000))
    # As above, the prompts differ.
    prompts = "".join(
        json.dumps({"prompt": f"Who stands by lamp {number}?", "completion": "the keeper"}) + "\n"
        for number in range(200)
    )
    contents = {"conll": sentence * 90, "txt": lines, "jsonl": rows, "csv": table}
    named = {"pairs": pair * 200, "prompts": prompts}
    for name, suffix in re.findall(r"=([\w-]+\.(jsonl|csv|conll|txt))", "\n".join(OWN_DATA)):
        content = named.get(name.partition(".")[0].partition("-")[0], contents[suffix])
        (folder / name).write_text(content, "utf-8")


@pytest.fixture(scope="module")
def folder_with_data(checkout: Path) -> Path:
    """A checkout with data, and with a testbed that the commands share, because its start takes half a minute."""
    write_own_data(checkout)
    up = [".venv/bin/collapipe", "up", "--clusters", "2", "--devices", "3"]
    subprocess.run(up, cwd=checkout, check=True)
    return checkout


@pytest.mark.parametrize("command", OWN_DATA[1:])
def test_own_data_trains_its_first_round(folder_with_data: Path, command: str) -> None:
    """Runs a command until its first round is committed, then interrupts it as a user would."""
    process = subprocess.Popen(
        # A test that runs in the background of a shell ignores SIGINT, and its children would do so, too.
        ["env", "--default-signal=INT", "bash", "-ec", f"{OWN_DATA[0]}; exec {command} {SHORTER}"],
        cwd=folder_with_data,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    printed: list[str] = []
    committed = False
    for line in process.stdout:
        printed.append(line)
        if not committed and re.search(r"round 1/\d+ committed in", line):
            committed = True
            process.send_signal(signal.SIGINT)
    process.wait()
    assert committed, "".join(printed)
