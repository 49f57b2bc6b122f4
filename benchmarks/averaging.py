"""Compares a round of federated averaging with its floor and with Flower, and measures the memory of the edge server.

    python -m benchmarks.averaging                     # both sections
    python -m benchmarks.averaging rounds --flower DIR # also measures Flower; see benchmarks/flower.py
    python -m benchmarks.averaging memory

`rounds`: two clients with the 22.7 M fp32 parameters of MiniLM, 91 MB for each client and direction, on loopback.
All three systems run alternately.

- CollaPipe: two clusters with `vanilla_fl`, one mini-batch of two rows, plain SGD. What counts is the time from the
  moment when the first cluster has trained until both clusters are configured with the average. It contains
  pushes, hashes, the average, the commit with its syncs to disk, the next plan, and fetches.
- The floor: two processes send the same bytes over gRPC in messages of 1 MiB to a third one. That one computes
  their mean with NumPy and sends it back. Nothing is hashed or stored.
- Flower: FedAvg with two supernodes whose clients return the parameters unchanged. What counts is the time
  from the first message of a round to its average: the same transfers, but down before up. Without --flower, it is
  left out.

`memory`: as many clients as clusters push the same model to a real edge server at the same time, and the round is
committed. What counts is the peak of its resident memory above its value before the job.
"""

import argparse
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
import torch

from benchmarks.flower import Flower
from benchmarks.memory import make_job, reset_peak, resident_bytes
from collapipe.job import JobConfig
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.rpc.options import COMMON_OPTIONS, SERVER_OPTIONS
from collapipe.service_process import tune_allocator
from collapipe.tasks import load_task
from collapipe.v1 import blob_pb2_grpc, edge_server_pb2, edge_server_pb2_grpc, job_pb2, plan_pb2
from collapipe.weights.blob_store import BlobStore, StoredBlob
from collapipe.weights.tensor_blob import TensorBlob, load_tensors
from collapipe.weights.transfer import BlobServicer, fetch_blob, push_unit
from collapipe_client import CollaPipeClient, LocalTestbed
from collapipe_client.trace_file import HostTrace, read_hosts

CLIENTS = 2
PARAMETERS = 22_700_000
ROUNDS = 4
"""Rounds of a job of CollaPipe. The first one is not counted."""
FLOWER_ROUNDS = 3
"""Rounds of a federation of Flower. The first one is not counted."""
CHUNK_BYTES = 1 << 20
CLUSTERS = (2, 8, 32)
SILENCE_SECONDS = 60.0


def rounds(directory: Path, repetitions: int, flower_directory: Path | None) -> None:
    """Measures all three systems alternately."""
    seconds: dict[str, list[float]] = {"floor": [], "CollaPipe": []}
    with ExitStack() as stack:
        floor = stack.enter_context(Floor())
        testbed = stack.enter_context(
            LocalTestbed([1] * CLIENTS, directory / "testbed", insecure=True)
        )
        client = stack.enter_context(testbed.client())
        flower = None
        if flower_directory is None:
            print("without Flower: --flower does not say where it is installed")
        else:
            flower = stack.enter_context(Flower(flower_directory, directory, PARAMETERS, CLIENTS))
            seconds["Flower"] = []
        job = make_small_round(directory)
        floor.round_seconds()
        for _ in range(repetitions):
            seconds["floor"] += [floor.round_seconds() for _ in range(ROUNDS)]
            seconds["CollaPipe"] += collapipe_seconds(client, job)
            if flower is not None:
                seconds["Flower"] += flower.round_seconds(FLOWER_ROUNDS)
    for name, each in seconds.items():
        print(
            f"{name}: median {statistics.median(each):.2f} s ({min(each):.2f} to {max(each):.2f}, {len(each)} rounds)"
        )
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"CollaPipe takes {medians['CollaPipe'] / medians['floor']:.2f} times the floor")
    if flower is not None:
        print(f"Flower takes {medians['Flower'] / medians['CollaPipe']:.1f} times CollaPipe")


def make_small_round(directory: Path) -> JobConfig:
    """Makes a job of the whole MiniLM whose rounds train as little as possible."""
    document = make_job(directory, small=False).model_dump()
    document |= {"name": "averaging", "clusters": CLIENTS, "devices_per_cluster": 1}
    document["task"]["max_length"] = 8
    document["data"]["max_held_out_rows"] = 2
    document["training"] |= {
        "rounds": ROUNDS,
        "local_steps": 1,
        "mini_batch": 2,
        "evaluate_every": 0,
        "optimizer": "sgd",
        "clip_norm": 0.0,
        "replicate_every": 100,
    }
    document["schedule"] |= {"strategy": "vanilla_fl", "num_micro_batches": 1}
    return JobConfig.model_validate(document)


def collapipe_seconds(client: CollaPipeClient, job: JobConfig) -> list[float]:
    """Runs a job, and returns the time of each round but the first from training to the next configuration."""
    job_id = client.submit(job)
    for event in client.watch(job_id):
        if event.HasField("status") and event.status.message:
            message = event.status.message
    if client.find_job(job_id).num_rounds_committed < job.training.rounds:
        raise SystemExit(f"the job did not run to its end: {message}")
    # The evaluation of the final model is a round of its own, which fetches the last average.
    traces = [
        read_hosts(client.trace(job_id, index)) for index in range(1, job.training.rounds + 1)
    ]
    return [
        max(_ends(after, "configure")) - min(_ends(before, "train"))
        for before, after in itertools.pairwise(traces)
    ]


def _ends(hosts: Sequence[HostTrace], name: str) -> list[float]:
    """Returns when the span `name` has ended in each control unit, on the clock of the scheduler."""
    return [
        host.on_common_clock(span.ended_seconds)
        for host in hosts
        for span in host.spans
        if host.host_id.startswith("control-unit") and span.name == name
    ]


class Floor:
    """A server that averages, and two client processes that send and receive."""

    def __enter__(self) -> "Floor":
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._processes = [context.Process(target=_serve_floor, args=(there,))]
        self._processes[0].start()
        self._server, address = here, here.recv()
        self._clients: list[Connection] = []
        for _ in range(CLIENTS):
            here, there = context.Pipe()
            process = context.Process(target=_run_floor_client, args=(there, address))
            process.start()
            self._processes.append(process)
            self._clients.append(here)
        for connection in self._clients:
            connection.recv()
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in (*self._clients, self._server):
            connection.send(False)
        for process in self._processes:
            process.join()

    def round_seconds(self) -> float:
        """Runs a round, and returns the time until both clients have the mean."""
        started = time.perf_counter()
        for connection in self._clients:
            connection.send(True)
        for connection in self._clients:
            connection.recv()
        return time.perf_counter() - started


def _serve_floor(pipe: Connection) -> None:
    tune_allocator()
    received = [np.empty(PARAMETERS, np.float32) for _ in range(CLIENTS)]
    mean = np.empty(PARAMETERS, np.float32)

    def average() -> None:
        np.add(received[0], received[1], out=mean)
        np.multiply(mean, np.float32(1 / CLIENTS), out=mean)

    all_received = threading.Barrier(CLIENTS, average)

    def exchange(chunks: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        _fill(received[int(next(chunks))], chunks)
        all_received.wait()
        yield from _chunks(mean)

    server = grpc.server(ThreadPoolExecutor(CLIENTS), options=SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(exchange)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("Floor", {"Exchange": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(f"127.0.0.1:{port}")
    pipe.recv()
    server.stop(0).wait()


def _run_floor_client(pipe: Connection, address: str) -> None:
    tune_allocator()
    weights = np.full(PARAMETERS, 0.5, np.float32)
    index = b"0" if multiprocessing.current_process().name.endswith("2") else b"1"
    with grpc.insecure_channel(address, [*COMMON_OPTIONS, ("grpc.enable_retries", 0)]) as channel:
        exchange = channel.stream_stream("/Floor/Exchange")

        def requests() -> Iterator[bytes]:
            yield index
            yield from _chunks(weights)

        pipe.send(True)
        while pipe.recv():
            _fill(weights, exchange(requests()))
            pipe.send(True)


def _chunks(values: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> Iterator[bytes]:
    data = memoryview(values).cast("B")
    for start in range(0, len(data), CHUNK_BYTES):
        yield bytes(data[start : start + CHUNK_BYTES])


def _fill(values: "np.ndarray[tuple[int], np.dtype[np.float32]]", chunks: Iterator[bytes]) -> None:
    data, position = memoryview(values).cast("B"), 0
    for chunk in chunks:
        data[position : position + len(chunk)] = chunk
        position += len(chunk)
    if position != len(data):
        raise ValueError(f"{position} of {len(data)} bytes arrived")


def memory(directory: Path) -> None:
    """Measures the peak of the edge server's memory while it averages 2, 8 and 32 clusters."""
    job = make_small_round(directory)
    for clusters in CLUSTERS:
        peak = _edge_server_peak(
            job.model_copy(update={"clusters": clusters}), directory / f"{clusters}"
        )
        print(f"{clusters:2} clusters: {peak / 1e6:.0f} MB", flush=True)


def _edge_server_peak(job: JobConfig, workspace: Path) -> int:
    """Prepares a job, averages one round of it, and returns the peak above the memory before the round."""
    channels = ChannelPool(Security.insecure())
    with LocalTestbed([], workspace, insecure=True) as testbed:
        _prepare(job, channels, _address(testbed), workspace / "vocabulary")
    # A new process serves the round, because the initial model leaves free memory behind in the old one.
    with LocalTestbed([], workspace, insecure=True) as testbed:
        commit, units = _prepare(job, channels, _address(testbed), workspace / "vocabulary")
        (pid,) = [one.pid for one in testbed.processes if one.name == "edge-server"]
        base = resident_bytes(pid, "VmRSS")
        reset_peak(pid)
        attempt = plan_pb2.Attempt(job_id=commit.job_id, plan_id="memory")
        with ThreadPoolExecutor(job.clusters) as threads:
            states = threads.map(
                lambda cluster: _push(cluster, attempt, units, channels, _address(testbed)),
                range(job.clusters),
            )
            request = edge_server_pb2.CommitRoundRequest(attempt=attempt, clusters=states)
        stub = edge_server_pb2_grpc.EdgeServerServiceStub(channels.channel(_address(testbed)))
        *_, answer = stub.CommitRound(request)
        if answer.commit.num_rounds != 1:
            raise SystemExit("the edge server has not committed the round")
        peak = resident_bytes(pid, "VmHWM")
    channels.close()
    return peak - base


def _prepare(
    job: JobConfig, channels: ChannelPool, edge: str, directory: Path
) -> tuple[plan_pb2.Commit, list[dict[str, torch.Tensor]]]:
    """Lets the edge server make the initial model, if it has none. Returns its commit and the tensors of each unit."""
    task = load_task(job, 0, None)
    store = BlobStore(directory)
    digest = store.put_bytes(task.vocabulary)
    server = serve(
        "127.0.0.1:0",
        Security.insecure(),
        lambda server, _: blob_pb2_grpc.add_BlobServiceServicer_to_server(
            BlobServicer(lambda digest: StoredBlob(store, digest)), server
        ),
    )
    request = edge_server_pb2.PrepareJobRequest(
        job=job_pb2.JobSpec(job_id="memory", config_json=job.to_json()),
        labels=task.labels,
        vocabulary=job_pb2.BlobSource(digest=digest, address=server.address),
    )
    stub = edge_server_pb2_grpc.EdgeServerServiceStub(channels.channel(edge))
    *_, answer = stub.PrepareJob(request)
    server.drain(0)
    units = [
        load_tensors(fetch_blob(channels, unit.weights_digest, [edge]))
        for unit in answer.commit.global_units
    ]
    return answer.commit, units


def _push(
    cluster: int,
    attempt: plan_pb2.Attempt,
    units: Sequence[dict[str, torch.Tensor]],
    channels: ChannelPool,
    edge: str,
) -> plan_pb2.ClusterState:
    """Pushes all units of a cluster, whose weights differ from those of every other one."""
    state = plan_pb2.ClusterState(cluster_index=cluster, num_samples=1 + cluster)
    for index, tensors in enumerate(units):
        blob = TensorBlob(
            {
                name: tensor + cluster if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()
            }
        )
        unit = edge_server_pb2.PushedUnit(
            attempt=attempt,
            cluster_index=cluster,
            unit_index=index,
            total_bytes=blob.total_bytes,
            num_samples=state.num_samples,
        )
        push_unit(channels, edge, unit, blob, SILENCE_SECONDS)
        state.units.add(unit_index=index, weights_digest=blob.digest)
    return state


def _address(testbed: LocalTestbed) -> str:
    (address,) = [one.address for one in testbed.processes if one.name == "edge-server"]
    return address


def main(arguments: Sequence[str] = ()) -> None:
    """Runs the given sections. The default is both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[[], "rounds", "memory"], default=[])
    parser.add_argument("--flower", type=Path, help="folder in which Flower is installed")
    parser.add_argument("--repetitions", type=int, default=3)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        if "rounds" in (chosen.sections or ["rounds"]):
            rounds(Path(name), chosen.repetitions, chosen.flower)
        if "memory" in (chosen.sections or ["memory"]):
            memory(Path(name))


if __name__ == "__main__":
    main(sys.argv[1:])
