"""Runs a User-Mode Linux guest: a kernel with netem as an ordinary process.

Tests use it on machines whose own kernel lacks netem. The guest sees the files of this machine under an overlay, so
that it can run this checkout without changing it.
"""

import os
import select
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from typing_extensions import Self

INIT = Path(__file__).with_name("init.sh")
_PTRACE = Path(__file__).with_name("ptrace.c")
KERNEL = "linux.uml"
SHARED = Path("/shared")
"""Path in the guest of the folder that it shares with this machine."""
_READY = b"UML-READY\n"
_BOOT_SECONDS = 90.0


def need_uml() -> None:
    """Skips the test if User-Mode Linux cannot run."""
    if not shutil.which(KERNEL) or not shutil.which("modprobe"):
        pytest.skip(
            "no User-Mode Linux on this machine: apt-get install user-mode-linux kmod iproute2"
        )
    if _has_amx() and not shutil.which("cc"):
        pytest.skip(
            "this processor has AMX, and there is no C compiler to build what User-Mode Linux needs for it: "
            "apt-get install gcc libc6-dev"
        )


def _has_amx() -> bool:
    return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()


class CommandError(Exception):
    """A command in the guest failed."""


class Guest:
    """A guest that runs inside `with`.

    Args:
        shared: Folder of this machine that the guest may write to, as `SHARED`.
        memory: Memory of the guest, in the kernel's notation.
        core: The processor of this machine to which the guest is pinned. The guest has one processor, and is
            twice as fast when it stays on the same one.
    """

    def __init__(self, shared: Path, memory: str = "512M", core: int | None = 1) -> None:
        self.shared = shared.absolute()
        self._line = [KERNEL, f"mem={memory}", "root=/dev/root", "rootfstype=hostfs"]
        self._line += ["rootflags=/", "ro", "quiet", f"init={INIT}", "con=null", "con0=fd:0,fd:1"]
        self._line += ["ssl=null", f"umid=guest{uuid.uuid4().hex[:8]}"]
        self._line += [f"uml_dir={self.shared}/.uml", f"UML_SHARED={self.shared}"]
        if core is not None and core in os.sched_getaffinity(0):
            self._line = ["taskset", "-c", str(core), *self._line]
        self._unread = b""

    def __enter__(self) -> Self:
        memory_files = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
        environment = {**os.environ, "TMPDIR": memory_files}
        if _has_amx():
            library = self.shared / "ptrace.so"
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, _PTRACE], check=True)
            environment["LD_PRELOAD"] = str(library)
        log = open(self.shared / "guest.log", "ab")
        self._process = subprocess.Popen(
            self._line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        self._log = log
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        try:
            self._read_until(_READY, _BOOT_SECONDS)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(15)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._kill()

    def run(self, command: str, timeout: float = 60.0, check: bool = True) -> str:
        """Runs a shell command in the guest and returns its output.

        Raises:
            CommandError: The command failed, and `check` is set.
            TimeoutError: The command did not end in time.
        """
        mark = uuid.uuid4().hex
        assert self._process.stdin is not None
        line = f"{{ {command}\n}} </dev/null 2>&1; status=$?; echo; echo {mark}=$status\n"
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
        printed = self._read_until(f"\n{mark}=".encode(), timeout).decode(errors="replace").strip()
        status = int(self._read_until(b"\n", 5.0))
        if check and status:
            raise CommandError(f"`{command}` ended with status {status}: {printed}")
        return printed

    def start(self, name: str, command: str) -> None:
        """Starts a command in the background. Its output goes to NAME.log in the shared folder."""
        (self.shared / f"{name}.log").write_bytes(b"")
        self.run(
            f"setsid {command} >>{SHARED}/{name}.log 2>&1 </dev/null & echo $! >/run/{name}.pid"
        )

    def stop(self, name: str, signal_name: str = "TERM", timeout: float = 20.0) -> None:
        """Sends a signal to a command of `start`, and waits for its end."""
        wait = f"while kill -0 $(cat /run/{name}.pid) 2>/dev/null; do sleep 0.1; done"
        self.run(f"kill -{signal_name} $(cat /run/{name}.pid); {wait}", timeout)

    def wait_for(self, name: str, text: str, timeout: float = 20.0) -> str:
        """Waits until a command of `start` has printed a text, and returns its output so far."""
        deadline = time.monotonic() + timeout
        while text not in (log := self.log(name)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not print {text!r} within {timeout:g} s: {log}")
            time.sleep(0.05)
        return log

    def log(self, name: str) -> str:
        """Returns the output of a command of `start` so far."""
        return (self.shared / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def _read_until(self, mark: bytes, timeout: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while True:
            self._unread = self._unread.replace(b"\r\n", b"\n")
            before, found, after = self._unread.partition(mark)
            if found:
                self._unread = after
                return before
            left = deadline - time.monotonic()
            if left <= 0:
                last = self._unread[-3000:].decode(errors="replace")
                raise TimeoutError(f"the guest did not answer within {timeout:g} s: {last}")
            if select.select([self._process.stdout], [], [], left)[0]:
                data = self._process.stdout.read()
                if data == b"":
                    last = self._unread[-3000:].decode(errors="replace")
                    raise EOFError(f"the guest ended: {last}")
                if data:
                    self._log.write(data)
                    self._log.flush()
                    self._unread += data

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()
