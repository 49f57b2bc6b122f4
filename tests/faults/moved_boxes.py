"""Runs a job while one device cannot be reached at its address, or has a twin, and checks that the others end the job with equal bits.

Needs root: every service has a network namespace of its own. Prints for each fault how many seconds longer than the undisturbed job
the disturbed one took. The exit status is 0 if all is as expected.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.namespaced_testbed import NamespacedTestbed, isolate
from killed_processes import kill, restart

from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED, HostStatus
from faults.interrupted import (
    MomentMissedError,
    Run,
    final_digests,
    intact_commit,
    make_interruptible_job,
    run_interrupted,
)

_DEVICE = "device-0-1"
_FREE_ADDRESS = "10.99.0.200"
_SECOND_ROUND = 1
_LIMIT_SECONDS = 240.0


class Boxes(NamespacedTestbed):
    """A testbed with a device whose box has faults. They stay until `mend`."""

    def __init__(self, folder: Path) -> None:
        super().__init__([3, 1], folder)
        self._twin: subprocess.Popen[bytes] | None = None

    def move(self) -> None:
        """Gives the box another address than the one at which its device is registered."""
        self.exchange_address(_DEVICE, _FREE_ADDRESS)

    def close_port(self) -> None:
        """Lets no new connections in. The device can still call others, and its heartbeats arrive."""
        self.refuse_connections(_DEVICE)

    def start_twin(self) -> None:
        """Starts a second process with the name of the device, and waits until it has tried to register."""
        if self._twin is None:
            (process,) = (each for each in self.processes if each.name == _DEVICE)
            line = Path(f"/proc/{process.pid}/cmdline").read_text().rstrip("\0").split("\0")
            host = self.address_of(_DEVICE)
            changes = {
                "--listen": f"{host}:7001",
                "--metrics-listen": f"{host}:0",
                "--state-dir": f"{self.workspace.state}/twin",
                "--ready-file": f"{self.workspace.run}/twin",
            }
            for option, value in changes.items():
                line[line.index(option) + 1] = value
            self._twin = self.start_in(_DEVICE, line)
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not self.status().twin_address:
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.1)

    def switch_off_and_on(self) -> None:
        kill(self, _DEVICE)
        self.unplug(_DEVICE)
        time.sleep(5)
        self.plug_in(_DEVICE)
        restart(self, _DEVICE)

    def mend(self) -> None:
        """Ends all faults."""
        self.heal()
        self.exchange_address(_DEVICE, self.address_of(_DEVICE))
        self._end_twin()
        self.wait_until_registered()

    def stop(self) -> None:
        self._end_twin()
        super().stop()

    def _end_twin(self) -> None:
        if self._twin is not None:
            self._twin.terminate()
            self._twin.wait()
            self._twin = None

    def status(self) -> HostStatus:
        """Returns what the scheduler knows of the device."""
        with self.client() as client:
            return next(s for s in client.hosts() if s.host.host_id == _DEVICE)

    def log(self) -> str:
        return self.workspace.log_file(_DEVICE).read_text()


@dataclass(frozen=True)
class Fault:
    """A fault that begins in the middle of a job and stays until its end.

    Args:
        is_shown: Whether somebody who looks at the testbed can see what is wrong.
        most_attempts: How often the job may have to try.
    """

    name: str
    begin: Callable[[Boxes], None]
    is_shown: Callable[[Boxes], bool]
    most_attempts: int = 2


FAULTS = (
    Fault("moved", Boxes.move, lambda boxes: "has lost the address" in boxes.log()),
    Fault(
        "closed", Boxes.close_port, lambda boxes: "call device-0-1 back" in boxes.status().refusal
    ),
    Fault("twin", Boxes.start_twin, lambda boxes: bool(boxes.status().twin_address), 1),
    Fault("off and on", Boxes.switch_off_and_on, lambda boxes: boxes.status().alive),
)


def main() -> None:
    isolate("faults.moved_boxes")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--faults", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = make_interruptible_job(
            folder, training={"rounds": options.rounds, "replicate_every": 10}
        )
        with Boxes(folder / "testbed") as boxes:
            boxes.wait_until_registered()

            def begin(fault: Callable[[Boxes], None] | None, run: Run) -> None:
                if fault is not None:
                    fault(boxes)
                    if fault is Boxes.start_twin and run.ended:  # A twin needs seconds to start.
                        raise MomentMissedError("the job ended before the twin started")

            def run_with(fault: Callable[[Boxes], None] | None) -> tuple[Run, float]:
                began = time.monotonic()
                run = run_interrupted(
                    boxes,
                    job,
                    (lambda run: run.round_index == _SECOND_ROUND) if fault else None,
                    lambda run: begin(fault, run),
                    limit_seconds=_LIMIT_SECONDS,
                )
                return run, time.monotonic() - began

            undisturbed, seconds = run_with(None)
            digests = final_digests(intact_commit(undisturbed))
            print(f"undisturbed: {seconds:.1f} s", flush=True)
            for fault in (fault for fault in FAULTS if fault.name in options.faults):
                run, disturbed_seconds = run_with(fault.begin)
                behind = disturbed_seconds - seconds
                print(f"{fault.name}: {behind:+.1f} s, {len(run.attempts)} attempts", flush=True)
                assert run.final_state == JOB_STATE_SUCCEEDED, run.message
                assert final_digests(intact_commit(run)) == digests, run.messages
                assert len(run.attempts) <= fault.most_attempts, run.messages
                deadline = time.monotonic() + _LIMIT_SECONDS
                while not fault.is_shown(boxes):
                    assert time.monotonic() < deadline, (fault.name, boxes.status(), boxes.log())
                    time.sleep(0.1)
                boxes.mend()


if __name__ == "__main__":
    main()
