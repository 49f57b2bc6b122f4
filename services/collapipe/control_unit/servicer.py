"""ControlUnitService: loads data, runs rounds."""

import threading
from collections.abc import Callable, Iterator

import grpc

from collapipe.control_unit.cluster_pipeline import ClusterPipeline
from collapipe.control_unit.cluster_round import ClusterRound, Emit
from collapipe.errors import CancelledError, NotFoundError, WrongStateError
from collapipe.job import JobConfig
from collapipe.rpc import work_with_signs_of_life
from collapipe.stage_host import HostResources
from collapipe.tasks import Task, load_task
from collapipe.v1 import control_unit_pb2, control_unit_pb2_grpc, job_pb2, plan_pb2
from collapipe.weights.blob_store import JobStores
from collapipe.weights.transfer import store_blob


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
        self._latest: dict[str, tuple[int, int]] = {}

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
                store_blob(store, self._resources.channels, source.digest, [source.address])
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
        attempt = _Attempt()

        def work(emit: Emit) -> None:
            with self._running:  # the attempt before was given up by its caller, and ends
                self._fence(request.attempt, context)
                attempt.begin(self._open(request))
                attempt.run(emit)

        yield from work_with_signs_of_life(work, attempt.progress, attempt.abort, context)

    def _fence(self, attempt: plan_pb2.Attempt, context: grpc.ServicerContext) -> None:
        """Refuses an attempt that nobody waits for any more, or that is not newer than the last."""
        if not context.is_active():
            raise CancelledError("the caller went away before the attempt began")
        job_id, order = attempt.job_id, (attempt.round_index, attempt.attempt)
        if order <= self._latest.get(job_id, (-1, -1)):
            raise WrongStateError(
                f"round {order[0]}, attempt {order[1]} of job {job_id} is not newer than round "
                f"{self._latest[job_id][0]}, attempt {self._latest[job_id][1]}, which ran here already"
            )
        self._latest[job_id] = order

    def _open(
        self, request: control_unit_pb2.RunRoundRequest
    ) -> tuple[ClusterPipeline, ClusterRound]:
        job_id = request.attempt.job_id
        task = self._tasks.get(job_id)
        if task is None:
            raise NotFoundError(
                f"{self._resources.host_id} has no data loaded for job {job_id}: it was restarted; "
                "resume the job"
            )
        job = JobConfig.from_json(request.job.config_json)
        task.set_labels(list(request.labels))
        store = self._stores.store(job_id)
        units = request.base.units
        kept = {digest for unit in units for digest in (unit.weights_digest, unit.optimizer_digest)}
        store.keep_only(kept | {request.vocabulary.digest})
        pipeline = ClusterPipeline(request, job, self._resources, store, self._address)
        directory = self._stores.directory(job_id)
        return pipeline, ClusterRound(request, job, task, pipeline, directory)


class _Attempt:
    """A call of RunRound, which may be cancelled before it has its turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: tuple[ClusterPipeline, ClusterRound] | None = None
        self._reason: CancelledError | None = None

    def begin(self, opened: tuple[ClusterPipeline, ClusterRound]) -> None:
        with self._lock:
            self._opened = opened
        if self._reason is not None:
            opened[0].abort(self._reason)

    def run(self, emit: Emit) -> None:
        assert self._opened is not None
        self._opened[1].run(emit)

    def abort(self, reason: CancelledError) -> None:
        with self._lock:
            self._reason = reason
        if self._opened is not None:
            self._opened[0].abort(reason)

    def progress(self) -> control_unit_pb2.RunRoundResponse:
        if self._opened is not None:
            return self._opened[1].progress()
        waiting = job_pb2.RoundProgress(waiting_for="the attempt before to end")
        return control_unit_pb2.RunRoundResponse(progress=waiting)
