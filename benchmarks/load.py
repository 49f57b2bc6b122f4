"""Puts the load of many hosts and clients on a scheduler and an edge server.

    python -m benchmarks.load --hosts 1000 --seconds 120

The scheduler and the edge server are real processes, and run a real job: one cluster for ten devices, the strategy `dssra`,
and a BERT of ten tiny blocks. The hosts are imitated (benchmarks/imitated_clusters.py says how): the scheduler measures,
plans, scrapes and commits as always, and the edge server runs the heads of all clusters and averages what they push. What
the devices would compute is left out, so a round takes its ten steps of two seconds and the time of both services.

Meanwhile, over loopback:

- Every host has a TCP connection of its own, and sends a heartbeat at the interval that the scheduler asks for.
- Each cluster has one more device, which no plan uses. Some of these register again as new processes: one host in 200 of all
  hosts in each second.
- 200 clients watch the job, from a third process.
- In the middle, all hosts open new connections and register again at once. Heartbeats of these seconds, and of the five seconds
  after, are counted apart.

All processes share this machine, so the times contain what they take from each other. Prints one JSON object: times in ms,
memory in MB, and the threads of both services at a quarter of the time and at the end. `plan_ms` is the time from a commit to
the start of the next round. `part_ms` divides the rounds. `configure`, `steps` and `push` are those of the slowest cluster of each
round. `services` is what is left: from the decision to the calls of the clusters, and from the last result to the commit. The exit
status is 1 if a call or an attempt at a round failed.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from benchmarks.imitated_clusters import DEVICES_PER_CLUSTER, HOSTS_PER_CLUSTER, address_of
from collapipe.job import JobConfig
from collapipe.rpc.options import TELLS_VERSIONS
from collapipe.v1 import job_pb2, scheduler_pb2, scheduler_pb2_grpc

_CHURN_PER_SECOND = 1 / 200
_CALL_SECONDS = 30.0
_START_SECONDS = 600.0
_BLOCKS = 10
_AFTER_STORM_SECONDS = 5.0


class ImitatedHost:
    """The part of a host that registers and sends heartbeats.

    Args:
        position: Place in the cluster: 0 is the control unit, and the last one is the device that comes and goes.
        port: That of the imitated clusters.
    """

    def __init__(self, cluster_index: int, position: int, scheduler: str, port: int) -> None:
        is_device = position > 0
        role = "device" if is_device else "control-unit"
        self._host = scheduler_pb2.Host(
            host_id=f"{role}-{cluster_index}" + (f"-{position}" if is_device else ""),
            role=scheduler_pb2.HOST_ROLE_DEVICE_AGENT
            if is_device
            else scheduler_pb2.HOST_ROLE_CONTROL_UNIT,
            address=address_of(cluster_index, position, port),
            cluster_index=cluster_index,
            incarnation=uuid.uuid4().hex,
        )
        self._scheduler = scheduler
        self.comes_and_goes = position == HOSTS_PER_CLUSTER - 1
        self._one_call = asyncio.Lock()
        self.heartbeats: list[tuple[float, float]] = []
        """When each one was sent, and the seconds until its answer."""
        self.failures: Counter[str] = Counter()

    async def connect(self, *, is_new_process: bool = False) -> float:
        """Opens a new connection, and registers. Returns the interval of heartbeats in seconds."""
        async with self._one_call:
            # Otherwise all channels of a process share one connection.
            options = [TELLS_VERSIONS, ("grpc.use_local_subchannel_pool", 1)]
            # The former channel is closed here, as soon as nothing refers to it. Its method `close` would look at all tasks.
            self._channel = grpc.aio.insecure_channel(self._scheduler, options)
            self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
            if is_new_process:
                self._host.incarnation = uuid.uuid4().hex
            request = scheduler_pb2.RegisterHostRequest(host=self._host)
            answer = await self._stub.RegisterHost(
                request, timeout=_CALL_SECONDS, wait_for_ready=True
            )
        return seconds_of(answer.heartbeat_interval)

    async def run(self, interval: float) -> None:
        """Sends heartbeats until it is cancelled. A host that comes and goes sometimes registers again instead."""
        await asyncio.sleep(random.uniform(0, interval))
        while True:
            started = time.monotonic()
            churn = _CHURN_PER_SECOND * interval * HOSTS_PER_CLUSTER if self.comes_and_goes else 0.0
            try:
                if random.random() < churn:
                    interval = await self.connect(is_new_process=True)
                else:
                    request = scheduler_pb2.HeartbeatRequest(
                        host_id=self._host.host_id, incarnation=self._host.incarnation
                    )
                    async with self._one_call:
                        began = time.monotonic()
                        answer = await self._stub.Heartbeat(request, timeout=_CALL_SECONDS)
                        interval = seconds_of(answer.heartbeat_interval)
                        self.heartbeats.append((began, time.monotonic() - began))
            except grpc.aio.AioRpcError as error:
                self.failures[f"{error.code().name}: {error.details()}"] += 1
            await asyncio.sleep(max(0.0, interval - (time.monotonic() - started)))


async def connect_all(hosts: Sequence[ImitatedHost]) -> tuple[float, float]:
    """Registers all hosts at once. Returns the seconds until the last one is registered, and the heartbeats' interval."""

    async def register(host: ImitatedHost) -> float:
        while True:
            try:
                return await host.connect()
            except grpc.aio.AioRpcError as error:
                host.failures[f"{error.code().name}: {error.details()}"] += 1

    started = time.monotonic()
    intervals = await asyncio.gather(*map(register, hosts))
    return time.monotonic() - started, intervals[0]


class RoundTimes:
    """Watches the job until its end, and keeps what a round took."""

    def __init__(self) -> None:
        self.first_round = asyncio.Event()
        self.plan_seconds: list[float] = []
        self.round_seconds: list[float] = []
        self.part_seconds: defaultdict[str, list[float]] = defaultdict(list)
        """What the slowest cluster of each round took for each part, and what is left of the round."""
        self.failures: list[str] = []
        self._committed_at: float | None = None

    async def watch(self, stub: Any, job_id: str) -> None:
        async for event in stub.WatchJob(scheduler_pb2.WatchJobRequest(job_id=job_id)):
            kind = event.WhichOneof("event")
            if kind == "round_started":
                self.first_round.set()
                if self._committed_at is not None:
                    self.plan_seconds.append(event.elapsed_seconds - self._committed_at)
            elif kind == "round_committed":
                self._committed_at = event.elapsed_seconds
                self._add(event.round_committed)
            elif kind == "incident" and event.incident.code in (
                scheduler_pb2.INCIDENT_CODE_ATTEMPT_FAILED,
                scheduler_pb2.INCIDENT_CODE_JOB_GIVEN_UP,
            ):
                self.failures.append(event.incident.message)
                self._committed_at = None

    def _add(self, committed: scheduler_pb2.RoundCommitted) -> None:
        self.round_seconds.append(committed.round_seconds)
        slowest = max(committed.summaries, key=_seconds, default=job_pb2.RoundSummary())
        self.part_seconds["configure"].append(slowest.configure_seconds)
        self.part_seconds["steps"].append(slowest.training_seconds)
        self.part_seconds["push"].append(slowest.gather_seconds)
        self.part_seconds["services"].append(committed.round_seconds - _seconds(slowest))


def _seconds(summary: job_pb2.RoundSummary) -> float:
    return summary.configure_seconds + summary.training_seconds + summary.gather_seconds


async def watch_as_many(scheduler: str, job_id: str, num_watchers: int) -> None:
    """Watches a job with many clients, until it ends. Prints what they saw, as JSON. A message may have a batch of events."""
    longest, num_messages, num_failures = 0.0, 0, 0

    async def watch() -> None:
        nonlocal longest, num_messages, num_failures
        options = [TELLS_VERSIONS, ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(scheduler, options) as channel:
            # These clients leave the events as they are. So this process takes little time of the machine.
            call: Any = channel.unary_stream(
                "/collapipe.v1.SchedulerService/WatchJob",
                scheduler_pb2.WatchJobRequest.SerializeToString,
            )
            before = time.monotonic()
            try:
                async for _ in call(scheduler_pb2.WatchJobRequest(job_id=job_id)):
                    longest = max(longest, time.monotonic() - before)
                    before = time.monotonic()
                    num_messages += 1
            except grpc.aio.AioRpcError:
                num_failures += 1

    await asyncio.gather(*(watch() for _ in range(num_watchers)))
    seen = {
        "watchers": num_watchers,
        "messages": num_messages,
        "failures": num_failures,
        "longest_silence_ms": round(1000 * longest),
    }
    print(json.dumps(seen))


async def load(
    scheduler: dict[str, Any],
    edge_server: dict[str, Any],
    port: int,
    job: JobConfig,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Runs the load, and returns what it measured.

    Args:
        scheduler: The ready file of the scheduler.
        edge_server: That of the edge server.
        port: That of the imitated clusters.
    """
    address = scheduler["address"]
    hosts = [
        ImitatedHost(cluster_index, position, address, port)
        for cluster_index in range(job.clusters)
        for position in range(HOSTS_PER_CLUSTER)
    ]
    # The job takes the devices that registered first, and those that come and go are not among them.
    staying = [host for host in hosts if not host.comes_and_goes]
    first_seconds, interval = await connect_all(staying)
    await connect_all([host for host in hosts if host.comes_and_goes])
    running = [asyncio.create_task(host.run(interval)) for host in hosts]
    rounds = RoundTimes()
    async with grpc.aio.insecure_channel(address, [TELLS_VERSIONS]) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        submitted = time.monotonic()
        answer = await stub.SubmitJob(scheduler_pb2.SubmitJobRequest(config_json=job.to_json()))
        watching = asyncio.create_task(rounds.watch(stub, answer.job_id))
        starting = asyncio.create_task(rounds.first_round.wait())
        await asyncio.wait(
            {watching, starting}, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if not starting.done():
            raise RuntimeError(f"no round began: {rounds.failures}")
        start_seconds = time.monotonic() - submitted
        line = [sys.executable, "-m", "benchmarks.load", f"--watch={answer.job_id}"]
        line += [f"--scheduler={address}", f"--watchers={options.watchers}"]
        watchers = await asyncio.create_subprocess_exec(*line, stdout=subprocess.PIPE)
        for host in hosts:
            host.heartbeats.clear()
        await asyncio.sleep(options.seconds / 4)
        early = process_size(scheduler["pid"]), process_size(edge_server["pid"])
        await asyncio.sleep(options.seconds / 4)
        storm_began = time.monotonic()
        storm_seconds, _ = await connect_all(hosts)
        storm_ended = storm_began + storm_seconds + _AFTER_STORM_SECONDS
        await asyncio.sleep(options.seconds / 2)
        late = process_size(scheduler["pid"]), process_size(edge_server["pid"])
        heartbeats = [each for host in hosts for each in host.heartbeats]
        storm, others = list[float](), list[float]()
        for at, took in heartbeats:
            (storm if storm_began - took <= at <= storm_ended else others).append(took)
        failures = sum((host.failures for host in hosts), Counter[str]())
        if not watching.done():
            await stub.CancelJob(scheduler_pb2.CancelJobRequest(job_id=answer.job_id))
        await watching
        seen, _ = await watchers.communicate()
        for task in running:
            task.cancel()
    return {
        "hosts": len(hosts),
        "clusters": job.clusters,
        "seconds": options.seconds,
        "failures": failures.total(),
        "most_common_failures": dict(failures.most_common(10)),
        "failed_attempts": rounds.failures,
        "heartbeats": len(heartbeats),
        "heartbeat_ms": distribution(others),
        "storm_heartbeat_ms": distribution(storm),
        "rounds": len(rounds.round_seconds),
        "round_ms": distribution(rounds.round_seconds),
        "part_ms": {part: distribution(each) for part, each in rounds.part_seconds.items()},
        "plan_ms": distribution(rounds.plan_seconds),
        "watching": json.loads(seen),
        "all_register_ms": round(1000 * first_seconds),
        "first_round_ms": round(1000 * start_seconds),
        "all_reconnect_ms": round(1000 * storm_seconds),
        "scheduler_early": early[0],
        "scheduler_late": late[0],
        "edge_server_early": early[1],
        "edge_server_late": late[1],
    }


def seconds_of(interval: Duration) -> float:
    return float(interval.ToTimedelta().total_seconds())


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median, the 99th percentile and the largest of some times, in ms. It is empty without two times."""
    if len(seconds) < 2:
        return {}
    percentiles = statistics.quantiles(seconds, n=1000, method="inclusive")
    chosen = {"median": percentiles[499], "p99": percentiles[989], "longest": max(seconds)}
    return {name: round(1000 * value, 1) for name, value in chosen.items()}


def process_size(pid: int) -> dict[str, int]:
    """Returns the resident memory in MB, and the number of threads."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {"memory_mb": int(status["VmRSS"].split()[0]) // 1024, "threads": int(status["Threads"])}


def make_job(folder: Path, num_clusters: int) -> JobConfig:
    """Returns a job of many rounds with a tiny model, and writes its rows."""
    data = folder / "rows.jsonl"
    rows = ({"text": f"row {n} is {n % 7} times good", "label": str(n % 2)} for n in range(400))
    data.write_text("\n".join(map(json.dumps, rows)))
    return JobConfig.model_validate(
        {
            "name": "load",
            "clusters": num_clusters,
            "devices_per_cluster": DEVICES_PER_CLUSTER,
            "task": {"kind": "classification", "max_length": 16},
            "data": {"train": str(data)},
            "model": {
                "vocabulary_size": 300,
                "config": {
                    "hidden_size": 16,
                    "num_attention_heads": 2,
                    "intermediate_size": 32,
                    "num_hidden_layers": _BLOCKS,
                },
            },
            "training": {
                "rounds": 1_000_000,
                "local_steps": 10,
                "mini_batch": 2,
                "clip_norm": 0,
                "evaluate_every": 0,
            },
            "schedule": {"strategy": "dssra", "num_micro_batches": 2},
        }
    )


@contextmanager
def started(folder: Path, name: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """Starts a process, and returns its ready file. Ends it afterwards. Its log is in the folder."""
    ready = folder / f"{name}.json"
    line = [sys.executable, "-m", name, f"--ready-file={ready}", *arguments]
    with open(folder / f"{name}.log", "wb") as log, subprocess.Popen(line, stderr=log) as process:
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise RuntimeError((folder / f"{name}.log").read_text())
                time.sleep(0.1)
            yield json.loads(ready.read_text())
        finally:
            process.terminate()


def main() -> None:
    """Starts the services and puts the load on them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--watchers", type=int, default=200)
    parser.add_argument("--watch", default="", help=argparse.SUPPRESS)
    parser.add_argument("--scheduler", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        asyncio.run(watch_as_many(options.scheduler, options.watch, options.watchers))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, *arguments: str) -> dict[str, Any]:
            return stack.enter_context(started(folder, name, *arguments))

        plain = ("--insecure", "--listen=127.0.0.1:0")
        clusters = start("benchmarks.imitated_clusters")
        scheduler = start("collapipe.scheduler", *plain, f"--state-dir={folder}/scheduler")
        edge_server = start(
            "collapipe.edge_server",
            *plain,
            f"--scheduler={scheduler['address']}",
            f"--state-dir={folder}/edge",
        )
        job = make_job(folder, options.hosts // DEVICES_PER_CLUSTER)
        found = asyncio.run(load(scheduler, edge_server, clusters["port"], job, options))
    print(json.dumps(found, indent=2))
    if found["failures"] or found["failed_attempts"] or found["watching"]["failures"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
