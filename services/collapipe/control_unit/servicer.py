"""ControlUnitService: loads data, runs rounds."""

import threading
from collections.abc import Callable, Iterator

import grpc

from collapipe.control_unit.cluster_pipeline import ClusterPipeline
from collapipe.control_unit.cluster_round import ClusterRound
from collapipe.errors import NotFoundError, WrongStateError
from collapipe.job import JobConfig
from collapipe.rpc import work_with_signs_of_life
from collapipe.stage_service import HostResources, fetch_blob
from collapipe.storage import JobStores
from collapipe.tasks import Task, load_task
from collapipe.v1 import control_unit_pb2, control_unit_pb2_grpc, job_pb2

_HAND_OVER_SECONDS = 30.0
"""How long a new attempt waits for the one before to end."""


class ControlUnitServicer(control_unit_pb2_grpc.ControlUnitServiceServicer):
    """Serves one cluster.

    Args:
        resources: Of this host.
        stores: The blobs of each job.
        address: Where this host serves.
    """

    def __init__(
        self,
        resources: HostResources,
        stores: JobStores,
        address: str,
    ) -> None:
        self._resources = resources
        self._stores = stores
        self._address = address
        self._tasks: dict[str, Task] = {}
        self._running = threading.Lock()

    def PrepareData(
        self, request: control_unit_pb2.PrepareDataRequest, context: grpc.ServicerContext
    ) -> Iterator[control_unit_pb2.PrepareDataResponse]:
        """Loads the cluster's data."""

        def work(emit: Callable[[control_unit_pb2.PrepareDataResponse], None]) -> None:
            job = JobConfig.from_json(request.job.config_json)
            store = self._stores.store(request.job.job_id)
            vocabulary = None
            if request.HasField("vocabulary"):
                source = request.vocabulary
                if source.digest not in store:
                    data = fetch_blob(self._resources.channels, source.digest, [source.address])
                    store.put(source.digest, [data])
                vocabulary = b"".join(store.read(source.digest))
            task = load_task(job, request.cluster_index, vocabulary)
            self._tasks = {request.job.job_id: task}
            digest = store.put_bytes(task.vocabulary)
            emit(
                control_unit_pb2.PrepareDataResponse(
                    num_rows=task.num_rows,
                    labels=task.labels,
                    vocabulary=job_pb2.BlobSource(digest=digest, address=self._address),
                    num_held_out_rows=task.num_held_out_rows,
                )
            )

        yield from work_with_signs_of_life(
            work, control_unit_pb2.PrepareDataResponse, lambda reason: None, context
        )

    def RunRound(
        self, request: control_unit_pb2.RunRoundRequest, context: grpc.ServicerContext
    ) -> Iterator[control_unit_pb2.RunRoundResponse]:
        """Runs one attempt at a round."""
        job_id = request.attempt.job_id
        task = self._tasks.get(job_id)
        if task is None:
            raise NotFoundError(
                f"{self._resources.host_id} has no data loaded for job {job_id}: it was restarted; "
                "resume the job"
            )
        if not self._running.acquire(timeout=_HAND_OVER_SECONDS):
            raise WrongStateError(
                f"{self._resources.host_id} still runs an older attempt: try again in a moment"
            )
        try:
            job = JobConfig.from_json(request.job.config_json)
            task.set_labels(list(request.labels))
            store = self._stores.store(job_id)
            kept = {
                digest
                for u in request.base.units
                for digest in (u.weights_digest, u.optimizer_digest)
            }
            store.collect(kept | {request.vocabulary.digest})
            pipeline = ClusterPipeline(request, job, self._resources, store, self._address)
            attempt = ClusterRound(request, job, task, pipeline, self._stores.directory(job_id))
            yield from work_with_signs_of_life(
                attempt.run, attempt.progress, pipeline.abort, context
            )
        finally:
            self._running.release()
