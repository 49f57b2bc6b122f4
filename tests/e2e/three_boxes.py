"""Follows the section "Three boxes" of deploy/README.md word by word, from nothing to a trained model.

Each box is a network namespace with a user, a home folder, a checkout and programs of its own. The third one speaks an older version of
the protocol. pip finds all packages installed, because they are those of this environment, and there is no way to the internet.
Needs root. Prints the commands with their seconds. The exit status is 0 if the job succeeded and no process printed a traceback.
"""

import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.namespaced_testbed import isolate, run

from collapipe.data.stdlib_docstrings import load_docstrings

ROOT = Path(__file__).parents[2]
_MOST_COMMANDS = 12
_MOST_SECONDS = 600.0
_ROWS = 256
_FASTER = " --set training.rounds=2 --set training.local_steps=4"
"""What the walk adds to the command that trains."""


@dataclass
class Box:
    """A machine with its user.

    Args:
        uid: Of the user, and the last part of the address.
    """

    name: str
    uid: int
    home: Path
    repository: Path
    started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"10.99.7.{self.uid % 256}"

    @property
    def namespace(self) -> str:
        return f"box-{os.getpid()}-{self.name}"

    def make(self) -> None:
        run(f"ip netns add {self.namespace}")
        run(f"ip link add {self.name} type veth peer name eth0 netns {self.namespace}")
        run(f"ip link set {self.name} master br0 up")
        for interface, address in (("lo", "127.0.0.1/8"), ("eth0", f"{self.address}/24")):
            run(f"ip -n {self.namespace} link set {interface} up")
            run(f"ip -n {self.namespace} addr replace {address} dev {interface}")
        programs = self.home / ".collapipe-box" / "programs"
        programs.parent.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", programs], check=True)
        own = next((programs / "lib").glob("python*/site-packages"))
        # A line of a .pth file does not read the .pth files there, by which this environment has the checkout.
        (own / "packages.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
        # git clones no folder of another user, such as the repository of this walk.
        (self.home / ".gitconfig").write_text("[safe]\n\tdirectory = *\n")
        subprocess.run(["chown", "-R", f"{self.uid}:{self.uid}", self.home], check=True)

    def start(self, command: str) -> Path:
        """Starts a command in a new terminal, and returns the file with its output."""
        python = Path(sys.base_prefix) / "bin"
        # The user may read what root has, such as the packages of this environment, but write only its own files.
        read_all = "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
        user = f"setpriv --reuid={self.uid} --regid={self.uid} --clear-groups {read_all}"
        settings = {
            "HOME": self.home,
            "USER": self.name,
            "PATH": f"{python}:/usr/bin:/bin",
            "PIP_NO_INDEX": "1",
        }
        environment = ["env", "-i", *(f"{name}={value}" for name, value in settings.items())]
        inside = ["ip", "netns", "exec", self.namespace, *user.split(), *environment]
        log = self.home.parent / f"{self.name}-{len(self.started)}.log"
        with open(log, "wb") as output:
            self.started[log] = subprocess.Popen(
                [*inside, "bash", "-c", f"exec {command}"],
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return log

    def wait(self, log: Path, line: str | None) -> str:
        """Waits until a command has printed a line, or has ended if that is `None`. Returns its output."""
        process, deadline = self.started[log], time.monotonic() + _MOST_SECONDS
        while line is None or line not in log.read_text():
            assert time.monotonic() < deadline, f"{process.args}: {log.read_text()}"
            if process.poll() is not None:
                break
            time.sleep(0.05)
        is_done = line is not None and line in log.read_text()
        assert is_done or process.poll() == 0, f"{process.args}: {log.read_text()}"
        return log.read_text()

    def end(self) -> None:
        """Ends all processes, as Ctrl-C does, and removes the network."""
        for process in self.started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        for process in self.started.values():
            process.wait(_MOST_SECONDS)
        run(f"ip netns del {self.namespace}")


def steps_of_page() -> Iterator[tuple[str, str]]:
    """Returns the commands of the section, each with the box whose paragraph it follows."""
    page = (ROOT / "deploy" / "README.md").read_text("utf-8")
    section = page.partition("## Three boxes\n")[2].partition("\n## ")[0]
    names = {"first": "hub", "second": "desk", "third": "pi"}
    box = ""
    for paragraph in section.split("\n\n"):
        if paragraph.startswith("    "):
            yield from ((box, line.strip()) for line in paragraph.splitlines())
        elif found := re.findall(r"(first|second|third) machine", paragraph):
            box = names[found[-1]]


def make_repository(folder: Path) -> None:
    """Makes a repository with the files of this checkout as its only commit."""
    listed = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, *words], check=True)


def make_older(newer: Path, folder: Path) -> None:
    """Makes a repository whose services speak only the first version of the protocol."""
    shutil.copytree(newer, folder)
    file = folder / "services" / "collapipe" / "protocol.py"
    text, count = re.subn(r"newest=\d+", "newest=1", file.read_text())
    assert count == 1
    file.write_text(text)
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run([*git, "commit", "--quiet", "--all", "-m", "older"], check=True)


def walk(folder: Path) -> None:
    repository, older = folder / "repository", folder / "older"
    make_repository(repository)
    make_older(repository, older)
    boxes = {
        "hub": Box("hub", 20010, folder / "home of ada", repository),
        "desk": Box("desk", 20011, folder / "benutzer-ü", repository),
        "pi": Box("pi", 20012, folder / "pi", older),
    }
    data = boxes["desk"].home / "my texts"
    for box in boxes.values():
        box.home.mkdir()
    data.mkdir()
    with open(data / "rows.csv", "w", newline="", encoding="utf-8") as file:
        rows = load_docstrings()[:_ROWS]
        csv.writer(file).writerows(
            [("text", "label"), *((row.texts[0], row.labels[0]) for row in rows)]
        )
    run("ip link add br0 type bridge")
    run("ip link set br0 up")
    for box in boxes.values():
        box.make()
    try:
        follow_page(boxes, data)
    finally:
        for box in boxes.values():
            box.end()
    for box in boxes.values():
        for log in box.started:
            assert "Traceback" not in log.read_text(), log.read_text()


def follow_page(boxes: dict[str, Box], data: Path) -> None:
    """Runs the commands of the page."""
    tokens: dict[str, str] = {}
    steps = list(steps_of_page())
    began = time.monotonic()
    for name, command in steps:
        box, since = boxes[name], time.monotonic()
        role = next((role for role in tokens if f" {role} " in command), "client")
        line = command.replace("TOKEN", tokens.get(role, ""))
        line = line.replace("REPOSITORY", shlex.quote(str(box.repository)))
        line = line.replace("HOST", boxes["hub"].address).replace("FOLDER", shlex.quote(str(data)))
        if " train " in line:
            line += _FASTER
            _wait_for_hosts(boxes["hub"], 3)
        is_service = " serve " in line or (" --join " in line and role != "client")
        said = box.wait(box.start(line), "serving on" if is_service else None)
        if " certs token " in line:
            roles = re.findall(r"([a-z-]+):[a-z]", command)
            made = re.findall(r"^collapipe-join-\S+$", said, re.MULTILINE)
            tokens = dict(zip(roles, made, strict=True))
        print(f"{time.monotonic() - since:6.1f} s  {name:5} {command}", flush=True)
    print(f"{len(steps)} commands in {time.monotonic() - began:.1f} s")
    assert 0 < len(steps) <= _MOST_COMMANDS
    assert "committed" in said


def _wait_for_hosts(hub: Box, count: int) -> None:
    """Waits until `collapipe status` shows that many hosts, as the page says."""
    deadline = time.monotonic() + _MOST_SECONDS
    while True:
        said = hub.wait(hub.start("~/.local/bin/collapipe status"), None)
        if said.count(" yes") >= count:
            return
        assert time.monotonic() < deadline, said
        time.sleep(0.5)


if __name__ == "__main__":
    isolate("e2e.three_boxes")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        walk(Path(name))
