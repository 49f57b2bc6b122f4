"""What does an attacker with the certificates of one client and one box cost two honest jobs?

    python -m benchmarks.attacker --rounds 1300          about 30 minutes, of which 13 are attacks

All processes run on this machine and speak mutual TLS over loopback. Two jobs of two clusters train all the time. The third cluster is
for the attacker, who owns its only device and may submit jobs. For one minute (`--window`), it attacks with everything in `ATTACKS`, and
for the next one it rests.

In reality, an attacker has a machine of its own. So its process and those of its cluster have the lowest priority, and a host of the
honest clusters emulates a slow device, which mostly sleeps. What the scheduler, the edge server and the honest hosts do for the
attacker is not reduced.

Prints tables in Markdown: the rounds of both jobs, the memory, descriptors and disk of every service, and what the attacker was told. The
exit status is 1 in each of these cases:

- An attempt of an honest job failed, or its weights, optimizer states or losses differ from those of a loop in one process.
- The median of the rounds under attack is more than 1.2 times that of the others.
- The attacker did what only the owner of a job or the scheduler may do, or a service failed with an internal error.
- A service has ended.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.memory import resident_bytes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fuzzing import RandomCalls, RandomInputs, all_methods  # noqa: E402
from integration.exactness import check_equals_reference  # noqa: E402
from integration.running import FinishedJob, run_job  # noqa: E402
from reference.tiny_jobs import make_job  # noqa: E402
from strangers import Strangers  # noqa: E402

from collapipe.certificates import Identity, Role  # noqa: E402
from collapipe.emulation.device_profiles import DEVICE_PROFILES, ProfileName  # noqa: E402
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation  # noqa: E402
from collapipe.errors import CollapipeError  # noqa: E402
from collapipe.job import JobConfig  # noqa: E402
from collapipe.rpc import Security, open_channel, serve  # noqa: E402
from collapipe.rpc.permissions import PERMISSIONS  # noqa: E402
from collapipe.service_process import raise_open_files  # noqa: E402
from collapipe.v1 import edge_server_pb2, link_pb2, scheduler_pb2, telemetry_pb2  # noqa: E402
from collapipe.v1.edge_server_pb2_grpc import EdgeServerServiceStub  # noqa: E402
from collapipe.v1.link_pb2_grpc import LinkServiceStub  # noqa: E402
from collapipe.v1.scheduler_pb2_grpc import SchedulerServiceStub  # noqa: E402
from collapipe.v1.telemetry_pb2_grpc import (  # noqa: E402
    TelemetryServiceServicer,
    add_TelemetryServiceServicer_to_server,
)
from collapipe_client import LocalTestbed  # noqa: E402
from collapipe_client.processes import ProcessRecord  # noqa: E402
from collapipe_client.workspace import Workspace  # noqa: E402

MOST_RATIO = 1.2
_CLIENT = Identity(Role.CLIENT, "mallory")
_CLUSTER = 2
_BOX = f"device-{_CLUSTER}-0"
_NAMES = (_CLIENT.name, _BOX)
"""Those in the certificates of the attacker."""
_OF_ATTACKER = frozenset({f"control-unit-{_CLUSTER}", _BOX})
_MICRO_BATCH_SECONDS = 0.1
"""What an emulated device of an honest cluster needs for a pass over a micro-batch, at least."""
_PROFILE: ProfileName = "raspberry-pi-4"
_LOWEST_PRIORITY = 19
_LIMIT_SECONDS = 7200.0
_IDLE = 1100
_CALL_SECONDS = 20.0
_FORBIDDEN = "forbidden"
"""Begins the names of what nobody but the owner or the scheduler may do."""
_TRAINING = {"local_steps": 2, "replicate_every": 1}


def main() -> int:
    """Runs both jobs and the attacker, and prints tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1300, help="those of each honest job")
    parser.add_argument("--attacks", nargs="*", choices=[each.__name__ for each in ATTACKS])
    parser.add_argument("--window", type=float, default=60.0, help="seconds of a part")
    options = parser.parse_args()
    raise_open_files()
    torch.set_num_threads(1)  # as in every service
    with tempfile.TemporaryDirectory() as name:
        return attack(Path(name), options.rounds, options.window, options.attacks or [])


@dataclass(frozen=True)
class Window:
    """A part of the run, with or without attacks.

    Args:
        start: On the monotonic clock.
        processor_seconds: What each process has used in it.
    """

    start: float
    end: float
    processor_seconds: Mapping[str, float]


@dataclass
class Rounds:
    """The rounds of the honest jobs: the time of each commit on the monotonic clock, and the seconds of the round."""

    committed: list[tuple[float, float]] = field(default_factory=list)

    def take(self, event: Any) -> None:
        if event.HasField("round_committed"):
            self.committed.append((time.monotonic(), event.round_committed.round_seconds))

    def within(self, windows: Sequence[Window]) -> list[float]:
        """Returns the seconds of the rounds that began and ended in one of the windows."""
        return [
            seconds
            for at, seconds in self.committed
            if any(each.start <= at - seconds and at <= each.end for each in windows)
        ]


def attack(folder: Path, num_rounds: int, window: float, names: Sequence[str]) -> int:
    """Runs both jobs to their end beside the attacker. Returns the exit status."""
    slowdown = _MICRO_BATCH_SECONDS / DEVICE_PROFILES[_PROFILE].seconds_per_micro_batch
    slow = EmulatedDevice(profile=_PROFILE, slowdown=slowdown)
    devices = [f"device-{cluster}-{device}" for cluster in range(2) for device in range(2)]
    emulation = Emulation(devices=dict.fromkeys(devices, slow))
    jobs = [honest_job(folder / f"job-{index}", index, num_rounds) for index in range(2)]
    mistakes: list[str] = []
    with ExitStack() as owned:
        testbed = owned.enter_context(
            LocalTestbed([2, 2, 1], folder / "testbed", emulation=emulation)
        )
        testbed.wait_until_registered()
        testbed.workspace.certificates.issue({_CLIENT: ()}, timedelta(days=1))
        lower_priority(testbed)
        rounds = [Rounds() for _ in jobs]
        finished: dict[int, FinishedJob] = {}
        ids: dict[int, str] = {}

        def run(index: int) -> None:
            def take(event: Any) -> None:
                rounds[index].take(event)

            try:
                finished[index] = run_job(
                    testbed, jobs[index], on_event=take, limit_seconds=_LIMIT_SECONDS
                )
            except (AssertionError, CollapipeError) as error:
                mistakes.append(f"job {index}: {error}")

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
        for thread in threads:
            thread.start()
        while any(len(each.committed) < 5 for each in rounds) and not mistakes:
            time.sleep(0.5)
        with testbed.client() as client:
            ids = dict(enumerate(status.job_id for status in client.jobs()))
        before = usage(testbed)
        spawn = multiprocessing.get_context("spawn")
        is_on, is_over, told = spawn.Event(), spawn.Event(), spawn.Queue()
        has_rested = spawn.Event()
        places = Places(
            {process.name: process.address for process in testbed.processes},
            testbed.workspace.root,
            list(ids.values()),
            own_job(folder / "own").to_json(),
            testbed.workspace.page_link(),
            names,
        )
        attacker = spawn.Process(
            target=play, args=(places, is_on, has_rested, is_over, told), daemon=True
        )
        attacker.start()
        owned.callback(attacker.kill)
        told.get(timeout=_LIMIT_SECONDS)  # It has imported its modules.
        windows: dict[bool, list[Window]] = {True: [], False: []}
        processes = {process.name: process.pid for process in testbed.processes if process.pid}
        processes["the attacker itself"] = attacker.pid or 0
        most = before
        for attacks in itertools.cycle((False, True)):
            if not any(thread.is_alive() for thread in threads):
                break
            if attacks:
                has_rested.clear()
                is_on.set()
            else:
                is_on.clear()
                has_rested.wait(_LIMIT_SECONDS)
            started, used = time.monotonic(), processor_seconds(processes)
            while any(t.is_alive() for t in threads) and time.monotonic() < started + window:
                time.sleep(0.5)
            now = processor_seconds(processes)
            windows[attacks].append(
                Window(started, time.monotonic(), {name: now[name] - used[name] for name in now})
            )
            most = {name: most[name].most(now) for name, now in usage(testbed).items()}
        is_over.set()
        is_on.clear()
        answers: Counter[str] = told.get(timeout=_LIMIT_SECONDS)
        for thread in threads:
            thread.join()
        after = usage(testbed)
        mistakes += [testbed.describe_loss(name) for name in testbed.lost()]
        for index, done in finished.items():
            try:
                check_equals_reference(jobs[index], done)
            except AssertionError as error:
                mistakes.append(f"job {index} differs from the loop in one process: {error}")
    mistakes += print_rounds(rounds, windows)
    print_usage(before, most, after)
    print_processors(windows)
    mistakes += print_answers(answers)
    print("\n".join(mistakes) or "both jobs ended with the bits of a loop in one process")
    return 1 if mistakes else 0


def honest_job(folder: Path, cluster: int, num_rounds: int) -> JobConfig:
    """Makes a job whose rounds take some seconds, on one cluster of two devices."""
    return make_job(
        folder,
        name=f"honest-{cluster}",
        use_clusters=[cluster],
        devices_per_cluster=2,
        training={**_TRAINING, "rounds": num_rounds},
        schedule={"strategy": "pipeline"},
    )


def own_job(folder: Path) -> JobConfig:
    """Makes a job that the attacker may run on its cluster."""
    return make_job(
        folder, name="own", use_clusters=[_CLUSTER], training={**_TRAINING, "rounds": 100_000}
    )


def lower_priority(testbed: LocalTestbed) -> None:
    """Gives the hosts of the attacker's cluster the lowest priority."""
    for process in testbed.processes:
        if process.name in _OF_ATTACKER:
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)


@dataclass(frozen=True)
class Usage:
    """What a service holds."""

    memory_bytes: int
    descriptors: int
    disk_bytes: int

    def most(self, other: "Usage") -> "Usage":
        return Usage(
            max(self.memory_bytes, other.memory_bytes),
            max(self.descriptors, other.descriptors),
            max(self.disk_bytes, other.disk_bytes),
        )


def processor_seconds(processes: Mapping[str, int]) -> dict[str, float]:
    """Returns what each process has used since its start, in user mode and in the kernel."""
    used = {}
    for name, pid in processes.items():
        with suppress(FileNotFoundError):
            values = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()
            used[name] = (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
    return used


def usage(testbed: LocalTestbed) -> dict[str, Usage]:
    """Measures every service that runs."""
    return {
        process.name: _usage(process, testbed.workspace.state / process.name)
        for process in testbed.processes
        if process.alive
    }


def _usage(process: ProcessRecord, state: Path) -> Usage:
    disk = 0
    for folder, _, names in os.walk(state):  # It skips folders that services delete meanwhile.
        for name in names:
            with suppress(FileNotFoundError):
                disk += os.stat(os.path.join(folder, name)).st_size
    descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
    return Usage(resident_bytes(process.pid, "VmRSS"), descriptors, disk)


def print_rounds(rounds: Sequence[Rounds], windows: Mapping[bool, Sequence[Window]]) -> list[str]:
    """Prints the rounds of each job. Returns what is wrong."""
    attacked = sum(each.end - each.start for each in windows[True])
    print(f"\n{attacked / 60:.1f} minutes of attacks, in {len(windows[True])} parts\n")
    print(
        "| job | rounds at rest | median, s | under attack | median, s | ratio |\n|---|---|---|---|---|---|"
    )
    mistakes = []
    for index, job in enumerate(rounds):
        quiet, under = (job.within(windows[attacks]) for attacks in (False, True))
        if not quiet or not under:
            mistakes.append(f"job {index} has too few rounds to compare: give it more --rounds")
            continue
        medians = statistics.median(quiet), statistics.median(under)
        ratio = medians[1] / medians[0]
        print(
            f"| {index} | {len(quiet)} | {medians[0]:.3f} | {len(under)} | {medians[1]:.3f} | {ratio:.2f} |"
        )
        if ratio > MOST_RATIO:
            mistakes.append(
                f"rounds of job {index} are {ratio:.2f} times as long (limit: {MOST_RATIO})"
            )
    return mistakes


def print_usage(
    before: Mapping[str, Usage], most: Mapping[str, Usage], after: Mapping[str, Usage]
) -> None:
    """Prints what every service held before the attacks, at most, and after them."""
    print("\n| service | memory, MB | descriptors | disk, MB |\n|---|---|---|---|")
    for name, first in before.items():
        three = [first, most[name], after[name]]
        columns = (
            [f"{each.memory_bytes / 1e6:.0f}" for each in three],
            [str(each.descriptors) for each in three],
            [f"{each.disk_bytes / 1e6:.1f}" for each in three],
        )
        print(f"| {name} | {' | '.join(' → '.join(values) for values in columns)} |")


def print_processors(windows: Mapping[bool, Sequence[Window]]) -> None:
    """Prints which share of a core every process has used."""
    if not all(windows.values()):
        return
    print("\n| process | share of a core at rest | under attack |\n|---|---|---|")
    for name in windows[False][0].processor_seconds:
        shares = (
            sum(each.processor_seconds.get(name, 0.0) for each in windows[attacks])
            / sum(each.end - each.start for each in windows[attacks])
            for attacks in (False, True)
        )
        print(f"| {name} | {' | '.join(f'{share:.3f}' for share in shares)} |")


def print_answers(answers: Counter[str]) -> list[str]:
    """Prints what the attacker was told. Returns what it should not have been able to do."""
    print("\n| attack | outcome | number |\n|---|---|---|")
    for name, number in sorted(answers.items()):
        print(f"| {name.replace(': ', ' | ')} | {number} |")
    if not answers:
        return ["the attacker attacked with nothing"]
    done = [
        f"the attacker could do what is {name}"
        for name in answers
        if name.startswith(_FORBIDDEN) and name.endswith(": OK")
    ]
    failed = ("UNKNOWN", "INTERNAL")
    return done + [f"a service failed: {name}" for name in answers if name.endswith(failed)]


@dataclass(frozen=True)
class Places:
    """What the attacker knows.

    Args:
        addresses: Those of all services, by their names.
        workspace: The folder of the testbed, of which it reads its two certificates only.
        honest: Ids of the jobs of others.
        job_json: A job that it may run.
        page_link: That of the page in the browser, whose address it calls without the code in it.
        attacks: Names of the functions in `ATTACKS` that it uses; empty for all of them.
    """

    addresses: Mapping[str, str]
    workspace: Path
    honest: Sequence[str]
    job_json: str
    page_link: str
    attacks: Sequence[str]


def play(places: Places, is_on: Any, has_rested: Any, is_over: Any, told: Any) -> None:
    """Attacks while `is_on` is set, until `is_over` is. Puts the number of each outcome into `told` before and after.

    Sets `has_rested` when its calls have ended and its jobs are cancelled, so that it costs nobody anything.
    """
    os.nice(_LOWEST_PRIORITY)
    raise_open_files()
    attacker = Attacker(places, is_on)
    told.put(attacker.told)
    has_rested.set()
    while not is_over.is_set():
        if is_on.wait(0.2):
            attacker.attack_until_rest()
            has_rested.set()
    told.put(attacker.told)


@dataclass(frozen=True)
class Reach:
    """What the attacker can call.

    Args:
        security: Its credentials, by the name in the certificate.
        channels: Channels to every service, by the name in the certificate and the name of the service.
    """

    places: Places
    security: Mapping[str, Security]
    channels: Mapping[tuple[str, str], grpc.Channel]


class Attacker:
    """Attacks the services with the certificates that it has."""

    def __init__(self, places: Places, is_on: Any) -> None:
        self.told: Counter[str] = Counter()
        self._places = places
        self._is_on = is_on
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def attack_until_rest(self) -> None:
        """Runs all attacks side by side, each again and again."""
        certificates = Workspace(self._places.workspace).certificates
        security = {name: certificates.security(name) for name in _NAMES}
        with ExitStack() as owned:
            channels = {
                (name, target): owned.enter_context(open_channel(address, each, for_weights=True))
                for name, each in security.items()
                for target, address in self._places.addresses.items()
            }
            reach = Reach(self._places, security, channels)
            threads = [
                threading.Thread(target=self._repeat, args=(attack, reach))
                for attack in ATTACKS
                if attack.__name__ in self._places.attacks or not self._places.attacks
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            cancel_own_jobs(reach)

    def _repeat(self, attack: "Attack", reach: Reach) -> None:
        while self._is_on.is_set():
            for name, call in attack(reach, next(self._numbers)):
                if not self._is_on.is_set():
                    break
                try:
                    outcomes = call() or ["OK"]
                except grpc.RpcError as error:
                    outcomes = [error.code().name]
                except OSError as error:
                    outcomes = [type(error).__name__]
                with self._lock:
                    self.told.update(f"{name}: {outcome}" for outcome in outcomes)


Calls = Iterator[tuple[str, Callable[[], Sequence[str] | None]]]
"""Calls and their names. A call may return its outcomes."""

Attack = Callable[[Reach, int], Calls]
"""Makes calls. It gets a number that no earlier call had."""


def hostile_documents(job_json: str, number: int) -> Iterator[tuple[str, str]]:
    """Yields jobs that must cost nobody anything, each with its name."""
    changes: Mapping[str, Sequence[tuple[str, Any]]] = {
        "pattern": [("model.lora", {"r": 2, "target_modules": "([a-z.]+|[a-z0-9.]+)+X"})],
        "20,000 layers": [("model.config.num_hidden_layers", 20_000)],
        "no layers": [("model.config.num_hidden_layers", 0)],
        "no heads": [("model.config.num_attention_heads", 0)],
        "norm of nan": [("model.config.layer_norm_eps", float("nan"))],
        "range of 1e38": [("model.config.initializer_range", 1e38)],
        "vocabulary of 1e12": [("model.vocabulary_size", 10**12)],
        "large model that is allowed": [
            ("model.config.hidden_size", 512),
            ("model.config.num_hidden_layers", 32),
            ("model.config.intermediate_size", 2048),
        ],
        "noise of 1e200": [("privacy", {"noise_multiplier": 1e200, "clip_norm": 1.0})],
        "endless data": [("data.train", ["/dev/zero"])],
        "data from a pipe": [("data.train", [str(_pipe_of(job_json))])],
        "data of the system": [("data.train", ["../../../../../../etc/shadow"])],
        "absent cluster": [("use_clusters", [9])],
        "text of 250 kB": [("name", "x" * 250_000)],
        "text of 1 MB": [("name", "x" * 1_000_000)],
    }
    for name, changed in changes.items():
        document = json.loads(job_json)
        document["name"] = f"attack-{number}"
        for place, value in changed:
            *path, last = place.split(".")
            section = document
            for part in path:
                section = section[part]
            section[last] = value
        yield name, json.dumps(document)
    yield "deep document", "[" * 100_000
    yield "no document", "\0" * 1000


def _pipe_of(job_json: str) -> Path:
    """Returns a pipe to which nobody writes, beside the data of the job."""
    pipe = Path(json.loads(job_json)["data"]["train"][0]).parent / "pipe.jsonl"
    with suppress(FileExistsError):
        os.mkfifo(pipe)
    return pipe


def submit_hostile_jobs(reach: Reach, number: int) -> Calls:
    """Submits what must be refused or must wait, and cancels it after some seconds. Then submits many jobs."""
    stub: Any = SchedulerServiceStub(reach.channels[_CLIENT.name, "scheduler"])

    def submit_and_cancel(text: str) -> None:
        request = scheduler_pb2.SubmitJobRequest(config_json=text)
        job_id = stub.SubmitJob(request, timeout=_CALL_SECONDS).job_id
        time.sleep(3)
        stub.CancelJob(scheduler_pb2.CancelJobRequest(job_id=job_id), timeout=_CALL_SECONDS)

    for name, text in hostile_documents(reach.places.job_json, number):
        yield f"job with {name}", partial(submit_and_cancel, text)
    yield from submit_many_jobs(reach, number)


def submit_many_jobs(reach: Reach, number: int) -> Calls:
    """Submits jobs as fast as possible, and cancels all when the server takes no more."""
    stub: Any = SchedulerServiceStub(reach.channels[_CLIENT.name, "scheduler"])
    ids = []

    def submit(index: int) -> None:
        document = {**json.loads(reach.places.job_json), "name": f"many-{number}-{index}"}
        request = scheduler_pb2.SubmitJobRequest(config_json=json.dumps(document))
        ids.append(stub.SubmitJob(request, timeout=_CALL_SECONDS).job_id)

    try:
        for index in range(100):
            yield "one of 100 jobs at once", partial(submit, index)
    finally:
        for job_id in ids:
            with suppress(grpc.RpcError):
                stub.CancelJob(scheduler_pb2.CancelJobRequest(job_id=job_id), timeout=_CALL_SECONDS)


def cancel_own_jobs(reach: Reach) -> None:
    """Cancels the jobs of the attacker, however long its calls have to wait."""
    stub: Any = SchedulerServiceStub(reach.channels[_CLIENT.name, "scheduler"])
    while True:
        with suppress(grpc.RpcError):
            jobs = stub.ListJobs(scheduler_pb2.ListJobsRequest(), timeout=_CALL_SECONDS).jobs
            own = [
                job for job in jobs if job.owner == str(_CLIENT) and not job.HasField("ended_at")
            ]
            if not own:
                return
            for job in own:
                request = scheduler_pb2.CancelJobRequest(job_id=job.job_id)
                stub.CancelJob(request, timeout=_CALL_SECONDS)
        time.sleep(1.0)


def touch_jobs_of_others(reach: Reach, number: int) -> Calls:
    """Cancels, deletes, rolls back, exports and uses the jobs of others, with both certificates."""
    for name in _NAMES:
        stub: Any = SchedulerServiceStub(reach.channels[name, "scheduler"])
        edge: Any = EdgeServerServiceStub(reach.channels[name, "edge-server"])
        for job_id in reach.places.honest:
            cancel = scheduler_pb2.CancelJobRequest(job_id=job_id)
            delete = scheduler_pb2.DeleteJobRequest(job_id=job_id)
            back = scheduler_pb2.RollBackJobRequest(job_id=job_id, num_rounds=1)
            export = edge_server_pb2.ExportModelRequest(job_id=job_id)
            for what, method, request in (
                ("to cancel", stub.CancelJob, cancel),
                ("to delete", stub.DeleteJob, delete),
                ("to roll back", stub.RollBackJob, back),
                ("to export", edge.ExportModel, export),
            ):
                yield f"{_FORBIDDEN} {what} as {name}", partial(_call, method, request)
        prepare = edge_server_pb2.PrepareJobRequest()
        yield f"{_FORBIDDEN} to prepare as {name}", partial(_call, edge.PrepareJob, prepare)


def _call(method: Any, request: Any) -> None:
    answer = method(request, timeout=_CALL_SECONDS)
    if isinstance(answer, Iterator):
        _read(answer)


def _read(answers: Iterator[Any]) -> None:
    for _ in answers:
        pass


def read_without_end(reach: Reach, number: int) -> Calls:
    """Reads what every client may read, as fast as possible."""
    stub: Any = SchedulerServiceStub(reach.channels[_CLIENT.name, "scheduler"])
    for job_id in reach.places.honest:
        for method, kind in (
            (stub.GetJobSnapshot, scheduler_pb2.GetJobSnapshotRequest),
            (stub.ReplayDecision, scheduler_pb2.ReplayDecisionRequest),
            (stub.ExplainDecision, scheduler_pb2.ExplainDecisionRequest),
            (stub.GetRecords, scheduler_pb2.GetRecordsRequest),
            (stub.DumpJob, scheduler_pb2.DumpJobRequest),
            (stub.GetTrace, scheduler_pb2.GetTraceRequest),
        ):
            name = kind.__name__.removesuffix("Request")
            yield name, partial(_call, method, kind(job_id=job_id))


def watch_many_times(reach: Reach, number: int) -> Calls:
    """Watches the jobs of others 200 times at once, for some seconds."""
    stub: Any = SchedulerServiceStub(reach.channels[_CLIENT.name, "scheduler"])
    calls = [
        stub.WatchJob(scheduler_pb2.WatchJobRequest(job_id=job_id), timeout=10.0)
        for job_id in reach.places.honest
        for _ in range(100)
    ]
    try:
        for call in calls:
            yield "watching a job", partial(_read, call)
    finally:
        for call in calls:
            call.cancel()


def send_garbage(reach: Reach, number: int) -> Calls:
    """Sends random messages to every method with both certificates."""
    for method in all_methods():
        service = method.containing_service
        roles = PERMISSIONS[service.full_name][method.name]
        targets = {"SchedulerService": "scheduler", "EdgeServerService": "edge-server"}
        targets["ControlUnitService"] = "control-unit-0"
        target = targets.get(service.name, "device-0-0")
        if service.name == "EnrollmentService" or method.name == "WatchJob":
            continue
        for name in _NAMES:
            role = Role.CLIENT if name == _CLIENT.name else Role.DEVICE_AGENT
            reopen = partial(
                open_channel, reach.places.addresses[target], reach.security[name], for_weights=True
            )
            inputs = RandomInputs(
                f"{number} {name} {method.full_name}", [*reach.places.honest, _BOX]
            )
            calls = RandomCalls(reach.channels[name, target], reopen, method, inputs)

            def take_turn(calls: RandomCalls) -> list[str]:
                calls.take_turn()
                return list(calls.outcome.codes.elements())

            permitted = "permitted" if role in roles else "not permitted"
            yield f"garbage as {name}, {permitted}", partial(take_turn, calls)


def keep_connections_idle(reach: Reach, number: int) -> Calls:
    """Opens 1,100 connections to each of three services, and sends nothing."""

    def keep() -> None:
        with ExitStack() as owned:
            for target in ("scheduler", "edge-server", "device-0-0"):
                owned.callback(Strangers(reach.places.addresses[target], _IDLE).close)
            time.sleep(20.0)

    yield f"{_IDLE} idle connections to each of three services", keep


def flood_the_page(reach: Reach, number: int) -> Calls:
    """Opens connections to the page in the browser, with half of a request, a large one, or none."""
    address = reach.places.page_link.split("//")[1].split("/")[0]
    host, _, port = address.rpartition(":")

    def ask(text: bytes) -> None:
        with socket.create_connection((host, int(port)), 2.0) as connection:
            connection.sendall(text)
            connection.settimeout(2.0)
            connection.recv(1 << 16)

    for text in (
        b"GET / HTTP/1.1\r\n",
        b"GET /?" + b"x" * 100_000,
        b"\r\n" * 1000,
        os.urandom(1000),
    ):
        yield "page", partial(ask, text)


def shake_hands_slowly(reach: Reach, number: int) -> Calls:
    """Begins a handshake of TLS and does not go on with it."""
    host, _, port = reach.places.addresses["scheduler"].rpartition(":")

    def begin() -> None:
        with ExitStack() as owned:
            for _ in range(100):
                connection = owned.enter_context(socket.create_connection((host, int(port)), 2.0))
                connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
            time.sleep(2.0)

    yield "100 slow handshakes", begin


class _LyingTelemetry(TelemetryServiceServicer):
    """Tells of 10,000 metrics with labels that nobody has told before."""

    def GetMetrics(
        self, request: telemetry_pb2.GetMetricsRequest, context: grpc.ServicerContext
    ) -> telemetry_pb2.GetMetricsResponse:
        answer = telemetry_pb2.GetMetricsResponse()
        for _ in range(10_000):
            labels = {"cluster": uuid.uuid4().hex, "stage": "0", "peer": uuid.uuid4().hex}
            answer.samples.add(
                name="collapipe_stage_samples_total", labels=labels, value=float("inf")
            )
        return answer


def register_again(reach: Reach, number: int) -> Calls:
    """Registers the box as a new process whose telemetry lies, and as the hosts of others."""
    stub: Any = SchedulerServiceStub(reach.channels[_BOX, "scheduler"])

    def register(host_id: str, cluster: int, seconds: float) -> None:
        process = uuid.uuid4().hex
        server = serve(
            "127.0.0.1:0",
            reach.security[_BOX],
            lambda server, _: add_TelemetryServiceServicer_to_server(_LyingTelemetry(), server),
            process=process,
        )
        try:
            host = scheduler_pb2.Host(
                host_id=host_id,
                role=scheduler_pb2.HOST_ROLE_DEVICE_AGENT,
                address=server.address,
                cluster_index=cluster,
                incarnation=process,
            )
            stub.RegisterHost(scheduler_pb2.RegisterHostRequest(host=host), timeout=_CALL_SECONDS)
            time.sleep(seconds)
        finally:
            server.drain(0.0)

    yield "box as a new process", partial(register, _BOX, _CLUSTER, 10.0)
    yield f"{_FORBIDDEN} to register another host", partial(register, "device-0-0", 0, 0.0)
    yield f"{_FORBIDDEN} to register in another cluster", partial(register, _BOX, 0, 0.0)


def flood_probes(reach: Reach, number: int) -> Calls:
    """Sends bytes to the honest hosts, as a probe of a link does."""
    for name in reach.places.addresses:
        if name == "scheduler" or name in _OF_ATTACKER:
            continue
        stub: Any = LinkServiceStub(reach.channels[_BOX, name])

        def send(stub: Any) -> None:
            chunk = link_pb2.ReceiveProbeRequest(host_id=_BOX, chunk=bytes(1 << 20))
            for _ in stub.ReceiveProbe(itertools.repeat(chunk, 200), timeout=_CALL_SECONDS):
                pass

        yield "probe without an end", partial(send, stub)


def train(reach: Reach, number: int) -> Calls:
    """Trains a job of its own on its own cluster, as it may."""
    stub: Any = SchedulerServiceStub(reach.channels[_CLIENT.name, "scheduler"])

    def run() -> None:
        document = {**json.loads(reach.places.job_json), "name": f"own-{number}"}
        request = scheduler_pb2.SubmitJobRequest(config_json=json.dumps(document))
        job_id = stub.SubmitJob(request, timeout=_CALL_SECONDS).job_id
        time.sleep(20.0)
        stub.CancelJob(scheduler_pb2.CancelJobRequest(job_id=job_id), timeout=_CALL_SECONDS)

    yield "job of its own", run


ATTACKS: Sequence[Attack] = (
    submit_hostile_jobs,
    touch_jobs_of_others,
    read_without_end,
    watch_many_times,
    send_garbage,
    keep_connections_idle,
    flood_the_page,
    shake_hands_slowly,
    register_again,
    flood_probes,
    train,
)

if __name__ == "__main__":
    sys.exit(main())
