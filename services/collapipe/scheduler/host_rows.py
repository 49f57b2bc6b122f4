"""Collects what the edge server and the control units have stored of a job."""

from collections.abc import Iterable, Iterator, Sequence

from collapipe.errors import CollapipeError, PeerLostError
from collapipe.rpc import ChannelPool, within_silence
from collapipe.scheduler.host_registry import CONTROL_UNIT, EDGE_SERVER
from collapipe.storage_service import shorten_digests
from collapipe.v1 import scheduler_pb2, storage_pb2, storage_pb2_grpc

_SILENCE_SECONDS = 10.0
_TABLES = {("job", False), ("last_commit", False), ("round", True)}
"""The tables of hosts, and whether their rows are about a round."""
_MOST_BYTES = 1 << 26
"""Most bytes of a host. Without a limit, its answer could go on for ever. A commit of 1,000 clusters has 10 MB."""
_ROW_BYTES = 100
"""This is added for each message, so that empty messages count, too."""
_MOST_SECONDS = 60.0

Message = scheduler_pb2.DumpJobResponse


def collect_rows(
    job_id: str,
    clusters: Iterable[int] | None,
    hosts: Sequence[scheduler_pb2.HostStatus],
    channels: ChannelPool,
) -> Iterator[Message]:
    """Yields the rows of the edge server and of the control units of some clusters. If a host does not send its rows, a message with
    the reason is yielded in their place.

    Args:
        clusters: Clusters of the deployment; `None` for all.
        hosts: All hosts that have registered.
    """
    hosts = sorted(hosts, key=lambda status: status.alive)  # of namesakes, one that lives
    units = {each.host.cluster_index: each for each in hosts if each.host.role == CONTROL_UNIT}
    edge_servers = [each for each in hosts if each.host.role == EDGE_SERVER]
    wanted = {"the edge server": edge_servers[-1] if edge_servers else None}
    for cluster in sorted(units if clusters is None else clusters):
        wanted[f"the control unit of cluster {cluster}"] = units.get(cluster)
    for name, status in wanted.items():
        if status is None:
            unknown = f"{name} has not registered since the scheduler was started: start it"
            yield Message(host_id=name, missing=unknown)
            continue
        yield Message(host_id=status.host.host_id)  # It may have no rows.
        try:
            yield from _rows_of_host(job_id, status, channels)
        except CollapipeError as error:
            yield Message(host_id=status.host.host_id, missing=shorten_digests(str(error)))


def _rows_of_host(
    job_id: str, status: scheduler_pb2.HostStatus, channels: ChannelPool
) -> Iterator[Message]:
    host_id = status.host.host_id
    if not status.alive:
        why = status.suspicion or status.refusal or "it sends no heartbeats"
        raise PeerLostError(
            host_id, f"{host_id} is not asked, because {why}: look at its log, or start it again"
        )
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
