"""Compares with torch's own pipeline, and measures whole rounds, on two sides of a slow link.

    python -m benchmarks.two_machines                  # both sections; needs root, iproute2 and two cores
    python -m benchmarks.two_machines throughput --rates 0 100 50 20 --codec int8
    python -m benchmarks.two_machines rounds --rates 20

Each side is a network namespace of this machine with a core of its own. Control unit and device 0 are on one side;
device 1, edge server, scheduler and client on the other. `tbf` limits each direction of the link to so many Mbit/s; 0
means no limit. All traffic between the sides passes this link: activations, weights, control and telemetry. The model is
MiniLM (22.7 M parameters) without dropout, and a mini-batch has 32 rows of 64 tokens in 8 micro-batches.

`throughput`: samples a second in training, against 1F1B of `torch.distributed.pipelining` over gloo on the same cut.
Both run alternately, for as many steps.
`rounds`: the phases of whole rounds of 10 steps, with each codec of uploads, and with LoRA. The least time is what the weights of the
first side need on the link.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collapipe_client.testbed_processes import Device, Service, command, services
from collapipe_client.workspace import Workspace

BLOCKS = [3, 3]
ROWS, TOKENS, MICRO_BATCHES, LABELS = 32, 64, 8, 4
NEAR_SERVICES = ("control-unit-0", "device-0-0")
STEPS_OF_A_ROUND, ROUNDS = 10, 3
WAYS = {
    "uploads fp32": {},
    "uploads int8": {"upload": "int8"},
    "uploads top_k": {"upload": "top_k"},
    "LoRA of rank 8, uploads fp32": {"model": "lora = { r = 8 }"},
}
"""Arguments of `write_job` by the name of the way in which weights are trained and pushed."""
HELD_OUT_ROWS = 4
SENTENCE = "measure every device while it trains its segment of the encoder " * 10
JOB = f"""\
name = "two-machines"
devices_per_cluster = {len(BLOCKS)}

[task]
kind = "classification"
max_length = {TOKENS}

[data]
train = "{{rows}}"
max_held_out_rows = {HELD_OUT_ROWS}

[model]
pretrained = "minilm"
config = {{{{ hidden_dropout_prob = 0.0, attention_probs_dropout_prob = 0.0 }}}}
{{model}}

[training]
rounds = {{rounds}}
local_steps = {{steps}}
mini_batch = {ROWS}
evaluate_every = 0
upload_codecs = ["{{upload}}"]

[schedule]
strategy = "manual"
segments = [{BLOCKS}]
num_micro_batches = {MICRO_BATCHES}
codecs = ["{{codec}}"]
silence_seconds = 60
"""
GLOO_PORT = 23456
START_SECONDS = 120.0


@dataclass(frozen=True)
class Side:
    """One network namespace, with the core that its processes use."""

    namespace: str
    address: str
    core: int

    def start(self, line: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Starts a process on this side."""
        prefix = ["ip", "netns", "exec", self.namespace, "taskset", "-c", str(self.core)]
        return subprocess.Popen([*prefix, *line], text=True, **options)


class TwoMachines:
    """Both sides, with the services of one cluster and the ranks of torch's pipeline."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.near, self.far = stack.enter_context(_namespaces())
        workspace = Workspace(directory / "testbed")
        workspace.create()
        self._scheduler = ""
        for service in services([[Device()] * len(BLOCKS)]):
            self._start_service(service, workspace)
        self._ranks = [self._start_rank(rank) for rank in range(len(BLOCKS) + 2)]
        for rank in self._ranks:
            assert rank.stdout is not None
            if rank.stdout.readline() != "ready\n":
                raise SystemExit(f"torch's pipeline did not start: see the messages in {directory}")

    def limit(self, mbit_per_second: float) -> None:
        """Limits each direction of the link; 0 means no limit."""
        for side in (self.near, self.far):
            begin = f"tc -n {side.namespace} qdisc"
            subprocess.run(f"{begin} del dev eth0 root".split(), stderr=subprocess.DEVNULL)
            if mbit_per_second:
                _run(
                    f"{begin} add dev eth0 root tbf rate {mbit_per_second}mbit burst 32kb latency 100ms"
                )

    def train(self, job: Path) -> list[dict[str, Any]]:
        """Runs a job. Returns the events of its committed rounds."""
        log = self._directory / "client.log"
        line = [
            sys.executable,
            "-m",
            "collapipe_client",
            "train",
            str(job),
            "--json",
            "--insecure",
        ]
        line += ["--scheduler", self._scheduler, "--output", str(self._directory / "model")]
        with log.open("w") as output:
            client = self.far.start(line, stdout=output, stderr=subprocess.STDOUT)
            status = client.wait()
        text = log.read_text()
        if status:
            raise SystemExit(f"the job failed: {text[-2000:]}")
        shutil.rmtree(self._directory / "model")
        return [json.loads(each) for each in text.splitlines() if '"round_committed"' in each]

    def torch_seconds(self, steps: int) -> float:
        """Runs steps of torch's pipeline. Returns the seconds of the slowest rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        return max(float(rank.stdout.readline()) for rank in self._ranks if rank.stdout)

    def _start_service(self, service: Service, workspace: Workspace) -> None:
        side = self.near if service.name in NEAR_SERVICES else self.far
        line = command(
            service,
            workspace,
            ["--insecure"],
            listen=f"{side.address}:0",
            scheduler_address=self._scheduler or None,
        )
        line += ["--metrics-listen", f"{side.address}:0"]
        ready = workspace.ready_file(service.name)
        process = self._own(side, line, service.name)
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((self._directory / f"{service.name}.log").read_text()[-2000:])
            time.sleep(0.1)
        self._scheduler = self._scheduler or json.loads(ready.read_text())["address"]

    def _start_rank(self, rank: int) -> "subprocess.Popen[str]":
        side = self.near if rank < len(NEAR_SERVICES) else self.far
        shape = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
        shape |= {"rows": ROWS, "tokens": TOKENS, "micro_batches": MICRO_BATCHES}
        arguments = json.dumps({"shape": shape, "blocks": BLOCKS, "labels": LABELS})
        environment = os.environ | {
            "MASTER_ADDR": self.near.address,
            "MASTER_PORT": str(GLOO_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        line = [sys.executable, "-m", "benchmarks.torch_pipeline", str(rank), arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return self._own(side, line, f"torch-{rank}", env=environment, **pipes)

    def _own(
        self, side: Side, line: Sequence[str], name: str, **options: Any
    ) -> "subprocess.Popen[str]":
        log = self._stack.enter_context((self._directory / f"{name}.log").open("w"))
        process = side.start(line, **{"stdout": log, "stderr": log} | options)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


def write_job(
    file: Path, *, steps: int, rounds: int = 1, codec: str, upload: str = "fp32", model: str = ""
) -> None:
    """Writes a job file, and beside it rows that are longer than the longest sequence.

    Args:
        model: Another line of the section `model`.
    """
    lines = [
        json.dumps({"text": f"{SENTENCE} {i}", "label": f"label {i % LABELS}"})
        for i in range(ROWS * steps + HELD_OUT_ROWS)
    ]
    rows = file.with_name("rows.jsonl")
    rows.write_text("\n".join(lines) + "\n")
    file.write_text(
        JOB.format(rows=rows, steps=steps, rounds=rounds, codec=codec, upload=upload, model=model)
    )


def throughput(directory: Path, options: argparse.Namespace) -> None:
    """Prints the samples a second of both systems, and the ratio in each pair of runs."""
    steps, samples = options.steps, ROWS * options.steps
    job = directory / "job.toml"
    write_job(job, steps=steps, codec=options.codec)
    with ExitStack() as stack:
        machines = TwoMachines(directory, stack)
        for rate in options.rates:
            machines.limit(rate)
            seconds = []
            for _ in range(options.repetitions + 1):
                (event,) = machines.train(job)
                ours = event["summaries"][0]["training_seconds"]
                seconds.append((ours, machines.torch_seconds(steps)))
            del seconds[0]  # Both load code and make their optimizer states.
            ratios = sorted(theirs / ours for ours, theirs in seconds)
            ours, theirs = (statistics.median(each) for each in zip(*seconds, strict=True))
            print(
                f"{rate or 'no limit':>8} Mbit/s, {options.codec}: {samples / ours:5.1f} samples/s, torch "
                f"{samples / theirs:5.1f}; median ratio {statistics.median(ratios):.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )


def rounds(directory: Path, options: argparse.Namespace) -> None:
    """Prints the phases of every round, and the time besides training against the least that the link allows."""
    with ExitStack() as stack:
        machines = TwoMachines(directory, stack)
        for rate in options.rates:
            machines.limit(rate)
            for way, arguments in WAYS.items():
                print(f"{rate or 'no limit'} Mbit/s, {way}")
                job = directory / "job.toml"
                write_job(
                    job,
                    steps=STEPS_OF_A_ROUND,
                    rounds=ROUNDS,
                    codec=options.codec,
                    **arguments,
                )
                besides, pushed = [], 0
                for event in machines.train(job):
                    summary, total = event["summaries"][0], event["round_seconds"]
                    besides.append(total - summary["training_seconds"])
                    pushes = {push["host_id"]: int(push["bytes"]) for push in summary["pushed"]}
                    pushed = sum(pushes[name] for name in NEAR_SERVICES)
                    print(
                        f"  round of {total:.1f} s: configure {summary['configure_seconds']:.1f}, train "
                        f"{summary['training_seconds']:.1f}, push {summary['gather_seconds']:.1f}; "
                        f"{pushed / 1e6:.1f} MB pushed over the link",
                        flush=True,
                    )
                if rate:
                    least, median = 8 * pushed / (rate * 1e6), statistics.median(besides[1:])
                    print(
                        f"  besides training {median:.1f} s, {median / least:.2f} times the least, {least:.1f} s"
                    )


@contextmanager
def _namespaces() -> Iterator[tuple[Side, Side]]:
    if os.geteuid() or not shutil.which("ip"):
        raise SystemExit("two machines need root and iproute2: run this as root")
    name = os.getpid()
    sides = Side(f"near-{name}", "10.77.0.1", 0), Side(f"far-{name}", "10.77.0.2", 1)
    near, far = (side.namespace for side in sides)
    with ExitStack() as stack:
        for side in sides:
            _run(f"ip netns add {side.namespace}")
            stack.callback(_run, f"ip netns del {side.namespace}")
        _run(f"ip link add eth0 netns {near} type veth peer name eth0 netns {far}")
        for side in sides:
            begin = f"ip -n {side.namespace}"
            _run(f"{begin} addr add {side.address}/24 dev eth0")
            for device in ("lo", "eth0"):
                _run(f"{begin} link set {device} up")
        yield sides


def _run(line: str) -> None:
    subprocess.run(line.split(), check=True)


def main(arguments: Sequence[str] = ()) -> None:
    """Runs a section, or both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[[], "throughput", "rounds"], default=[])
    parser.add_argument("--rates", nargs="+", type=float, default=[0, 100, 50, 20])
    parser.add_argument("--codec", default="fp32", help="codec of the activations")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)
    for section in (throughput, rounds):
        if not options.sections or section.__name__ in options.sections:
            with tempfile.TemporaryDirectory() as directory:
                section(Path(directory), options)


if __name__ == "__main__":
    main(sys.argv[1:])
