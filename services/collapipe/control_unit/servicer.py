"""ControlUnitService: loads data, runs rounds, and uses trained models."""

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Generic, Protocol, TypeVar

import grpc

from collapipe.attempts import order
from collapipe.control_unit.cluster_pipeline import ClusterPipeline
from collapipe.control_unit.cluster_round import ClusterRound, Emit
from collapipe.control_unit.model_use import open_model_use, waiting_response
from collapipe.control_unit.moment_copy import MomentCopy
from collapipe.control_unit.noise_secret import noise_secret
from collapipe.control_unit.private_errors import private_errors
from collapipe.control_unit.recorded_rows import RecordedRows
from collapipe.control_unit.round_masking import RoundMasking
from collapipe.data.findings import TextFacts, find_in_texts
from collapipe.errors import (
    CancelledError,
    CollapipeError,
    InvalidInputError,
    NotFoundError,
    NotPermittedError,
    WrongStateError,
)
from collapipe.finding import in_order
from collapipe.job import JobConfig
from collapipe.rpc import work_with_signs_of_life
from collapipe.rpc.finding_messages import to_message
from collapipe.stage_host import HostResources
from collapipe.stage_host.servicer import MOST_KEPT_ATTEMPTS
from collapipe.tasks import Task, load_task
from collapipe.v1 import control_unit_pb2, control_unit_pb2_grpc, job_pb2, plan_pb2
from collapipe.weights.blob_store import BlobStore, JobStores
from collapipe.weights.transfer import fetch_vocabulary

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)

_log = logging.getLogger(__name__)
_WAITING = "the previous attempt to end"

_EVALUATED = "evaluated"
"""Folder in the directory of a job, for files of clients."""


class ControlUnitServicer(control_unit_pb2_grpc.ControlUnitServiceServicer):
    """Serves one cluster. Other hosts reach this control unit at `address`.

    Args:
        data_clients: Names of the clients whose jobs may use the data; empty for all.
    """

    def __init__(
        self,
        resources: HostResources,
        stores: JobStores,
        rows: RecordedRows,
        address: str,
        data_clients: Collection[str] = (),
    ) -> None:
        self._resources = resources
        self._stores = stores
        self._rows = rows
        self._address = address
        self._data_clients = data_clients
        self._tasks: dict[str, Task] = {}
        self._one_attempt = threading.Lock()
        self._latest: dict[str, plan_pb2.Attempt] = {}
        self._newest_load: object = None
        """Identifies the latest call of `PrepareData`. The load of a cancelled call may end after it has begun."""
        self._round: ClusterRound | None = None
        """The attempt at a round that runs."""
        self._copy: MomentCopy | None = None
        self._masking = RoundMasking(resources.channels.security)
        stores.delete(_EVALUATED)  # An earlier process may have died meanwhile.

    def PrepareData(
        self, request: control_unit_pb2.PrepareDataRequest, context: grpc.ServicerContext
    ) -> Iterator[control_unit_pb2.PrepareDataResponse]:
        """Loads the data of the cluster."""

        def work(emit: Callable[[control_unit_pb2.PrepareDataResponse], None]) -> None:
            this_load = self._newest_load = object()
            job = JobConfig.from_json(request.job.config_json)
            self._resources.check_files(job, request.cluster_index)
            self._check_owner(request.owner)
            self._hide(request.job, request.vocabulary.digest)
            store = self._stores.store(request.job.job_id)
            vocabulary = None
            if request.HasField("vocabulary"):
                vocabulary = fetch_vocabulary(store, self._resources.channels, request.vocabulary)
            with private_errors(job):
                task = load_task(
                    job,
                    request.cluster_index,
                    vocabulary,
                    request.num_first_rows or None,
                    not request.has_model,
                    self._resources.data_folders,
                )
            if self._newest_load is not this_load:
                raise WrongStateError(
                    f"the data of job {request.job.job_id} are not kept: a later call loads the data of this cluster"
                )
            self._tasks = {request.job.job_id: task}
            findings = in_order(task.findings)
            for finding in (*findings, *find_in_texts(task.kind, [task.texts])):
                _log.info("%s", finding)
            digest = store.put_bytes(task.vocabulary)
            self._hide(request.job, digest)
            answer = control_unit_pb2.PrepareDataResponse(
                num_rows=task.num_rows,
                labels=task.labels,
                vocabulary=job_pb2.BlobSource(digest=digest, address=self._address),
                num_held_out_rows=task.num_held_out_rows,
                num_first_rows=task.num_first,
            )
            # In a job with differential privacy, these would reveal more than its privacy loss says.
            if not job.privacy.is_on:
                answer.findings.extend(map(to_message, findings))
                for label, place in task.held_out_labels.items():
                    answer.held_out_labels.add(label=label, place=place)
                answer.texts.CopyFrom(_text_counts(task.texts))
                answer.num_long_rows = task.num_long_rows
                answer.num_long_held_out_rows = task.num_long_held_out_rows
            emit(answer)

        with self._stores.using(request.job.job_id):
            yield from work_with_signs_of_life(
                work, control_unit_pb2.PrepareDataResponse, lambda reason: None, context
            )

    def RunRound(
        self, request: control_unit_pb2.RunRoundRequest, context: grpc.ServicerContext
    ) -> Iterator[control_unit_pb2.RunRoundResponse]:
        """Runs one attempt at a round."""
        waiting = job_pb2.RoundProgress(waiting_for=_WAITING)
        attempt = _Attempt[control_unit_pb2.RunRoundResponse](
            control_unit_pb2.RunRoundResponse(progress=waiting)
        )

        def work(emit: Emit) -> None:
            # The caller has cancelled an earlier attempt that still holds the lock, so it will end soon.
            with self._one_attempt:
                self._refuse_old_attempt(request.attempt, context)
                self._round = self._open(request)
                try:
                    attempt.run(self._round, emit)
                finally:
                    self._round = None

        with self._stores.using(request.attempt.job_id):
            yield from work_with_signs_of_life(work, attempt.progress, attempt.abort, context)

    def EndTraining(
        self, request: control_unit_pb2.EndTrainingRequest, context: grpc.ServicerContext
    ) -> control_unit_pb2.EndTrainingResponse:
        """Lets the running attempt train no further mini-batches."""
        running, attempt = self._round, request.attempt
        asked = attempt.job_id, order(attempt)
        if running is None or (running.attempt.job_id, order(running.attempt)) != asked:
            raise NotFoundError(
                f"round {attempt.round_index}, attempt {attempt.attempt} of job {attempt.job_id} does not run here: ask again "
                "when it has begun"
            )
        running.end_training()
        return control_unit_pb2.EndTrainingResponse()

    def MakeMaskingKeys(
        self, request: control_unit_pb2.MakeMaskingKeysRequest, context: grpc.ServicerContext
    ) -> Iterator[control_unit_pb2.MakeMaskingKeysResponse]:
        """Makes the masking keys of an attempt."""
        yield from _answer(
            control_unit_pb2.MakeMaskingKeysResponse,
            lambda: control_unit_pb2.MakeMaskingKeysResponse(keys=self._masking.begin(request)),
            context,
        )

    def ShareMasks(
        self, request: control_unit_pb2.ShareMasksRequest, context: grpc.ServicerContext
    ) -> Iterator[control_unit_pb2.ShareMasksResponse]:
        """Shares the secrets of the cluster among all clusters."""
        yield from _answer(
            control_unit_pb2.ShareMasksResponse,
            lambda: control_unit_pb2.ShareMasksResponse(shares=self._masking.share(request)),
            context,
        )

    def RevealMasks(
        self, request: control_unit_pb2.RevealMasksRequest, context: grpc.ServicerContext
    ) -> Iterator[control_unit_pb2.RevealMasksResponse]:
        """Reveals what removes the masks of an attempt."""
        yield from _answer(
            control_unit_pb2.RevealMasksResponse,
            lambda: control_unit_pb2.RevealMasksResponse(revealed=self._masking.reveal(request)),
            context,
        )

    def RunModel(
        self,
        request_iterator: Iterator[control_unit_pb2.RunModelRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[control_unit_pb2.RunModelResponse]:
        """Runs the model of a job, whose data need not be loaded."""
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("part") != "start":
            raise InvalidInputError("a use of a model begins with RunModelStart")
        start = first.start
        job_id = start.round.attempt.job_id
        attempt = _Attempt[control_unit_pb2.RunModelResponse](waiting_response(_WAITING))

        def chunks() -> Iterator[bytes]:
            try:
                for request in request_iterator:
                    yield request.chunk
            except CollapipeError:
                raise
            except Exception as error:  # gRPC raises an RpcError when the caller goes away.
                raise CancelledError("the caller went away") from error

        def work(emit: Callable[[control_unit_pb2.RunModelResponse], None]) -> None:
            attempt.waiting = waiting_response("the vocabulary and the rows to evaluate")
            self._hide(start.round.job, start.round.vocabulary.digest)
            store = self._stores.store(job_id)
            vocabulary = fetch_vocabulary(store, self._resources.channels, start.round.vocabulary)
            directory = self._stores.directory(job_id) / _EVALUATED
            use = open_model_use(start, chunks(), vocabulary, directory, self._pipeline)
            attempt.waiting = waiting_response(_WAITING)
            with self._one_attempt:
                self._refuse_old_attempt(start.round.attempt, context)
                attempt.run(use, emit)

        with self._stores.using(job_id):
            yield from work_with_signs_of_life(work, attempt.progress, attempt.abort, context)

    def _check_owner(self, owner: str) -> None:
        """Refuses the job of a client who may not use the data of this cluster; raises `NotPermittedError`."""
        if self._data_clients and owner.rpartition(":")[2] not in self._data_clients:
            raise NotPermittedError(
                f"{self._resources.host_id} refuses its data to {owner or 'a client of plain text'}, because only "
                f"{', '.join(self._data_clients)} may use them: ask the owner of the data to change its setting data_clients"
            )

    def _hide(self, job: job_pb2.JobSpec, vocabulary_digest: str) -> None:
        """Hides what this host stores of a job from hosts outside of its cluster, if the job averages securely."""
        if JobConfig.from_json(job.config_json).averaging.secure:
            self._stores.hide_from_outsiders(job.job_id, vocabulary_digest)

    def _pipeline(
        self, request: control_unit_pb2.RunRoundRequest, job: JobConfig
    ) -> ClusterPipeline:
        secret = b""
        if job.privacy.is_on and request.local_steps:
            secret = noise_secret(self._stores.directory(request.attempt.job_id))
        return ClusterPipeline(request, job, self._resources, self._address, secret)

    def _refuse_old_attempt(self, attempt: plan_pb2.Attempt, context: grpc.ServicerContext) -> None:
        """Refuses an attempt whose caller went away, or that is not newer than the last one."""
        if not context.is_active():
            raise CancelledError("the caller went away before the attempt began")
        latest = self._latest.get(attempt.job_id)
        if latest is not None and order(attempt) <= order(latest):
            raise WrongStateError(
                f"round {attempt.round_index}, attempt {attempt.attempt} of job {attempt.job_id} is not newer than "
                f"round {latest.round_index}, attempt {latest.attempt}, which ran here already"
            )
        self._latest.pop(attempt.job_id, None)  # It becomes the newest one.
        self._latest[attempt.job_id] = attempt
        if len(self._latest) > MOST_KEPT_ATTEMPTS:
            del self._latest[next(iter(self._latest))]

    def _open(self, request: control_unit_pb2.RunRoundRequest) -> ClusterRound:
        """Prepares an attempt, and deletes blobs that neither it nor a later attempt needs."""
        job_id = request.attempt.job_id
        task = self._tasks.get(job_id)
        if task is None:
            raise NotFoundError(
                f"{self._resources.host_id} has no data loaded for job {job_id}, because it was restarted: "
                "load them, and run the round again"
            )
        job = JobConfig.from_json(request.job.config_json)
        with private_errors(job):
            task.set_labels(list(request.labels))
        store = self._stores.store(job_id)
        copy = self._copy_of(request, job, store)
        units = (*request.restore_point.units, *request.candidate.units)
        store.keep_only({unit.optimizer_digest for unit in units} | {request.vocabulary.digest})
        pipeline = self._pipeline(request, job)
        masks = self._masking.of_round(request, job)
        return ClusterRound(request, job, task, pipeline, self._rows, copy, masks)

    def _copy_of(
        self, request: control_unit_pb2.RunRoundRequest, job: JobConfig, store: BlobStore
    ) -> MomentCopy | None:
        """Returns the copy of the request's candidate, which may have begun in an earlier round. A copy that failed goes on."""
        wanted = request.candidate if request.HasField("candidate") else None
        if self._copy is not None and (self._copy.candidate != wanted or self._copy.has_failed):
            self._copy.cancel()
            self._copy = None
        if self._copy is None and wanted is not None:
            self._copy = MomentCopy(
                wanted,
                request.candidate_stages,
                request.edge_address,
                self._resources,
                store,
                job.schedule.silence_seconds,
            )
        return self._copy


def _answer(
    sign_of_life: Callable[[], M], work: Callable[[], M], context: grpc.ServicerContext
) -> Iterator[M]:
    """Yields one answer, and signs of life before it."""
    yield from work_with_signs_of_life(
        lambda emit: emit(work()), sign_of_life, lambda reason: None, context
    )


class _Runs(Protocol[M_co]):
    """What an attempt runs: a round, or a use of the model."""

    def run(self, emit: Callable[[M_co], None]) -> None: ...

    def abort(self, reason: CancelledError) -> None: ...

    def progress(self) -> M_co: ...


class _Attempt(Generic[M]):
    """A call that runs an attempt. Its caller may cancel it before an earlier attempt has ended.

    Args:
        waiting: The sign of life meanwhile.
    """

    def __init__(self, waiting: M) -> None:
        self._lock = threading.Lock()
        self.waiting = waiting
        self._running: _Runs[M] | None = None
        self._cancelled: CancelledError | None = None

    def run(self, work: _Runs[M], emit: Callable[[M], None]) -> None:
        with self._lock:
            self._running = work
        if self._cancelled is not None:
            work.abort(self._cancelled)
        work.run(emit)

    def abort(self, reason: CancelledError) -> None:
        with self._lock:
            self._cancelled = reason
        if self._running is not None:
            self._running.abort(reason)

    def progress(self) -> M:
        return self._running.progress() if self._running is not None else self.waiting


def _text_counts(facts: TextFacts) -> control_unit_pb2.TextCounts:
    return control_unit_pb2.TextCounts(
        num_rows=facts.num_rows,
        num_special=facts.special.number,
        special_place=facts.special.place,
        special_token=facts.first_special,
        num_unknown=facts.unknown.number,
        unknown_place=facts.unknown.place,
    )
