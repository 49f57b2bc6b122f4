"""One cluster and an edge server in one process, with real gRPC. A test chooses the plan of each round."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
from safetensors.torch import load_file
from torch import Tensor

from collapipe.control_unit.recorded_rows import RecordedRows
from collapipe.control_unit.servicer import ControlUnitServicer
from collapipe.edge_server.commit_store import CommitStore
from collapipe.edge_server.servicer import EdgeServerServicer
from collapipe.job import JobConfig
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.stage_host import HostResources, StageServicer
from collapipe.stage_runtime import CPU
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.v1 import (
    blob_pb2_grpc,
    control_unit_pb2_grpc,
    edge_server_pb2_grpc,
    stage_pb2_grpc,
)
from collapipe.v1.control_unit_pb2 import PrepareDataRequest, RoundPrepared, RunRoundRequest
from collapipe.v1.edge_server_pb2 import CommitRoundRequest, PrepareJobRequest
from collapipe.v1.job_pb2 import JobSpec
from collapipe.v1.plan_pb2 import Attempt, Commit, LinkPlan, Plan, Stage
from collapipe.v1.tensor_pb2 import CODEC_FP32
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import JobStores
from collapipe.weights.transfer import BlobServicer

PLAIN = Security.insecure()
JOB_ID = "job"
SECONDS = 120.0

Ranges = Sequence[tuple[str, int, int]]
"""A pipeline: host, first unit, one past the last unit."""
ALL = 5
"""Units of the tiny models: embedding, 3 blocks, head."""
SPREAD: Ranges = [("control-unit-0", 0, 1), ("device-0-0", 1, 4), ("edge-server", 4, ALL)]
ON_TWO_HOSTS: Ranges = [("control-unit-0", 0, 3), ("device-0-0", 3, ALL)]
ON_THE_DEVICE: Ranges = [("control-unit-0", 0, 0), ("device-0-0", 0, ALL)]
ON_THE_CONTROL_UNIT: Ranges = [("control-unit-0", 0, ALL)]
ON_FOUR_HOSTS: Ranges = [
    ("control-unit-0", 0, 1),
    ("device-0-0", 1, 2),
    ("device-0-1", 2, 4),
    ("edge-server", 4, ALL),
]


@dataclass
class Cluster:
    """The hosts, the last commit, and the results of the rounds."""

    job: JobConfig
    folder: Path
    channels: ChannelPool = field(default_factory=lambda: ChannelPool(PLAIN))
    addresses: dict[str, str] = field(default_factory=dict)
    resources: dict[str, HostResources] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    pushed: list[dict[str, int]] = field(default_factory=list)
    fetched: list[dict[str, int]] = field(default_factory=list)
    """For each round, the bytes that each host pushed to the edge server, and that it fetched before."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """What the cluster counted on its held-out rows."""
    commit: Commit = field(default_factory=Commit)
    num_units: int = 0
    _runs: int = 0
    _previous: list[Stage] = field(default_factory=list)
    _candidate_stages: list[Stage] = field(default_factory=list)
    _running: dict[str, ExitStack] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Starts or restarts a host. Its memory is empty, and its disk is as before."""
        self.stop(name)
        owned = self._running[name] = ExitStack()
        stores = None if name.startswith("device") else JobStores(self.folder / name)
        links = OutgoingLinks.unlimited(name)
        resources = HostResources(CPU, self.channels, links, BlobCache(), stores)

        def add_services(server: grpc.Server, address: str) -> None:
            blob_pb2_grpc.add_BlobServiceServicer_to_server(
                BlobServicer(resources.find_blob, links), server
            )
            if stores is not None and name.startswith("control"):
                control_unit_pb2_grpc.add_ControlUnitServiceServicer_to_server(
                    ControlUnitServicer(
                        resources, stores, RecordedRows(self.folder / name), address
                    ),
                    server,
                )
                return
            stage_pb2_grpc.add_StageServiceServicer_to_server(StageServicer(resources), server)
            if stores is not None:
                edge_server_pb2_grpc.add_EdgeServerServiceServicer_to_server(
                    EdgeServerServicer(stores, CommitStore(self.folder / name), resources), server
                )

        server = serve("127.0.0.1:0", PLAIN, add_services)
        owned.callback(server.drain, 0)
        self.addresses[name] = server.address
        self.resources[name] = resources

    def stop(self, name: str) -> None:
        """Ends a host, if it runs."""
        if name in self._running:
            self._running.pop(name).close()

    def prepare(self) -> None:
        """Loads the data and finds the restore point, as at the beginning of a job or when it resumes."""
        spec = JobSpec(job_id=JOB_ID, config_json=self.job.to_json())
        request = PrepareDataRequest(job=spec)
        if self._runs:
            request.vocabulary.CopyFrom(
                self._vocabulary
            )  # as the scheduler does when a job resumes
        data = _last(self.control_unit().PrepareData(request, timeout=SECONDS))
        # The scheduler orders labels in the same way.
        self._labels = sorted(data.labels, key=lambda label: (label != "O", label))
        self._vocabulary = data.vocabulary
        request = PrepareJobRequest(
            job=spec, labels=self._labels, vocabulary=data.vocabulary, host_clusters=[0]
        )
        prepared = _last(self._edge_server().PrepareJob(request, timeout=SECONDS))
        self.last_commit = prepared.commit
        self._restore_point = prepared.commit.restore_point
        self.commit, self._model = self._restore_point, prepared.model
        self._runs += 1
        self._previous = []
        del self.losses[self.commit.num_rounds * self.job.training.local_steps :]
        self.num_units = prepared.num_blocks + 2

    def run_round(
        self,
        ranges: Ranges,
        *,
        evaluate: bool = False,
        train: bool = True,
        change: Callable[[RunRoundRequest], None] = lambda request: None,
    ) -> None:
        """Runs a round and commits it, or only evaluates.

        Args:
            change: Changes the request before it is sent.
        """
        attempt = Attempt(
            job_id=JOB_ID,
            round_index=self.commit.num_rounds,
            attempt=self._runs - 1,
            plan_id="plan",
        )
        is_candidate = (self.commit.num_rounds + 1) % self.job.training.replicate_every == 0
        stages = [
            Stage(
                host_id=host,
                address=self.addresses[host],
                start_unit=start,
                stop_unit=stop,
                in_flight=len(ranges) - index,
            )
            for index, (host, start, stop) in enumerate(ranges)
        ]
        plan = Plan(
            plan_id="plan",
            num_micro_batches=self.job.schedule.num_micro_batches,
            stages=stages,
            links=[LinkPlan(codec=CODEC_FP32)] * (len(stages) - 1),
        )
        request = RunRoundRequest(
            attempt=attempt,
            job=JobSpec(job_id=JOB_ID, config_json=self.job.to_json()),
            model=self._model,
            plan=plan,
            base=self.commit.clusters[0],
            labels=self._labels,
            local_steps=self.job.training.local_steps if train else 0,
            evaluate=evaluate,
            previous_stages=self._previous,
            edge_address=self.addresses["edge-server"],
            vocabulary=self._vocabulary,
            restore_point=self._restore_point.clusters[0],
            restore_num_rounds=self._restore_point.num_rounds,
            total_steps=self.job.total_steps,
            wait_for_copy=is_candidate or not train,
        )
        if self.commit.HasField("candidate"):
            request.candidate.CopyFrom(self.commit.candidate.clusters[0])
            request.candidate_stages.extend(self._candidate_stages)
        change(request)
        prepared: RoundPrepared | None = None
        for response in self.control_unit().RunRound(request, timeout=SECONDS):
            if response.HasField("evaluation"):
                self.evaluations.append(dict(response.evaluation.sums))
            if response.HasField("prepared"):
                prepared = response.prepared
        assert prepared is not None
        self._previous = stages
        sent = prepared.summary.pushed
        assert all(0 < each.seconds <= prepared.summary.gather_seconds for each in sent)
        self.pushed.append({each.host_id: each.bytes for each in sent})
        fetched = prepared.summary.fetched
        assert all(0 < each.seconds <= prepared.summary.configure_seconds for each in fetched)
        self.fetched.append({each.host_id: each.bytes for each in fetched})
        if train:
            self.losses += prepared.summary.losses
            commit = CommitRoundRequest(
                attempt=attempt,
                clusters=[prepared.state],
                candidate_copied=prepared.candidate_copied,
                is_candidate=is_candidate,
            )
            if is_candidate:
                self._candidate_stages = stages
            self.commit = _last(self._edge_server().CommitRound(commit, timeout=SECONDS)).commit
            self._restore_point = self.commit.restore_point

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights of the global model from the disk of the edge server."""
        return self._load("edge-server", [u.weights_digest for u in self.commit.global_units])

    def optimizer_state(self) -> dict[str, Tensor]:
        """Returns the optimizer state from the disk of the control unit, which must have copied it."""
        units = self.commit.clusters[0].units
        digests = [unit.optimizer_digest for unit in units if unit.optimizer_digest]
        return self._load("control-unit-0", digests)

    def held_units(self, name: str) -> list[int]:
        """Returns the indices of the units that a host has in memory."""
        clusters: Any = self.resources[name]._units_of_clusters
        return sorted(unit for units in clusters.values() for unit in units._units)

    def close(self) -> None:
        self.channels.close()
        for name in list(self._running):
            self.stop(name)

    def _load(self, name: str, digests: Sequence[str]) -> dict[str, Tensor]:
        blobs = self.folder / name / "jobs" / JOB_ID / "blobs"
        tensors: dict[str, Tensor] = {}
        for digest in digests:
            tensors |= load_file(blobs / digest)
        return tensors

    def control_unit(self) -> Any:
        channel = self.channels.channel(self.addresses["control-unit-0"])
        return control_unit_pb2_grpc.ControlUnitServiceStub(channel)

    def _edge_server(self) -> Any:
        channel = self.channels.channel(self.addresses["edge-server"])
        return edge_server_pb2_grpc.EdgeServerServiceStub(channel)


def _last(responses: Iterator[Any]) -> Any:
    """Returns the last response of a call, after the signs of life."""
    return list(responses)[-1]


class MakeCluster(Protocol):
    """Starts the hosts of a job. Clusters of one test have different names."""

    def __call__(self, job: JobConfig, name: str = "state") -> Cluster: ...
