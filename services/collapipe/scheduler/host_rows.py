"""Collects what the edge server and the control units have stored of a job."""

from collections.abc import Iterable, Iterator

from collapipe.errors import CollapipeError, PeerLostError
from collapipe.rpc import ChannelPool, within_silence
from collapipe.scheduler.host_registry import CONTROL_UNIT, EDGE_SERVER
from collapipe.v1 import scheduler_pb2, storage_pb2, storage_pb2_grpc

_SILENCE_SECONDS = 10.0
_TABLES = {("job", False), ("last_commit", False), ("round", True)}
"""The tables of hosts, and whether their rows are about a round."""
_MOST_BYTES = 1 << 26
_ROW_BYTES = 100
"""Counted for each part of a row. A commit of 1,000 clusters has 10 MB. Otherwise the answer of a host could go on for ever."""
_MOST_SECONDS = 60.0

Message = scheduler_pb2.DumpJobResponse


def collect_rows(
    job_id: str,
    clusters: Iterable[int] | None,
    hosts: Iterable[scheduler_pb2.HostStatus],
    channels: ChannelPool,
) -> Iterator[Message]:
    """Yields the rows of the edge server and of the control units of some clusters. A host that does not send its own gets a message
    that says why.

    Args:
        clusters: Clusters of the deployment; `None` for all.
        hosts: All hosts that have registered.
    """
    wanted = None if clusters is None else set(clusters)
    for status in hosts:
        host = status.host
        is_wanted = wanted is None or host.cluster_index in wanted
        if host.role != EDGE_SERVER and not (host.role == CONTROL_UNIT and is_wanted):
            continue
        try:
            yield from _rows_of_host(job_id, status, channels)
        except CollapipeError as error:
            yield Message(host_id=host.host_id, missing=str(error))


def _rows_of_host(
    job_id: str, status: scheduler_pb2.HostStatus, channels: ChannelPool
) -> Iterator[Message]:
    host_id = status.host.host_id
    if not status.alive:
        raise PeerLostError(host_id, f"{host_id} sends no heartbeats: start it again")
    stub = storage_pb2_grpc.StorageServiceStub(channels.channel(status.host.address))
    answers = within_silence(
        stub.DumpRows(storage_pb2.DumpRowsRequest(job_id=job_id), timeout=_MOST_SECONDS),
        _SILENCE_SECONDS,
        host_id,
        lambda: "send its rows",
    )
    num_bytes = 0
    for answer in answers:
        num_bytes += answer.ByteSize() + _ROW_BYTES
        if (answer.table, answer.HasField("round_index")) not in _TABLES:
            raise PeerLostError(
                host_id, f"{host_id} sent a row of a table {answer.table!r:.80}: look at its log"
            )
        if num_bytes > _MOST_BYTES:
            raise PeerLostError(
                host_id,
                f"{host_id} sent {num_bytes} bytes of rows, over the limit of {_MOST_BYTES}: look at its log",
            )
        row = Message(host_id=host_id, table=answer.table, document_json=answer.document_json)
        if answer.HasField("round_index"):
            row.round_index = answer.round_index
        yield row
