"""The scheduler collects the rows of other services over real gRPC."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import grpc
import pytest
from planned_jobs import serving

from collapipe.control_unit.recorded_rows import RecordedRows
from collapipe.errors import CorruptDataError, InvalidInputError
from collapipe.rpc import ChannelPool
from collapipe.scheduler.host_registry import CONTROL_UNIT, DEVICE_AGENT, EDGE_SERVER
from collapipe.scheduler.host_rows import collect_rows
from collapipe.storage_service import DumpedRow, StorageServicer
from collapipe.v1 import scheduler_pb2, storage_pb2, storage_pb2_grpc
from collapipe.v1.scheduler_pb2 import DumpJobResponse
from collapipe.weights.blob_store import JobStores

ROW = DumpedRow("last_commit", None, "x" * 2_500_000)


def status(
    role: int, cluster_index: int, address: str, *, alive: bool = True
) -> scheduler_pb2.HostStatus:
    host_id = f"{role}-{cluster_index}"
    host = scheduler_pb2.Host(
        host_id=host_id, role=role, cluster_index=cluster_index, address=address
    )
    return scheduler_pb2.HostStatus(host=host, alive=alive)


@pytest.fixture
def collect(channels: ChannelPool, tmp_path: Path) -> Callable[..., list[DumpJobResponse]]:
    """Collects what hosts send whose rows come from `dump`, as the job of cluster 0."""

    def collect(
        dump: Callable[[str], Iterator[DumpedRow]], *hosts: tuple[int, int, bool]
    ) -> list[DumpJobResponse]:
        stores = JobStores(tmp_path)
        stores.store("job")
        servicer = StorageServicer(stores, dump)
        with serving(servicer, storage_pb2_grpc.add_StorageServiceServicer_to_server) as address:
            statuses = [status(role, index, address, alive=alive) for role, index, alive in hosts]
            found = collect_rows("job", [0], statuses, channels)
            return [each for each in found if each.table or each.missing]

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


def test_hosts_that_have_not_registered_are_named(
    collect: Callable[..., list[DumpJobResponse]],
) -> None:
    found = collect(lambda job_id: iter(()), (CONTROL_UNIT, 1, True))
    assert [each.host_id for each in found] == [
        "the edge server",
        "the control unit of cluster 0",
    ]
    assert all("start it" in each.missing for each in found)


def test_clients_get_only_the_beginnings_of_digests(
    collect: Callable[..., list[DumpJobResponse]],
) -> None:
    digest = "0123456789abcdef" * 4
    rows = [DumpedRow("job", None, f'{{"digest": "{digest}", "other": "{digest}0"}}')]
    row, _ = collect(lambda job_id: iter(rows), (EDGE_SERVER, 0, True))
    assert row.document_json == f'{{"digest": "0123456789ab...", "other": "{digest}0"}}'


def test_large_rows_come_in_parts_and_a_damaged_one_is_named(
    collect: Callable[..., list[DumpJobResponse]],
) -> None:
    def dump(job_id: str) -> Iterator[DumpedRow]:
        yield ROW
        raise CorruptDataError("the last commit is damaged")

    *parts, missing, _ = collect(dump, (EDGE_SERVER, 0, True))
    assert len(parts) == 3 and "".join(part.document_json for part in parts) == ROW.text
    assert not any(part.HasField("round_index") for part in parts)
    assert "the last commit is damaged" in missing.missing


def test_host_that_sends_without_an_end_is_named(
    collect: Callable[..., list[DumpJobResponse]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapipe.scheduler.host_rows._MOST_BYTES", 10 * len(ROW.text))

    def dump(job_id: str) -> Iterator[DumpedRow]:
        while True:
            yield ROW

    *parts, missing, _ = collect(dump, (EDGE_SERVER, 0, True))
    assert len(parts) < 40 and "over the limit" in missing.missing


def test_host_that_sends_nothing_without_an_end_is_named(
    collect: Callable[..., list[DumpJobResponse]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapipe.scheduler.host_rows._MOST_BYTES", 10_000)

    def dump(job_id: str) -> Iterator[DumpedRow]:
        while True:
            yield DumpedRow("job", None, "")

    *parts, missing, _ = collect(dump, (EDGE_SERVER, 0, True))
    assert len(parts) <= 100 and "over the limit" in missing.missing


@pytest.mark.parametrize(("table", "round_index"), [("missing", None), ("job", 0), ("round", None)])
def test_row_of_another_table_is_refused(
    collect: Callable[..., list[DumpJobResponse]], table: str, round_index: int | None
) -> None:
    def dump(job_id: str) -> Iterator[DumpedRow]:
        yield DumpedRow(table, round_index, "{}")

    refused, _ = collect(dump, (EDGE_SERVER, 0, True))
    assert table in refused.missing


def test_host_without_rows_is_named_and_a_living_namesake_is_asked(
    channels: ChannelPool, tmp_path: Path
) -> None:
    servicer = StorageServicer(JobStores(tmp_path), lambda job_id: iter((ROW,)))
    with serving(servicer, storage_pb2_grpc.add_StorageServiceServicer_to_server) as address:
        statuses = [status(EDGE_SERVER, number, address, alive=number == 1) for number in range(3)]
        found = list(collect_rows("job", [], statuses, channels))
    assert {each.host_id for each in found} == {f"{EDGE_SERVER}-1"}
    assert not found[0].table and found[1].table


@pytest.mark.parametrize("job_id", ["../other", "/other"])
def test_host_reads_nothing_outside_of_the_folders_of_its_jobs(tmp_path: Path, job_id: str) -> None:
    asked: list[str] = []

    def dump(job_id: str) -> Iterator[DumpedRow]:
        asked.append(job_id)
        yield ROW

    servicer = StorageServicer(JobStores(tmp_path), dump)
    context = cast(grpc.ServicerContext, None)
    with pytest.raises(InvalidInputError):
        list(servicer.DumpRows(storage_pb2.DumpRowsRequest(job_id=job_id), context))
    assert asked == []
