"""A scheduler and an edge server that answer from lists."""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager

import grpc

from collapipe.v1 import (
    edge_server_pb2,
    edge_server_pb2_grpc,
    model_use_pb2,
    plan_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

Event = scheduler_pb2.WatchJobResponse


class FakeServices(
    scheduler_pb2_grpc.SchedulerServiceServicer, edge_server_pb2_grpc.EdgeServerServiceServicer
):
    """A scheduler and an edge server that answer from lists and record the requests."""

    def __init__(self) -> None:
        self.address = ""
        self.hosts: list[scheduler_pb2.HostStatus] = []
        self.jobs: list[scheduler_pb2.JobStatus] = []
        self.events: Sequence[Event] = []
        self.after_events: Callable[[], object] = lambda: None
        self.files: list[edge_server_pb2.ExportModelResponse] = []
        self.submitted: list[scheduler_pb2.SubmitJobRequest] = []
        self.cancelled: list[str] = []
        self.rolled_back: list[scheduler_pb2.RollBackJobRequest] = []
        self.begins_anew = False
        self.deleted: list[str] = []
        self.explanation = scheduler_pb2.ExplainDecisionResponse()
        self.plans: list[plan_pb2.Plan] = []
        self.trace: list[scheduler_pb2.GetTraceResponse] = []
        self.outputs: list[model_use_pb2.ModelOutput] = []
        self.uses: list[scheduler_pb2.UseModelStart] = []
        self.evaluated = b""
        self.watched: list[scheduler_pb2.WatchJobRequest] = []
        self.traced: list[scheduler_pb2.GetTraceRequest] = []
        self.records: dict[str, list[scheduler_pb2.GetRecordsResponse]] = {}
        self.stored: dict[str, list[scheduler_pb2.DumpJobResponse]] = {}

    @property
    def options(self) -> list[str]:
        """The options of a command that choose this scheduler."""
        return ["--scheduler", self.address, "--insecure"]

    def ListHosts(self, request, context):  # type: ignore[no-untyped-def]
        return scheduler_pb2.ListHostsResponse(hosts=self.hosts)

    def ListJobs(self, request, context):  # type: ignore[no-untyped-def]
        return scheduler_pb2.ListJobsResponse(jobs=self.jobs)

    def SubmitJob(self, request, context):  # type: ignore[no-untyped-def]
        self.submitted.append(request)
        return scheduler_pb2.SubmitJobResponse(job_id="job-1")

    def CheckResume(self, request, context):  # type: ignore[no-untyped-def]
        if not self.jobs:
            context.abort(grpc.StatusCode.NOT_FOUND, "you have no such job")
        job = self.jobs[-1]
        restorable = job.num_rounds_committed - 10
        return scheduler_pb2.CheckResumeResponse(job=job, num_rounds_restorable=restorable)

    def WatchJob(self, request, context):  # type: ignore[no-untyped-def]
        self.watched.append(request)
        yield from self.events
        self.after_events()

    def GetRecords(self, request, context):  # type: ignore[no-untyped-def]
        yield from self.records[request.job_id]

    def DumpJob(self, request, context):  # type: ignore[no-untyped-def]
        yield from self.stored[request.job_id]

    def CancelJob(self, request, context):  # type: ignore[no-untyped-def]
        self.cancelled.append(request.job_id)
        return scheduler_pb2.CancelJobResponse()

    def RollBackJob(self, request, context):  # type: ignore[no-untyped-def]
        self.rolled_back.append(request)
        yield scheduler_pb2.RollBackJobResponse()
        job = scheduler_pb2.JobStatus(
            job_id=request.job_id, name="demo", num_rounds_committed=request.num_rounds
        )
        yield scheduler_pb2.RollBackJobResponse(job=job, begins_anew=self.begins_anew)

    def DeleteJob(self, request, context):  # type: ignore[no-untyped-def]
        self.deleted.append(request.job_id)
        return scheduler_pb2.DeleteJobResponse()

    def ExportModel(self, request, context):  # type: ignore[no-untyped-def]
        yield from self.files

    def ExplainDecision(self, request, context):  # type: ignore[no-untyped-def]
        return self.explanation

    def GetTrace(self, request, context):  # type: ignore[no-untyped-def]
        self.traced.append(request)
        yield from self.trace

    def UseModel(self, request_iterator, context):  # type: ignore[no-untyped-def]
        self.uses.append(next(request_iterator).start)
        self.evaluated += b"".join(request.chunk for request in request_iterator)
        yield scheduler_pb2.UseModelResponse()
        for output in self.outputs:
            yield scheduler_pb2.UseModelResponse(output=output)

    def GetPlans(self, request, context):  # type: ignore[no-untyped-def]
        return scheduler_pb2.GetPlansResponse(plans=self.plans)

    def succeed_with(self, *, name: str, files: dict[str, bytes]) -> None:
        """Makes every job succeed with a metric and a model."""
        self.jobs = [scheduler_pb2.JobStatus(job_id="job-1", name=name)]
        status = scheduler_pb2.JobStatus(
            job_id="job-1",
            name=name,
            state=scheduler_pb2.JOB_STATE_SUCCEEDED,
            num_rounds_committed=2,
            num_rounds=2,
        )
        status.evaluation.metric, status.evaluation.value = "accuracy", 0.75
        self.events = [Event(), Event(elapsed_seconds=1.0, status=status)]
        self.files = [
            edge_server_pb2.ExportModelResponse(file_name=file, total_bytes=len(data), chunk=data)
            for file, data in files.items()
        ]


@contextmanager
def serve_fake() -> Iterator[FakeServices]:
    """Serves `FakeServices` on loopback."""
    services = FakeServices()  # type: ignore[abstract]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(services, server)
    edge_server_pb2_grpc.add_EdgeServerServiceServicer_to_server(services, server)
    services.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    host = scheduler_pb2.Host(
        host_id="edge-server",
        role=scheduler_pb2.HOST_ROLE_EDGE_SERVER,
        address=services.address,
    )
    services.hosts = [scheduler_pb2.HostStatus(host=host, alive=True)]
    server.start()
    yield services
    server.stop(None).wait()
