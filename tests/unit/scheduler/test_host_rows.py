"""The scheduler collects the rows of other services over real gRPC."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collapipe.control_unit.recorded_rows import RecordedRows
from collapipe.errors import CorruptDataError
from collapipe.rpc import ChannelPool
from collapipe.scheduler.host_registry import CONTROL_UNIT, DEVICE_AGENT, EDGE_SERVER
from collapipe.scheduler.host_rows import collect_rows
from collapipe.storage_service import StorageServicer, StoredRow
from collapipe.v1 import scheduler_pb2, storage_pb2_grpc
from collapipe.v1.scheduler_pb2 import DumpJobResponse

from .jobs import serving

ROW = StoredRow("last_commit", None, "x" * 2_500_000)


def status(
    role: int, cluster_index: int, address: str, *, alive: bool = True
) -> scheduler_pb2.HostStatus:
    host_id = f"{role}-{cluster_index}"
    host = scheduler_pb2.Host(
        host_id=host_id, role=role, cluster_index=cluster_index, address=address
    )
    return scheduler_pb2.HostStatus(host=host, alive=alive)


@pytest.fixture
def collect(channels: ChannelPool) -> Callable[..., list[DumpJobResponse]]:
    """Collects what hosts send whose rows come from `dump`, as the job of cluster 0."""

    def collect(
        dump: Callable[[str], Iterator[StoredRow]], *hosts: tuple[int, int, bool]
    ) -> list[DumpJobResponse]:
        servicer = StorageServicer(dump)
        with serving(servicer, storage_pb2_grpc.add_StorageServiceServicer_to_server) as address:
            statuses = [status(role, index, address, alive=alive) for role, index, alive in hosts]
            return list(collect_rows("job", [0], statuses, channels))

    return collect


def test_rows_come_from_the_edge_server_and_the_control_units_of_the_job(
    collect: Callable[..., list[DumpJobResponse]], tmp_path: Path
) -> None:
    rows = RecordedRows(tmp_path)
    rows.record("job", 3, 20, anew_since=1, first_round=0)
    rows.record("other", 4, 99, anew_since=1, first_round=0)
    found = collect(
        rows.dump,
        (EDGE_SERVER, 0, True),
        (CONTROL_UNIT, 0, False),
        (CONTROL_UNIT, 1, True),
        (DEVICE_AGENT, 0, True),
    )
    text = '{"num_rows": 20, "anew_since": 1}'
    [row, missing] = found
    edge_server = f"{EDGE_SERVER}-0"
    assert row == DumpJobResponse(
        host_id=edge_server, table="round", round_index=3, document_json=text
    )
    assert missing.host_id == f"{CONTROL_UNIT}-0" and "start it again" in missing.missing


def test_large_rows_come_in_parts_and_a_damaged_one_is_named(
    collect: Callable[..., list[DumpJobResponse]],
) -> None:
    def dump(job_id: str) -> Iterator[StoredRow]:
        yield ROW
        raise CorruptDataError("the last commit is damaged")

    *parts, missing = collect(dump, (EDGE_SERVER, 0, True))
    assert len(parts) == 3 and "".join(part.document_json for part in parts) == ROW.text
    assert not any(part.HasField("round_index") for part in parts)
    assert "the last commit is damaged" in missing.missing


def test_host_that_sends_without_an_end_is_named(
    collect: Callable[..., list[DumpJobResponse]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapipe.scheduler.host_rows._MOST_BYTES", 10 * len(ROW.text))

    def dump(job_id: str) -> Iterator[StoredRow]:
        while True:
            yield ROW

    *parts, missing = collect(dump, (EDGE_SERVER, 0, True))
    assert len(parts) < 40 and "over the limit" in missing.missing
