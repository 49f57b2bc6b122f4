"""Implements EdgeServerService: prepares jobs, commits rounds, goes back to kept commits, and exports models."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import grpc

from collapipe.edge_server.commit_store import CommitStore
from collapipe.edge_server.global_model import GlobalModel
from collapipe.edge_server.heavy_work import HeavyWork
from collapipe.edge_server.push_stream import PushStream, receive_push
from collapipe.edge_server.pushed_units import PushedUnits, Unmasking
from collapipe.errors import CancelledError, NotFoundError, WrongStateError
from collapipe.job import JobConfig
from collapipe.models import adapter_for
from collapipe.rpc import (
    check_is_owner,
    check_push,
    keep_link_to_caller,
    read_masking_keys,
    work_with_signs_of_life,
)
from collapipe.secure_aggregation.keys import AttemptName
from collapipe.secure_aggregation.unmasking import RemainingMasks
from collapipe.stage_host import HostResources
from collapipe.telemetry import metrics
from collapipe.telemetry.spans import SPANS
from collapipe.tensors import CHUNK_BYTES
from collapipe.v1 import edge_server_pb2, edge_server_pb2_grpc, plan_pb2
from collapipe.weights.blob_store import JobStores
from collapipe.weights.tensor_blob import TensorBlob
from collapipe.weights.transfer import fetch_vocabulary


class EdgeServerServicer(edge_server_pb2_grpc.EdgeServerServiceServicer):
    """Serves the global models of all jobs. A job has one change at a time."""

    def __init__(
        self,
        stores: JobStores,
        commits: CommitStore,
        resources: HostResources,
        heavy_work: HeavyWork | None = None,
    ) -> None:
        self._stores = stores
        self._commits = commits
        self._resources = resources
        self._channels = resources.channels
        resources.keep_unit = self._keep_unit
        self._changing: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        """The lock of each job whose model changes or is read as a whole."""
        self._heavy_work = heavy_work or HeavyWork()
        self._opening = threading.Lock()
        for folder in ("pushed", "exports"):  # An earlier process may have died meanwhile.
            stores.delete(folder)
        self._pushed: dict[str, tuple[frozenset[int], PushedUnits]] = {}
        """What is pushed for each job that trains, and the clusters of the deployment that it has."""

    def PrepareJob(
        self, request: edge_server_pb2.PrepareJobRequest, context: grpc.ServicerContext
    ) -> Iterator[edge_server_pb2.PrepareJobResponse]:
        """Makes the initial model of a job, or finds its last commit."""
        job_id = request.job.job_id
        if request.gives_up:
            self._heavy_work.give_up(job_id)
            return
        content = repr((request.vocabulary.digest, *request.labels))
        # An earlier call, whose connection broke, may make a model of data that have grown since.
        self._heavy_work.give_up(job_id, unless=content)

        gone = threading.Event()

        def refuse_if_gone() -> None:
            if gone.is_set():
                raise _went_away()

        def refuse_if_unwanted() -> None:
            if not self._heavy_work.is_wanted(has_caller=not gone.is_set()):
                raise _went_away()

        def work(emit: Callable[[edge_server_pb2.PrepareJobResponse], None]) -> None:
            def tell(other: str) -> None:
                # An earlier call of this job, whose connection broke, may still make the model.
                other = "" if other == job_id else other
                emit(edge_server_pb2.PrepareJobResponse(waits_for_job_id=other))

            with self._stores.using(job_id):
                store = self._stores.store(job_id)
                vocabulary = fetch_vocabulary(store, self._channels, request.vocabulary)
                model = self._model(job_id)
                turn: AbstractContextManager[None] = nullcontext()
                if not model.is_complete(request.labels, vocabulary):
                    turn = self._heavy_work.turn(job_id, refuse_if_gone, tell, content)
                with turn, self._lock(job_id):
                    job = JobConfig.from_json(request.job.config_json)
                    self._resources.check_files(job)
                    model.prepare(
                        job,
                        list(request.labels),
                        vocabulary,
                        request.owner,
                        refuse_if_unwanted,
                    )
                    answer = _prepared(model)
                    if request.host_clusters:
                        self._expect_pushes(job_id, frozenset(request.host_clusters))
            emit(answer)

        yield from work_with_signs_of_life(
            work, edge_server_pb2.PrepareJobResponse, lambda reason: gone.set(), context
        )

    def CommitRound(
        self, request: edge_server_pb2.CommitRoundRequest, context: grpc.ServicerContext
    ) -> Iterator[edge_server_pb2.CommitRoundResponse]:
        """Commits the averages of what the clusters pushed."""
        job_id = request.attempt.job_id

        def work(emit: Callable[[edge_server_pb2.CommitRoundResponse], None]) -> None:
            with self._stores.using(job_id), self._lock(job_id):
                _refuse_if_alone(context)
                started = time.perf_counter()
                attempt = request.attempt
                SPANS.begin_round(job_id, attempt.round_index, attempt.attempt)
                with SPANS.span("commit", "commit"):
                    pushed = self._pushed_units(job_id)
                    pushed.changes = {}
                    model = self._model(job_id)
                    commit = model.commit_round(
                        request, pushed, _unmasking(request), self._store_moments
                    )
                    pushed.drop(attempt)
                    stored_bytes = model.stored_bytes()
                metrics.AGGREGATION_SECONDS.observe(time.perf_counter() - started)
            emit(
                edge_server_pb2.CommitRoundResponse(
                    commit=commit, stored_bytes=stored_bytes, changes=pushed.changes
                )
            )

        yield from work_with_signs_of_life(
            work, edge_server_pb2.CommitRoundResponse, _finish_anyway, context
        )

    def RollBack(
        self, request: edge_server_pb2.RollBackRequest, context: grpc.ServicerContext
    ) -> Iterator[edge_server_pb2.RollBackResponse]:
        """Makes a kept commit the last one of a job."""

        def work(emit: Callable[[edge_server_pb2.RollBackResponse], None]) -> None:
            with self._stores.using(request.job_id), self._lock(request.job_id):
                _refuse_if_alone(context)
                model = self._model(request.job_id)
                commit = model.roll_back(request.num_rounds, request.attempt)
                stored_bytes = model.stored_bytes()
            emit(edge_server_pb2.RollBackResponse(commit=commit, stored_bytes=stored_bytes))

        yield from work_with_signs_of_life(
            work, edge_server_pb2.RollBackResponse, _finish_anyway, context
        )

    def PushUnit(
        self,
        request_iterator: Iterator[edge_server_pb2.PushUnitRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[edge_server_pb2.PushUnitResponse]:
        """Receives the new weights of one unit of a cluster."""
        security, host_id = self._channels.security, self._resources.host_id

        def begin(unit: edge_server_pb2.PushedUnit) -> PushStream:
            check_push(security, context, unit, host_id)
            keep_link_to_caller(context, self._resources.links)  # It will fetch the averages.
            return self._begin(unit)

        yield from receive_push(request_iterator, begin)

    def _keep_unit(self, unit: edge_server_pb2.PushedUnit, blob: TensorBlob) -> None:
        """Takes the new weights of a unit of this host's own stage."""
        self._begin(unit).take(blob)

    def ExportModel(
        self, request: edge_server_pb2.ExportModelRequest, context: grpc.ServicerContext
    ) -> Iterator[edge_server_pb2.ExportModelResponse]:
        """Sends the files of the trained model, one after the other."""
        with self._stores.using(request.job_id):
            yield from self._export(request, context)

    def _export(
        self, request: edge_server_pb2.ExportModelRequest, context: grpc.ServicerContext
    ) -> Iterator[edge_server_pb2.ExportModelResponse]:
        model = self._model(request.job_id)
        check_is_owner(context, model.owner(), request.job_id)
        # The system's folder for temporary files may be in memory.
        exports = self._stores.directory(request.job_id) / "exports"
        exports.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=exports) as name:
            directory = Path(name)

            def work(emit: Callable[[edge_server_pb2.ExportModelResponse], None]) -> None:
                # A commit would delete the blobs that the export reads.
                with (
                    self._heavy_work.turn(request.job_id, partial(_refuse_if_alone, context)),
                    self._lock(request.job_id),
                ):
                    model.export(directory, merged=request.merged)

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

    def _lock(self, job_id: str) -> threading.Lock:
        """Returns the lock of a job. No other job waits for it."""
        with self._opening:
            lock = self._changing.get(job_id)
            if lock is None:
                lock = self._changing[job_id] = threading.Lock()
            return lock

    def _begin(self, unit: edge_server_pb2.PushedUnit) -> PushStream:
        """Begins a push. Refuses it unless it belongs to the next round of a job that trains."""
        job_id = unit.attempt.job_id
        pushed = self._pushed_units(job_id)
        with self._stores.using(job_id):
            self._model(job_id).check_is_next(unit.attempt)
            return pushed.begin(unit)

    def _store_moments(self, commit: plan_pb2.Commit) -> None:
        """Stores the optimizer states of a commit that are in the memory of this host."""
        store = self._stores.store(commit.job_id)
        for state in (unit for cluster in commit.clusters for unit in cluster.units):
            with suppress(NotFoundError):  # The devices and the control units have the others.
                # Only in this job's units: another job with an equal state may train on while it is read.
                blob = self._resources.held_blob(state.optimizer_digest, job_id=commit.job_id)
                store.put(state.optimizer_digest, blob.read(), is_checked=True)

    def _expect_pushes(self, job_id: str, host_clusters: frozenset[int]) -> None:
        """Lets the clusters push for a job. Drops what they pushed for earlier ones."""
        with self._opening:
            for other, (clusters, pushed) in list(self._pushed.items()):
                if other != job_id and clusters & host_clusters:
                    pushed.close()
                    del self._pushed[other]
            if job_id not in self._pushed:
                model = self._model(job_id)
                pushed = PushedUnits(
                    self._stores.directory(job_id) / "pushed",
                    len(model.commit().clusters),
                    model.unit_bytes(),
                    model.global_weights,
                    model.weights_before,
                    model.averaging(),
                )
                self._pushed[job_id] = host_clusters, pushed

    def _pushed_units(self, job_id: str) -> PushedUnits:
        """Returns what the clusters push for a job that trains."""
        with self._opening:
            if job_id in self._pushed:
                return self._pushed[job_id][1]
            names = ", ".join(sorted(self._pushed)) or "none"
        raise WrongStateError(
            f"a unit of job {job_id!r} cannot be pushed or averaged: the jobs that train here are {names}"
        )

    def _model(self, job_id: str) -> GlobalModel:
        """Returns the model of a job; raises `NotFoundError` if this host has nothing of the job."""
        directory = self._stores.directory(job_id)
        if not directory.is_dir():  # `store` would make it.
            raise NotFoundError(
                f"the edge server does not know job {job_id}: `collapipe jobs list` lists the jobs"
            )
        store = self._stores.store(job_id)
        return GlobalModel(directory, self._commits, store, self._resources.frozen)


def _prepared(model: GlobalModel) -> edge_server_pb2.PrepareJobResponse:
    """Returns what the scheduler needs to know of the model of a job."""
    spec, num_blocks = model.model_spec()
    adapter = adapter_for(spec.family, spec.task, spec.config_json)
    return edge_server_pb2.PrepareJobResponse(
        commit=model.commit(),
        model=spec,
        num_blocks=num_blocks,
        hidden_size=adapter.config.hidden_size,
        unit_bytes=model.unit_bytes(),
        frozen_bytes=model.frozen_bytes(),
        frozen_memory_share=adapter.frozen_memory_share,
        stored_bytes=model.stored_bytes(),
        findings=model.findings(),
    )


def _unmasking(request: edge_server_pb2.CommitRoundRequest) -> Unmasking | None:
    """Returns what removes the masks of a round; `None` if its uploads were not masked. Raises the errors of `RemainingMasks`."""
    if not request.HasField("unmasking"):
        return None
    attempt, message = request.attempt, request.unmasking
    masks = RemainingMasks(
        AttemptName(attempt.job_id, attempt.round_index, attempt.attempt),
        read_masking_keys(message.keys),
        {
            each.holder: {one.cluster_index: one.share for one in each.shares}
            for each in message.revealed
        },
    )
    return Unmasking(masks, message.total_samples)


def _refuse_if_alone(context: grpc.ServicerContext) -> None:
    """Raises `CancelledError` if the caller has gone while its request waited for the lock."""
    if not context.is_active():
        raise _went_away()


def _went_away() -> CancelledError:
    return CancelledError("the caller went away before the change of the model ended")


def _finish_anyway(reason: CancelledError) -> None:
    """Lets the work finish although the caller has gone: if the caller asks again, it is done already."""
