"""Makes a disk image with Docker images for a guest.

A temporary dockerd of this machine loads the images, and its data folder becomes a file system.
"""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from containers.engine import CommandError, Engine, run

_START_SECONDS = 60.0
_COPY_SECONDS = 400.0


def make_disk(engine: Engine, images: Sequence[str], scratch: Path, size: str = "12G") -> Path:
    """Copies images of an engine into a disk image.

    Args:
        images: Tags of images that the engine has.
        scratch: A folder on a file system that overlay2 can use. In the end, it contains only the disk.
        size: Size of the disk. Unused parts take no space on this machine.

    Returns:
        The path of the disk. A guest changes the disk, so use it only once.
    """
    data = scratch / "data"
    with _loader(data, scratch) as host:
        save = [engine.docker, "save", *images]
        load = [engine.docker, "--host", host, "load", "--quiet"]
        with subprocess.Popen(save, env=dict(engine.environment), stdout=subprocess.PIPE) as saved:
            loaded = subprocess.run(load, stdin=saved.stdout, capture_output=True, text=True)
        if loaded.returncode or saved.returncode:
            raise CommandError(f"the images were not copied to the disk: {loaded.stderr}")
    disk = scratch / "docker.img"
    run(["truncate", "--size", size, str(disk)])
    options = ["-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", "-d", str(data)]
    run(["mkfs.ext4", *options, str(disk)], timeout=_COPY_SECONDS)
    run(["rm", "-rf", str(data), str(scratch / "exec")])
    return disk


@contextmanager
def _loader(data: Path, scratch: Path) -> Iterator[str]:
    """Runs a dockerd that only loads images, without network. Yields its address."""
    socket = f"unix://{scratch}/socket"
    line = ["dockerd", "--data-root", str(data), "--exec-root", str(scratch / "exec")]
    line += ["--pidfile", str(scratch / "pid"), "--host", socket]
    line += ["--bridge", "none", "--iptables=false", "--ip-forward=false"]
    with open(scratch / "dockerd.log", "wb") as log:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not os.path.exists(f"{scratch}/socket"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CommandError((scratch / "dockerd.log").read_text(errors="replace")[-2000:])
            time.sleep(0.1)
        yield socket
    finally:
        process.terminate()
        process.wait()
