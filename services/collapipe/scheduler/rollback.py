"""Goes back to an earlier commit of a job: the edge server changes the model, and the job store follows."""

from collapipe.errors import WrongStateError
from collapipe.rpc import ChannelPool
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.host_registry import EDGE_SERVER, HostRegistry
from collapipe.scheduler.job_store import JobStore, begins_anew
from collapipe.v1 import edge_server_pb2, scheduler_pb2


def roll_back(
    request: scheduler_pb2.RollBackJobRequest,
    registry: HostRegistry,
    jobs: JobStore,
    channels: ChannelPool,
) -> scheduler_pb2.RollBackJobResponse:
    """Makes an earlier commit the last one of a job that must not run meanwhile.

    If the scheduler ends after the edge server has gone back, the job can be resumed, or go back again: the new attempt
    number makes the commit newer than all that the job store knows.

    Raises:
        NotFoundError: There is no such job, or the edge server has not kept that commit.
        WrongStateError: There is no edge server.
        PeerLostError: The edge server was lost.
    """
    document = jobs.get(request.job_id)
    edge_server = next((host for host in registry.heard() if host.role == EDGE_SERVER), None)
    if edge_server is None:
        raise WrongStateError(
            f"job {request.job_id} cannot go back to an earlier commit without the edge server, which keeps the commits: "
            "start it"
        )
    calls = HostCalls(channels, document.job.schedule.silence_seconds)
    answer = go_to_commit(
        edge_server,
        edge_server_pb2.RollBackRequest(
            job_id=request.job_id,
            num_rounds=request.num_rounds,
            attempt=jobs.begin_use(request.job_id),
        ),
        calls,
    )
    commit = answer.commit
    document = jobs.roll_back(request.job_id, commit, answer.stored_bytes)
    return scheduler_pb2.RollBackJobResponse(job=document.status(), begins_anew=begins_anew(commit))


def go_to_commit(
    edge_server: scheduler_pb2.Host,
    request: edge_server_pb2.RollBackRequest,
    calls: HostCalls,
) -> edge_server_pb2.RollBackResponse:
    """Makes a kept commit the last one of a job; raises the errors of `HostCalls.last_answer`."""
    call = calls.edge_server(edge_server).RollBack(request, wait_for_ready=True)
    return calls.last_answer(call, edge_server.host_id, "go to a kept commit")
