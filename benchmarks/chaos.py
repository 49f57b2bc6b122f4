"""Disturbs jobs at random moments, and checks that each of them ends with the bits of an undisturbed one.

    python -m benchmarks.chaos --runs 200 --results chaos.jsonl     goes on where an earlier call stopped
    python -m benchmarks.chaos --runs 1 --first-seed 17             repeats the faults of one seed

A run has one or two faults, which its seed chooses. A process is killed and later started again, or is frozen for a
while, or has a full disk, or its clock jumps by a day and later back. A box is switched off without a word, and later on
again. A link is cut in one or both directions, or a host sends slowly. A device sends damaged bytes. Or it sends values that
are not finite, if its cluster has other devices: a job ends if its only device does so twice. A fault always comes at the same time after submission, but the job may be in another phase then. Every
service has a network namespace of its own. Needs root.

With `--results`, appends one JSON object for each run to a file. The exit status is 1 if any run, old or new, did not end
with equal bits.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.faulty_service import CLOCKS, DAMAGED_BYTES, NOT_FINITE
from benchmarks.namespaced_testbed import NamespacedTestbed, isolate, run

ROOT = Path(__file__).parents[1]
# Tests and this benchmark disturb and check the same job.
sys.path.insert(0, str(ROOT / "tests"))

from faults.interrupted import (  # noqa: E402
    Run,
    judge_interrupted,
    make_interruptible_job,
    mend,
    undisturbed_digests,
)
from killed_processes import kill, restart  # noqa: E402

from collapipe.errors import CollapipeError  # noqa: E402
from collapipe_client.processes import ProcessRecord  # noqa: E402

DEVICES = [3, 1]
"""The number of devices of each cluster."""
_TRAINING = {"rounds": 12, "replicate_every": 2}
_LATEST_FAULT_SECONDS = 8.0
_DISK_BYTES = 64 << 20
_SLOW_BPS = 2e6
_LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Fault:
    """One fault of a run.

    Args:
        victim: The host that is disturbed; of a cut link, the sender.
        at_seconds: Time after the job was submitted.
        lasts_seconds: Longest time until the fault ends. The end of one fault of links ends all of them.
        other: The receiver of a cut link. Other kinds ignore it.
    """

    kind: str
    victim: str
    at_seconds: float
    lasts_seconds: float
    other: str = ""


_OF_DEVICES = (NOT_FINITE, DAMAGED_BYTES)
KINDS = (
    *("kill", "switched off", "freeze"),
    *CLOCKS,
    *("cut", "cut one way", "slow", "full disk"),
    *_OF_DEVICES,
)
_WITH_DISK = ("scheduler", "edge-server", "control-unit-0", "control-unit-1")


def choose_faults(seed: int, names: list[str]) -> list[Fault]:
    """Returns the faults of a seed."""
    draw = random.Random(f"chaos {seed}")
    faults = []
    for _ in range(draw.choice((1, 1, 2))):
        kind = draw.choice(KINDS)
        candidates = _WITH_DISK if kind == "full disk" else names
        if kind in _OF_DEVICES:
            start = "device-0-" if kind == NOT_FINITE else "device-"
            candidates = [name for name in names if name.startswith(start)]
        victim = draw.choice(candidates)
        other = draw.choice([name for name in names if name != victim])
        at, lasts = draw.uniform(0.0, _LATEST_FAULT_SECONDS), draw.uniform(0.5, 12.0)
        faults.append(Fault(kind, victim, round(at, 2), round(lasts, 2), other))
    return sorted(faults, key=lambda fault: fault.at_seconds)


def disturb(testbed: NamespacedTestbed, fault: Fault) -> Callable[[], None]:
    """Begins a fault. Returns a function that ends it."""
    victim = fault.victim
    if fault.kind == "kill":
        if victim not in testbed.lost():
            kill(testbed, victim)
        return lambda: restart(testbed, victim) if victim in testbed.lost() else None
    if fault.kind == "switched off":
        testbed.unplug(victim)
        if victim not in testbed.lost():
            kill(testbed, victim)

        def switch_on() -> None:
            testbed.plug_in(victim)
            if victim in testbed.lost():
                restart(testbed, victim)

        return switch_on
    if fault.kind in (*CLOCKS, *_OF_DEVICES):
        testbed.fault_file(victim).write_text(fault.kind)
        return lambda: testbed.fault_file(victim).unlink(missing_ok=True)
    if fault.kind == "freeze":
        (process,) = (each for each in testbed.processes if each.name == victim)
        signal_if_alive(process, signal.SIGSTOP)
        return lambda: signal_if_alive(process, signal.SIGCONT)
    if fault.kind == "full disk":
        filler = testbed.workspace.state / victim / "filler"
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        return lambda: filler.unlink(missing_ok=True)
    if fault.kind == "slow":
        testbed.slow_down(victim, _SLOW_BPS)
        return testbed.heal
    testbed.cut(victim, fault.other)
    if fault.kind == "cut":
        testbed.cut(fault.other, victim)
    return testbed.heal


def signal_if_alive(process: ProcessRecord, number: signal.Signals) -> None:
    """Sends a signal, unless the other fault has killed the process."""
    if process.alive:
        os.kill(process.pid, number)


def run_seed(
    testbed: NamespacedTestbed, seed: int, undisturbed: list[str], folder: Path
) -> dict[str, Any]:
    """Runs a job with the faults of a seed, and returns what happened."""
    faults = choose_faults(seed, testbed.names)
    folder.mkdir()
    job = make_interruptible_job(folder, name=f"seed-{seed}", training=_TRAINING)
    errors: list[str] = []
    timers: list[threading.Thread] = []
    one_at_a_time = threading.Lock()  # Only one thread at a time may write the testbed's record.

    def have(fault: Fault) -> None:
        try:
            time.sleep(fault.at_seconds)
            with one_at_a_time:
                end = disturb(testbed, fault)
            time.sleep(fault.lasts_seconds)
            with one_at_a_time:
                end()
        except Exception as error:
            errors.append(f"{fault.kind} of {fault.victim}: {type(error).__name__}: {error}")

    def have_all(_: Run) -> None:
        timers.extend(threading.Thread(target=have, args=(fault,)) for fault in faults)
        for timer in timers:
            timer.start()

    started = time.monotonic()
    done = Run(job, testbed.workspace.state)
    outcome = judge_interrupted(
        testbed, done, undisturbed, lambda run: True, have_all, _LIMIT_SECONDS
    )
    seconds = time.monotonic() - started
    for timer in timers:
        timer.join()
    testbed.heal()
    mend(testbed, done)
    if done.job_id:  # The disks are small.
        with suppress(CollapipeError), testbed.client() as client:
            client.delete(done.job_id)
    return {
        "seed": seed,
        "outcome": "; ".join([outcome, *errors]),
        "seconds": round(seconds, 1),
        "attempts": len(done.attempts),
        "hit": any(fault.at_seconds < seconds for fault in faults),
        "faults": [asdict(fault) for fault in faults],
        "messages": done.messages,
    }


@contextmanager
def small_disks(workspace: Path) -> Iterator[None]:
    """Mounts a small tmpfs as the state directory of each service with a disk, and unmounts it at the end."""
    mounted: list[Path] = []
    try:
        for name in _WITH_DISK:
            disk = workspace / "state" / name
            disk.mkdir(parents=True)
            run(f"mount -t tmpfs -o size={_DISK_BYTES} tmpfs {disk}")
            mounted.append(disk)
        yield
    finally:
        for disk in mounted:
            run(f"umount {disk}")


def main() -> None:
    """Runs the seeds that the file of results does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file of results, one JSON object a line")
    options = parser.parse_args()
    isolate("benchmarks.chaos")
    results = []
    if options.results and options.results.exists():
        results = [json.loads(line) for line in options.results.read_text().splitlines()]
    seeds = range(options.first_seed, options.first_seed + options.runs)
    left = [seed for seed in seeds if seed not in {result["seed"] for result in results}]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            small_disks(folder / "testbed"),
            NamespacedTestbed(DEVICES, folder / "testbed") as testbed,
        ):
            testbed.wait_until_registered()
            undisturbed = undisturbed_digests(testbed, folder, training=_TRAINING)
            for seed in left:
                result = run_seed(testbed, seed, undisturbed, folder / f"seed-{seed}")
                results.append(result)
                print(
                    json.dumps({key: result[key] for key in result if key != "messages"}),
                    flush=True,
                )
                if options.results:
                    with open(options.results, "a", encoding="utf-8") as file:
                        file.write(f"{json.dumps(result)}\n")
    bad = [result for result in results if result["outcome"] != "equal"]
    seconds = [result["seconds"] for result in results]
    print(
        f"{len(results)} runs, {sum(result['hit'] for result in results)} with a fault before the end of the job; "
        f"{len(results) - len(bad)} ended with equal bits; seconds of a job: median "
        f"{statistics.median(seconds):.1f}, longest {max(seconds):.1f}"
    )
    for result in bad:
        print(f"seed {result['seed']}: {result['outcome']}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
