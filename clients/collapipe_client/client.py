"""The Python client: jobs in, events and models out. Synchronous; needs no torch."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message
from typing_extensions import Self

from collapipe.certificates import Role
from collapipe.errors import (
    CorruptDataError,
    InvalidInputError,
    NotFoundError,
    WrongStateError,
)
from collapipe.job import JobConfig
from collapipe.rpc import Security, call, open_channel, within_silence
from collapipe.v1.edge_server_pb2 import ExportModelRequest, ExportModelResponse
from collapipe.v1.edge_server_pb2_grpc import EdgeServerServiceStub
from collapipe.v1.plan_pb2 import Plan
from collapipe.v1.scheduler_pb2 import (
    HOST_ROLE_EDGE_SERVER,
    CancelJobRequest,
    ExplainDecisionRequest,
    ExplainDecisionResponse,
    GetPlansRequest,
    HostStatus,
    JobStatus,
    ListHostsRequest,
    ListJobsRequest,
    ReplayDecisionRequest,
    ReplayDecisionResponse,
    SubmitJobRequest,
    WatchJobRequest,
    WatchJobResponse,
)
from collapipe.v1.scheduler_pb2_grpc import SchedulerServiceStub

T = TypeVar("T")


class CollaPipeClient:
    """Talks to a scheduler, and to the edge server for trained models.

    Close it, or use it in `with`.

    Args:
        address: The scheduler, "host:port".
        security: How to prove who this is, and to know who answers.
        call_timeout: Bounds each short call: every method but `watch` and `export`.
        silence_timeout: Longest silence in `watch` and `export` before the peer counts as lost.
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
        self._channel = open_channel(address, security, Role.SCHEDULER)
        self._scheduler = SchedulerServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; jobs go on."""
        self._channel.close()

    def hosts(self) -> list[HostStatus]:
        """Lists the hosts that the scheduler knows, and whether they are alive."""
        return list(self._call(self._scheduler.ListHosts, ListHostsRequest()).hosts)

    def jobs(self) -> list[JobStatus]:
        """Lists the jobs, oldest first."""
        return list(self._call(self._scheduler.ListJobs, ListJobsRequest()).jobs)

    def find_job(self, job: str) -> JobStatus:
        """Finds a job by its id, or the newest by its name.

        Raises:
            NotFoundError: There is none.
        """
        jobs = self.jobs()
        for status in reversed(jobs):
            if job in (status.job_id, status.name):
                return status
        known = ", ".join(dict.fromkeys(status.name for status in jobs)) or "none"
        raise NotFoundError(f"the scheduler at {self.address} knows no job {job!r}: it has {known}")

    def submit(self, job: JobConfig, resume: bool = False) -> str:
        """Queues a job.

        Args:
            job: The job. Paths in it are those of the machines that the control units run on.
            resume: Continue the last job of this name from its last commit.

        Returns:
            The job's id.
        """
        request = SubmitJobRequest(config_json=job.to_json(), resume=resume)
        return str(self._call(self._scheduler.SubmitJob, request).job_id)

    def watch(self, job_id: str, *, signs_of_life: bool = False) -> Iterator[WatchJobResponse]:
        """Tells what happens in a job, from its first event to its last.

        Args:
            job_id: The job.
            signs_of_life: Also yield the messages without an event that the scheduler sends in
                quiet times.

        Raises:
            PeerLostError: The scheduler ended or fell silent. The job may go on: watch again.
        """
        events = self._scheduler.WatchJob(WatchJobRequest(job_id=job_id))
        for event in self._stream(events, self._scheduler_name, f"tell about job {job_id}"):
            if signs_of_life or event.WhichOneof("event"):
                yield event

    def cancel(self, job_id: str) -> None:
        """Stops a job; its last commit stays."""
        self._call(self._scheduler.CancelJob, CancelJobRequest(job_id=job_id))

    def plans(self, job_id: str, round_index: int) -> list[Plan]:
        """Tells who ran what in a round: one plan a cluster."""
        request = GetPlansRequest(job_id=job_id, round_index=round_index)
        return list(self._call(self._scheduler.GetPlans, request).plans)

    def explain(self, job_id: str, round_index: int) -> ExplainDecisionResponse:
        """Tells why a round's plans are what they are."""
        request = ExplainDecisionRequest(job_id=job_id, round_index=round_index)
        answer: ExplainDecisionResponse = self._call(self._scheduler.ExplainDecision, request)
        return answer

    def replay(self, job_id: str, round_index: int) -> ReplayDecisionResponse:
        """Lets the scheduler decide a round again from what was recorded with it."""
        request = ReplayDecisionRequest(job_id=job_id, round_index=round_index)
        answer: ReplayDecisionResponse = self._call(self._scheduler.ReplayDecision, request)
        return answer

    def export(self, job: str, directory: Path) -> list[Path]:
        """Fetches the model of a job's last commit, as `save_pretrained` writes it.

        Files are complete before the first is put in place.

        Args:
            job: The job's id, or its name for the newest of that name.
            directory: Where the files go; made if needed. Other files there are left alone.

        Returns:
            The files.
        """
        job_id = self.find_job(job).job_id
        edge_server = self._edge_server_address()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".incoming-", dir=directory))
        except OSError as error:
            raise InvalidInputError(
                f"{directory} cannot be written: {error.strerror}: choose another"
            ) from error
        try:
            with open_channel(edge_server, self._security) as channel:
                request = ExportModelRequest(job_id=job_id)
                pieces = EdgeServerServiceStub(channel).ExportModel(request)
                peer, task = f"the edge server at {edge_server}", f"send the model of job {job_id}"
                names = _write_files(self._stream(pieces, peer, task), folder)
            return [(folder / name).replace(directory / name) for name in names]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _scheduler_name(self) -> str:
        return f"the scheduler at {self.address}"

    def _edge_server_address(self) -> str:
        alive = [s for s in self.hosts() if s.host.role == HOST_ROLE_EDGE_SERVER and s.alive]
        if not alive:
            raise WrongStateError(
                f"the scheduler at {self.address} has no live edge server, which keeps the models: "
                "start it, or look into its log"
            )
        return alive[0].host.address

    def _call(self, method: Any, request: Message) -> Any:
        return call(method, request, self._scheduler_name, self._call_seconds)

    def _stream(self, answers: Iterable[T], peer: str, task: str) -> Iterator[T]:
        return within_silence(answers, self._silence_seconds, peer, lambda: task)


def _write_files(pieces: Iterator[ExportModelResponse], folder: Path) -> list[str]:
    """Writes the pieces of files as they come.

    Raises:
        CorruptDataError: The stream is not what its announcements say.
    """
    names: list[str] = []
    missing = 0
    for piece in pieces:
        if piece.file_name:
            _check_complete(names, missing)
            names.append(_plain_name(piece.file_name))
            missing = piece.total_bytes
        if not piece.ByteSize():
            continue  # a sign of life, while the model is put together
        if not names:
            raise CorruptDataError("the model came without a file name: update the edge server")
        with open(folder / names[-1], "ab") as file:
            file.write(piece.chunk)
        missing -= len(piece.chunk)
    _check_complete(names, missing)
    if not names:
        raise CorruptDataError("the edge server sent no files: look into its log")
    return names


def _check_complete(names: list[str], missing: int) -> None:
    if missing:
        raise CorruptDataError(
            f"{names[-1]} came with {abs(missing)} bytes {'less' if missing > 0 else 'more'} than "
            "announced: export again"
        )


def _plain_name(name: str) -> str:
    """Refuses names that lead out of the folder."""
    if name != Path(name).name or name in (".", ".."):
        raise CorruptDataError(
            f"the edge server sent a file named {name!r}, which is not a plain name: refused"
        )
    return name
