"""Measures a scheduler that many hosts use: heartbeats, hosts that come and go, and a reconnection of all at once.

    python -m benchmarks.load --hosts 1000 --seconds 120

The scheduler is a real process. This process imitates the hosts: each has a TCP connection of its own, over loopback, and
sends a heartbeat at the interval that the scheduler asks for. Every second, one host in 200 registers again as a new process.
No host trains, so no plan is made and no stream is open.

Prints one JSON object: times in ms, and the memory in MB and the threads of the scheduler at a quarter of the time and at the end.
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
from pathlib import Path
from typing import Any

import grpc

from collapipe.v1 import scheduler_pb2, scheduler_pb2_grpc

_HOSTS_PER_CLUSTER = 10
_CHURN_PER_SECOND = 1 / 200
_CALL_SECONDS = 30.0


class ImitatedHost:
    """A host that only registers and sends heartbeats."""

    def __init__(self, number: int, scheduler: str) -> None:
        self._host = scheduler_pb2.Host(
            host_id=f"device-{number}",
            role=scheduler_pb2.HOST_ROLE_DEVICE_AGENT,
            address=f"10.0.0.1:{number + 1}",
            cluster_index=number // _HOSTS_PER_CLUSTER,
        )
        self._scheduler = scheduler
        self._channel: grpc.aio.Channel | None = None
        self.heartbeat_seconds: list[float] = []
        self.failures = 0

    async def connect(self) -> float:
        """Opens a new connection, and registers as a new process. Returns the interval of heartbeats in seconds."""
        if self._channel is not None:
            await self._channel.close()
        # Otherwise all channels of a process share one connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(self._scheduler, options)
        self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._host.incarnation = uuid.uuid4().hex
        request = scheduler_pb2.RegisterHostRequest(host=self._host)
        answer = await self._stub.RegisterHost(request, timeout=_CALL_SECONDS, wait_for_ready=True)
        return float(answer.heartbeat_interval.ToTimedelta().total_seconds())

    async def run(self, until: float, interval: float) -> None:
        """Sends heartbeats. Some hosts register again instead."""
        await asyncio.sleep(random.uniform(0, interval))
        while time.monotonic() < until:
            started = time.monotonic()
            try:
                if random.random() < _CHURN_PER_SECOND * interval:
                    await self.connect()
                else:
                    request = scheduler_pb2.HeartbeatRequest(
                        host_id=self._host.host_id, incarnation=self._host.incarnation
                    )
                    await self._stub.Heartbeat(request, timeout=_CALL_SECONDS)
                    self.heartbeat_seconds.append(time.monotonic() - started)
            except grpc.aio.AioRpcError:
                self.failures += 1
            await asyncio.sleep(max(0.0, interval - (time.monotonic() - started)))


async def reconnect(hosts: list[ImitatedHost]) -> tuple[float, float]:
    """Registers all hosts at once. Returns the seconds until the last one is registered, and the heartbeats' interval."""
    started = time.monotonic()
    intervals = await asyncio.gather(*(host.connect() for host in hosts))
    return time.monotonic() - started, intervals[0]


async def load(scheduler: str, pid: int, num_hosts: int, seconds: float) -> dict[str, Any]:
    """Runs the load, and returns what it measured."""
    hosts = [ImitatedHost(number, scheduler) for number in range(num_hosts)]
    first_seconds, interval = await reconnect(hosts)
    until = time.monotonic() + seconds
    running = [asyncio.create_task(host.run(until, interval)) for host in hosts]
    await asyncio.sleep(seconds / 4)
    early = process_size(pid)
    await asyncio.gather(*running)
    late = process_size(pid)
    storm_seconds, _ = await reconnect(hosts)
    times = [1000 * each for host in hosts for each in host.heartbeat_seconds]
    percentiles = statistics.quantiles(times, n=1000)
    return {
        "hosts": num_hosts,
        "heartbeats": len(times),
        "failures": sum(host.failures for host in hosts),
        "heartbeat_ms": {
            "median": round(percentiles[499], 1),
            "p99": round(percentiles[989], 1),
            "longest": round(max(times), 1),
        },
        "all_register_ms": round(1000 * first_seconds),
        "all_reconnect_ms": round(1000 * storm_seconds),
        "scheduler_early": early,
        "scheduler_late": late,
    }


def process_size(pid: int) -> dict[str, int]:
    """Returns the resident memory in MB, and the number of threads."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {"memory_mb": int(status["VmRSS"].split()[0]) // 1024, "threads": int(status["Threads"])}


def main() -> None:
    """Starts a scheduler and puts the load on it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        line = [sys.executable, "-m", "collapipe.scheduler", "--insecure", "--listen=127.0.0.1:0"]
        line += [f"--state-dir={folder}/state", f"--ready-file={ready}"]
        with subprocess.Popen(line, stderr=subprocess.DEVNULL) as scheduler:
            try:
                while not ready.exists():
                    time.sleep(0.1)
                address = json.loads(ready.read_text())["address"]
                work = load(address, scheduler.pid, options.hosts, options.seconds)
                print(json.dumps(asyncio.run(work), indent=2))
            finally:
                scheduler.terminate()


if __name__ == "__main__":
    main()
