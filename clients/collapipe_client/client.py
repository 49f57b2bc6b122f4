"""The Python client: submits jobs, follows their events, and fetches models. It needs no torch."""

import itertools
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message
from typing_extensions import Self

from collapipe.certificates import Role
from collapipe.documents import decode_json
from collapipe.errors import (
    CorruptDataError,
    InvalidInputError,
    NotFoundError,
    PeerLostError,
    WrongStateError,
)
from collapipe.job import JobConfig
from collapipe.mistakes import did_you_mean
from collapipe.rpc import (
    SIGN_OF_LIFE_SECONDS,
    ChannelPool,
    Security,
    call,
    open_channel,
    within_silence,
)
from collapipe.v1.edge_server_pb2 import ExportModelRequest, ExportModelResponse
from collapipe.v1.edge_server_pb2_grpc import EdgeServerServiceStub
from collapipe.v1.generation_pb2 import GenerationOptions
from collapipe.v1.job_pb2 import Evaluation
from collapipe.v1.model_use_pb2 import (
    AnswerPiece,
    EvaluatedFile,
    FileEvaluation,
    ModelOutput,
    ModelUse,
    Prediction,
)
from collapipe.v1.plan_pb2 import Plan
from collapipe.v1.scheduler_pb2 import (
    HOST_ROLE_EDGE_SERVER,
    JOB_STATE_CANCELLED,
    JOB_STATE_FAILED,
    JOB_STATE_SUCCEEDED,
    CancelJobRequest,
    CheckResumeRequest,
    CheckResumeResponse,
    DeleteJobRequest,
    DumpJobRequest,
    ExplainDecisionRequest,
    ExplainDecisionResponse,
    GetJobSnapshotRequest,
    GetPlansRequest,
    GetRecordsRequest,
    GetTraceRequest,
    GetTraceResponse,
    HostStatus,
    JobStatus,
    ListHostsRequest,
    ListJobsRequest,
    ReplayDecisionRequest,
    ReplayDecisionResponse,
    RollBackJobRequest,
    RollBackJobResponse,
    SubmitJobRequest,
    UseModelRequest,
    UseModelStart,
    WatchJobRequest,
    WatchJobResponse,
)
from collapipe.v1.scheduler_pb2_grpc import SchedulerServiceStub
from collapipe_client.trouble import incident_lines
from collapipe_client.view_state import JobView, apply_event, progress_lines

T = TypeVar("T")

_MOST_TEXTS, _MOST_CHARACTERS = 256, 1_000_000
"""Most texts, and about how many characters, in one use of a model. Later texts are another use."""
_CHUNK_BYTES = 1 << 20
"""Most bytes of a file in one message."""

_RETRY_SECONDS = 0.5
"""Time between two tries to reach a scheduler that is away."""

FINAL_STATES = (JOB_STATE_SUCCEEDED, JOB_STATE_FAILED, JOB_STATE_CANCELLED)

_ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}
"""With them, `transformers` and `peft` take a folder for an adapter."""


class CollaPipeClient:
    """A client of a scheduler, and of the edge server for trained models.

    Close it, or use it in `with`.

    Args:
        address: Address of the scheduler, "host:port".
        call_timeout: How long a call without a stream may take.
        silence_timeout: How long the peer of a stream may be silent before it counts as lost. More than 1 s.

    Raises:
        InvalidInputError: `silence_timeout` is too short.
    """

    def __init__(
        self,
        address: str,
        security: Security,
        *,
        call_timeout: timedelta = timedelta(seconds=15),
        silence_timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self.address = address
        self._security = security
        self._call_seconds = call_timeout.total_seconds()
        self._silence_seconds = silence_timeout.total_seconds()
        if self._silence_seconds <= SIGN_OF_LIFE_SECONDS:
            raise InvalidInputError(
                f"silence_timeout is {self._silence_seconds:g} s, but a healthy peer may be silent for "
                f"{SIGN_OF_LIFE_SECONDS:g} s: use a longer one"
            )
        self._channels = ChannelPool(security)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Jobs continue."""
        self._channels.close()

    @property
    def _scheduler(self) -> SchedulerServiceStub:
        return SchedulerServiceStub(self._channels.channel(self.address, Role.SCHEDULER))

    def hosts(self) -> list[HostStatus]:
        """Lists the hosts that the scheduler knows, with their health."""
        return list(self._call(self._scheduler.ListHosts, ListHostsRequest()).hosts)

    def jobs(self) -> list[JobStatus]:
        """Lists the jobs, oldest first."""
        return list(self._call(self._scheduler.ListJobs, ListJobsRequest()).jobs)

    def snapshot(self, job_id: str, clusters: Sequence[int] = ()) -> dict[str, Any]:
        """Returns what a job and its hosts do at the moment, as the page in the browser gets it.

        Args:
            clusters: Clusters of the job whose hosts and links are wanted. Without any, the first ones.
        """
        request = GetJobSnapshotRequest(job_id=job_id, clusters=clusters)
        answer = self._call(self._scheduler.GetJobSnapshot, request)
        found: dict[str, Any] = json.loads(answer.snapshot_json)
        return found

    def find_job(self, job: str) -> JobStatus:
        """Finds a job by its id, or the newest job by its name. Raises `NotFoundError` if there is none."""
        jobs = self.jobs()
        for status in reversed(jobs):
            if job in (status.job_id, status.name):
                return status
        known = list(dict.fromkeys(status.name for status in jobs))
        hint = did_you_mean(job, [*known, *(status.job_id for status in jobs)])
        raise NotFoundError(
            f"the scheduler at {self.address} knows no job {job!r}: {hint}{'It' if hint else 'it'} has {', '.join(known) or 'none'}"
        )

    def _find_model(self, job: str) -> str:
        """Returns the id of a job whose model is to be used. Raises `WrongStateError` if it ended before its first commit."""
        found = self.find_job(job)
        if found.state not in FINAL_STATES or found.num_rounds_committed:
            return found.job_id
        others = [
            each.job_id
            for each in self.jobs()
            if each.name == found.name and each.num_rounds_committed
        ]
        remedy = f"use {others[-1]}, an older job of this name" if others else "train it"
        raise WrongStateError(
            f"job {found.job_id} ended before its first commit, so it has no model: {remedy}"
        )

    def submit(self, job: JobConfig, resume: bool = False) -> str:
        """Queues a job, and returns its id.

        Args:
            job: Its paths are paths on the machines of the control units.
            resume: Continue the last job of this name from its restore point.
        """
        request = SubmitJobRequest(config_json=job.to_json(), resume=resume)
        return str(self._call(self._scheduler.SubmitJob, request).job_id)

    def check_resume(self, job: JobConfig) -> CheckResumeResponse:
        """Returns the job that `submit` would resume, or raises the error that it would raise. Nothing changes."""
        request = CheckResumeRequest(config_json=job.to_json())
        answer: CheckResumeResponse = self._call(self._scheduler.CheckResume, request)
        return answer

    def lines(self, job_id: str) -> Iterator[str]:
        """Yields the events of a job until it ends, as the lines with which `collapipe watch` reports them."""
        view = JobView()
        for event in self.watch(job_id):
            before, view = view, apply_event(view, event)
            yield from (*incident_lines(event), *progress_lines(before, view))

    def watch(
        self,
        job_id: str,
        *,
        signs_of_life: bool = False,
        waiting: Callable[[str], None] = lambda reason: None,
    ) -> Iterator[WatchJobResponse]:
        """Yields the events of a job until it ends.

        If the scheduler does not answer, waits up to `silence_timeout` for it. A restarted scheduler sends only the events
        since its start.

        Args:
            signs_of_life: Also yield messages without an event, which the scheduler sends between events.
            waiting: Called with the reason each time the scheduler stops answering. Its errors end the watch.

        Raises:
            NotFoundError: There is no such job.
            PeerLostError: The scheduler was away for too long. The job may continue: watch it again.
        """
        request, ended, is_away = WatchJobRequest(job_id=job_id), False, False
        heard_at, elapsed, offset = time.monotonic(), 0.0, 0.0
        task = f"send the events of job {job_id}"
        while not ended:
            try:
                messages = self._scheduler.WatchJob(request)
                for event in _one_by_one(self._stream(messages, self._scheduler_name, task)):
                    heard_at, is_away = time.monotonic(), False
                    if event.number:
                        if event.log_id != request.log_id:
                            offset = elapsed
                        request.log_id, request.after = event.log_id, event.number
                        event.elapsed_seconds += offset
                        elapsed = event.elapsed_seconds
                    if event.HasField("status"):
                        ended = event.status.state in FINAL_STATES
                    if signs_of_life or event.WhichOneof("event"):
                        yield event
                # A scheduler that is stopped ends the stream before the job has ended.
                lost = PeerLostError("scheduler", f"{self._scheduler_name} was stopped")
            except PeerLostError as error:
                lost = error
            if not ended:
                if time.monotonic() - heard_at > self._silence_seconds:
                    raise lost
                if not is_away:
                    waiting(str(lost))
                is_away = True
                time.sleep(_RETRY_SECONDS)

    def cancel(self, job_id: str) -> None:
        """Stops a job. Its last commit is kept."""
        self._call(self._scheduler.CancelJob, CancelJobRequest(job_id=job_id))

    def rollback(self, job_id: str, num_rounds: int) -> RollBackJobResponse:
        """Makes an earlier commit the last one of a job that is over.

        The edge server keeps the last `training.keep_commits` commits, and the restore point. A resumed job goes on from
        there. Only at the restore point it keeps its optimizer states.

        Args:
            num_rounds: Number of committed rounds to go back to; 0 is the initial model.

        Raises:
            NotFoundError: There is no such job, or that commit is not kept.
            WrongStateError: The job or a use of its model is queued or runs, or there is no edge server.
        """
        request = RollBackJobRequest(job_id=job_id, num_rounds=num_rounds)
        answers = self._scheduler.RollBackJob(request)
        task = f"take job {job_id} back to an earlier commit"
        *_, answer = self._stream(answers, self._scheduler_name, task)
        return answer

    def delete(self, job_id: str) -> None:
        """Deletes a job that has ended, with its model. Hosts delete their parts at their next heartbeat.

        Raises:
            WrongStateError: The job has not ended, or its model is used.
        """
        self._call(self._scheduler.DeleteJob, DeleteJobRequest(job_id=job_id))

    def plans(self, job_id: str, round_index: int) -> list[Plan]:
        """Returns the plan of each cluster in a round."""
        request = GetPlansRequest(job_id=job_id, round_index=round_index)
        return list(self._call(self._scheduler.GetPlans, request).plans)

    def explain(self, job_id: str, round_index: int) -> ExplainDecisionResponse:
        """Returns the explanation of a round's decision."""
        request = ExplainDecisionRequest(job_id=job_id, round_index=round_index)
        answer: ExplainDecisionResponse = self._call(self._scheduler.ExplainDecision, request)
        return answer

    def replay(self, job_id: str, round_index: int) -> ReplayDecisionResponse:
        """Makes the scheduler decide a round again from its recorded telemetry."""
        request = ReplayDecisionRequest(job_id=job_id, round_index=round_index)
        answer: ReplayDecisionResponse = self._call(self._scheduler.ReplayDecision, request)
        return answer

    def records(self, job_id: str) -> Iterator[dict[str, Any]]:
        """Yields what the scheduler has recorded of a job: the job, then its committed rounds in order.

        Numbers are rounded to four digits. A job with more than 300 rounds has every second one, or fewer, of which each has
        the key `every`.
        """
        request = GetRecordsRequest(job_id=job_id)
        task = f"send the records of job {job_id}"
        answers = self._scheduler.GetRecords(request)
        for answer in self._stream(answers, self._scheduler_name, task):
            yield json.loads(answer.part_json)

    def stored(self, job_id: str) -> dict[str, Any]:
        """Returns all that is stored of a job, except for weights and optimizer states: the rows of the scheduler by their table,
        and in `hosts` those of the edge server and of each control unit. A damaged document is a text.

        A table with a row for each round is a list, in order. A host that does not send its rows has `missing`, which says why.
        """
        request = DumpJobRequest(job_id=job_id)
        answers = self._scheduler.DumpJob(request)
        parts: dict[tuple[str, str, int | None], list[str]] = {}
        tables: dict[str, Any] = {"job": None, "planner": None, "events": None}
        tables |= {"round": [], "result": [], "hosts": {}}
        for row in self._stream(answers, self._scheduler_name, f"send what is stored of {job_id}"):
            if row.host_id:
                tables["hosts"].setdefault(row.host_id, {})
            if row.missing:
                tables["hosts"][row.host_id]["missing"] = row.missing
            if not row.table:
                continue
            round_index = row.round_index if row.HasField("round_index") else None
            key = row.host_id, row.table, round_index
            parts.setdefault(key, []).append(row.document_json)
        for (host_id, table, round_index), texts in parts.items():
            document: Any = "".join(texts)
            with suppress(ValueError):
                document = decode_json(
                    document, parse_constant=lambda name: None
                )  # JSON has no infinite numbers.
            found = tables["hosts"][host_id] if host_id else tables
            if round_index is None:
                found[table] = document
            else:
                found.setdefault(table, []).append({"round": round_index + 1, "document": document})
        return tables

    def trace(self, job_id: str, round_index: int) -> Iterator[GetTraceResponse]:
        """Yields what every host did in the last attempt at a round, and which hosts are missing."""
        request = GetTraceRequest(job_id=job_id, round_index=round_index)
        task = f"send the trace of job {job_id}"
        return self._stream(self._scheduler.GetTrace(request), self._scheduler_name, task)

    @property
    def owner(self) -> str:
        """Role and name of this client, such as "client:me", as the owner of its jobs; "" in plain text."""
        presented = self._security.presented()
        return str(presented.identity) if presented is not None else ""

    def export(self, job: str, directory: Path, *, merged: bool = False) -> list[Path]:
        """Fetches the model of a job's last commit, and returns the files that `save_pretrained` writes.

        For a job with LoRA on a pretrained model, it fetches only the adapter.

        All files are complete before the first one is moved to the directory.

        Args:
            job: The job's id, or its name for the newest job of that name.
            directory: Created if needed. A whole model replaces an adapter in it. Other files stay unchanged.
            merged: Whether to fetch the whole model, with LoRA added, instead of the adapter. If the adapter would not give
                the trained model, the whole one is fetched anyway.
        """
        job_id = self._find_model(job)
        edge_server = self._edge_server_address()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".incoming-", dir=directory))
        except OSError as error:
            raise InvalidInputError(
                f"{directory} cannot be written ({error.strerror}): choose another folder"
            ) from error
        try:
            with open_channel(edge_server, self._security) as channel:
                request = ExportModelRequest(job_id=job_id, merged=merged)
                pieces = EdgeServerServiceStub(channel).ExportModel(request)
                peer, task = f"the edge server at {edge_server}", f"send the model of job {job_id}"
                names = _write_files(self._stream(pieces, peer, task), folder)
            for name in _ADAPTER_FILES.difference(names):
                (directory / name).unlink(missing_ok=True)
            return [(folder / name).replace(directory / name) for name in names]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def predict(
        self,
        job: str,
        texts: Iterable[str],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        skip_refused: bool = False,
        waiting: Callable[[str], None] = lambda reason: None,
    ) -> Iterator[AnswerPiece]:
        """Answers texts with the model of a job's last commit, on the hosts of its cluster 0.

        For classification an answer is a label, and for ner a line with each word, a tab and its tag. Otherwise it is
        generated, and every token is a piece. The pieces of several texts come mixed. A blank text has an empty answer.

        Args:
            job: The job's id, or its name for the newest job of that name.
            texts: At most 256 go into one use of the model. Further uses take turns with jobs on the same cluster, so a job
                that trains on may commit a newer model in between.
            max_new_tokens: Most tokens of an answer. `None` stands for the job's `task.max_new_tokens`.
            temperature: 0 always chooses the most probable token. Otherwise tokens are drawn.
            top_k: Tokens to draw from: the most probable ones. 0 means all.
            skip_refused: Whether a text that cannot be answered has an empty answer with a `refusal`, which says why.
            waiting: Called once in each second without an answer, with what it waits for, or with "" while the hosts compute.

        Raises:
            PeerLostError: A process ended or is silent.
            InvalidInputError: A text is too long, and is not to be skipped, or an option is wrong.
        """
        _check_options(max_new_tokens, temperature)
        job_id = self._find_model(job)
        options = GenerationOptions(
            max_new_tokens=max_new_tokens or 0, temperature=temperature, top_k=top_k, seed=seed
        )
        for part in _parts(texts):
            indices = [index for index, text in part if text.strip()]
            blank = (index for index, text in part if not text.strip())
            yield from (AnswerPiece(text_index=index, is_last=True) for index in blank)
            if not indices:
                continue
            prediction = Prediction(options=options, skips_refused=skip_refused)
            prediction.numbers.extend(index + 1 for index in indices)
            prediction.texts.extend(text for _, text in part if text.strip())
            use = ModelUse(prediction=prediction)
            for output in self._use_model(job_id, use, iter(()), waiting):
                output.piece.text_index = indices[output.piece.text_index]
                yield output.piece

    def evaluate(
        self,
        job: str,
        *files: Path,
        waiting: Callable[[str], None] = lambda reason: None,
    ) -> Evaluation:
        """Returns the metrics of the model of a job's last commit on the rows of a file.

        Args:
            job: The job's id, or its name for the newest job of that name.
            files: One file on this machine, or two parallel ones for translation.
            waiting: As for `predict`.

        Raises:
            PeerLostError: A process ended or is silent.
            InvalidInputError: A row is wrong; the message names the file and the line.
        """
        job_id = self._find_model(job)
        try:
            sizes = [file.stat().st_size for file in files]
        except OSError as error:
            raise InvalidInputError(
                f"{error.filename} cannot be read ({error.strerror}): give a file of this machine"
            ) from error
        wrong = next((file for file in files if not file.is_file()), None)
        if wrong is not None:
            raise InvalidInputError(
                f"{wrong} is a folder, a pipe or a device: give a file, such as one .parquet file"
            )
        listed = [
            EvaluatedFile(name=str(file), total_bytes=size)
            for file, size in zip(files, sizes, strict=True)
        ]
        use = ModelUse(evaluation=FileEvaluation(files=listed))
        found = [
            output.evaluation for output in self._use_model(job_id, use, _chunks(files), waiting)
        ]
        if not found:
            raise CorruptDataError(
                "the scheduler sent no metrics: read the log of the control unit"
            )
        return found[0]

    def _use_model(
        self,
        job_id: str,
        use: ModelUse,
        chunks: Iterator[bytes],
        waiting: Callable[[str], None],
    ) -> Iterator[ModelOutput]:
        """Yields the results of a use."""
        start = UseModelRequest(start=UseModelStart(job_id=job_id, use=use))
        requests = itertools.chain([start], (UseModelRequest(chunk=chunk) for chunk in chunks))
        answers = self._scheduler.UseModel(requests)
        task = f"use the model of job {job_id}"
        for answer in self._stream(answers, self._scheduler_name, task):
            event = answer.output.WhichOneof("event")
            if event == "waiting_for":
                waiting(answer.output.waiting_for)
            elif event:
                yield answer.output

    @property
    def _scheduler_name(self) -> str:
        return f"the scheduler at {self.address}"

    def _edge_server_address(self) -> str:
        alive = [s for s in self.hosts() if s.host.role == HOST_ROLE_EDGE_SERVER and s.alive]
        if not alive:
            raise WrongStateError(
                f"the scheduler at {self.address} has no live edge server, which stores the models: "
                "start the edge server, or read its log"
            )
        return alive[0].host.address

    def _call(self, method: Any, request: Message) -> Any:
        return call(method, request, self._scheduler_name, self._call_seconds)

    def _stream(self, answers: Iterable[T], peer: str, task: str) -> Iterator[T]:
        return within_silence(answers, self._silence_seconds, peer, lambda: task)


def _check_options(max_new_tokens: int | None, temperature: float) -> None:
    if max_new_tokens is not None and max_new_tokens < 1:
        raise InvalidInputError(
            f"{max_new_tokens} new tokens are no answer: ask for at least 1, or leave the number out"
        )
    if not 0 <= temperature < math.inf:
        raise InvalidInputError(
            f"the temperature is {temperature}: give a number from 0 on, for example 0.7"
        )


def _parts(texts: Iterable[str]) -> Iterator[list[tuple[int, str]]]:
    """Divides texts with their indices so that each part fits into a message."""
    part: list[tuple[int, str]] = []
    for index, text in enumerate(texts):
        if part and (
            len(part) == _MOST_TEXTS
            or sum(len(each) for _, each in part) + len(text) > _MOST_CHARACTERS
        ):
            yield part
            part = []
        part.append((index, text))
    if part:
        yield part


def _chunks(files: Sequence[Path]) -> Iterator[bytes]:
    for path in files:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


def _write_files(pieces: Iterator[ExportModelResponse], folder: Path) -> list[str]:
    """Writes the pieces of files to a folder, and returns the names of the files.

    Raises:
        CorruptDataError: A file has a wrong size or no acceptable name.
    """
    names: list[str] = []
    missing = 0
    for piece in pieces:
        if piece.file_name:
            _check_complete(names, missing)
            names.append(_plain_name(piece.file_name))
            missing = piece.total_bytes
        if not piece.ByteSize():
            continue  # A sign of life, while the edge server prepares the model.
        if not names:
            raise CorruptDataError("the model came without a file name: update the edge server")
        with open(folder / names[-1], "ab") as file:
            file.write(piece.chunk)
        missing -= len(piece.chunk)
    _check_complete(names, missing)
    if not names:
        raise CorruptDataError("the edge server sent no files: read its log")
    return names


def _check_complete(names: list[str], missing: int) -> None:
    if missing:
        raise CorruptDataError(
            f"{names[-1]} came with {abs(missing)} bytes {'less' if missing > 0 else 'more'} than "
            "announced: export the model again"
        )


def _plain_name(name: str) -> str:
    """Returns a name, or refuses one that would place a file outside the folder."""
    if name != Path(name).name or name in (".", ".."):
        raise CorruptDataError(
            f"the edge server sent a file named {name!r}, which is not a plain file name: nothing was written there"
        )
    return name


def _one_by_one(messages: Iterable[WatchJobResponse]) -> Iterator[WatchJobResponse]:
    """Yields the events of a job, some of which come in batches."""
    for message in messages:
        yield from message.batch or (message,)
