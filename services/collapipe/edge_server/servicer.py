"""Implements EdgeServerService: prepares jobs, commits rounds and exports models."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from collapipe.edge_server.global_model import GlobalModel
from collapipe.errors import CancelledError
from collapipe.job import JobConfig
from collapipe.models import adapter_for
from collapipe.rpc import ChannelPool, work_with_signs_of_life
from collapipe.telemetry import metrics
from collapipe.tensors import CHUNK_BYTES
from collapipe.v1 import edge_server_pb2, edge_server_pb2_grpc
from collapipe.weights.blob_store import JobStores
from collapipe.weights.transfer import store_blob


class EdgeServerServicer(edge_server_pb2_grpc.EdgeServerServiceServicer):
    """Serves the global models of all jobs, one change at a time."""

    def __init__(self, stores: JobStores, channels: ChannelPool) -> None:
        self._stores = stores
        self._channels = channels
        self._changing = threading.Lock()

    def PrepareJob(
        self, request: edge_server_pb2.PrepareJobRequest, context: grpc.ServicerContext
    ) -> Iterator[edge_server_pb2.PrepareJobResponse]:
        """Makes the initial model of a job, or finds its last commit."""

        def work(emit: Callable[[edge_server_pb2.PrepareJobResponse], None]) -> None:
            job_id, source = request.job.job_id, request.vocabulary
            with self._changing:
                store = self._stores.store(job_id)
                store_blob(store, self._channels, source.digest, source.address)
                model = self._model(job_id)
                job = JobConfig.from_json(request.job.config_json)
                vocabulary = store.read_checked(source.digest)
                model.prepare(job_id, job, list(request.labels), vocabulary)
                spec, num_blocks = model.model_spec()
                commit = model.commit()
                answer = edge_server_pb2.PrepareJobResponse(
                    commit=commit,
                    model=spec,
                    num_blocks=num_blocks,
                    hidden_size=adapter_for(
                        spec.family, spec.task, spec.config_json
                    ).config.hidden_size,
                    unit_bytes=[
                        store.total_bytes(unit.weights_digest) for unit in commit.global_units
                    ],
                )
            emit(answer)

        yield from work_with_signs_of_life(
            work, edge_server_pb2.PrepareJobResponse, _finish_anyway, context
        )

    def CommitRound(
        self, request: edge_server_pb2.CommitRoundRequest, context: grpc.ServicerContext
    ) -> Iterator[edge_server_pb2.CommitRoundResponse]:
        """Averages the prepared states of all clusters and commits the result."""
        job_id = request.attempt.job_id
        store = self._stores.store(job_id)

        def fetch(cluster: edge_server_pb2.PreparedCluster) -> None:
            for unit in cluster.state.units:
                store_blob(store, self._channels, unit.weights_digest, cluster.address)

        def fetch_all() -> None:
            with ThreadPoolExecutor(len(request.clusters), "upload") as executor:
                list(executor.map(fetch, request.clusters))

        def work(emit: Callable[[edge_server_pb2.CommitRoundResponse], None]) -> None:
            clusters = [cluster.state for cluster in request.clusters]
            with self._changing:
                # The caller may have gone while this request waited for the lock.
                if not context.is_active():
                    raise CancelledError("the caller went away before the commit began")
                started = time.perf_counter()
                commit = self._model(job_id).commit_round(request.attempt, clusters, fetch_all)
                metrics.AGGREGATION_SECONDS.observe(time.perf_counter() - started)
            emit(edge_server_pb2.CommitRoundResponse(commit=commit))

        yield from work_with_signs_of_life(
            work, edge_server_pb2.CommitRoundResponse, _finish_anyway, context
        )

    def ExportModel(
        self, request: edge_server_pb2.ExportModelRequest, context: grpc.ServicerContext
    ) -> Iterator[edge_server_pb2.ExportModelResponse]:
        """Sends the files of the trained model, one after the other."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)

            def work(emit: Callable[[edge_server_pb2.ExportModelResponse], None]) -> None:
                with self._changing:  # A commit would delete the blobs that the export reads.
                    self._model(request.job_id).export(directory)

            yield from work_with_signs_of_life(
                work, edge_server_pb2.ExportModelResponse, _finish_anyway, context
            )
            for path in sorted(directory.iterdir()):
                yield edge_server_pb2.ExportModelResponse(
                    file_name=path.name, total_bytes=path.stat().st_size
                )
                with open(path, "rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield edge_server_pb2.ExportModelResponse(chunk=chunk)

    def _model(self, job_id: str) -> GlobalModel:
        return GlobalModel(self._stores.directory(job_id), self._stores.store(job_id))


def _finish_anyway(reason: CancelledError) -> None:
    """Lets the work finish although the caller has gone: if the caller asks again, it is done already."""
