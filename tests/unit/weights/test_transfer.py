"""What hosts fetch from each other and push to the edge server, also over links that break."""

import hashlib
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import torch
from emulated_links import ChangingEmulation, NotingShaper

from collapipe.edge_server.push_stream import PushStream, receive_push
from collapipe.edge_server.pushed_units import PushedUnits
from collapipe.errors import (
    InvalidInputError,
    NotFoundError,
    PeerFaultyError,
    PeerLostError,
    WrongStateError,
)
from collapipe.job import AveragingConfig
from collapipe.rpc import ChannelPool, Security, call, serve
from collapipe.tensors import CHUNK_BYTES
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.traffic_shaping.pacing import Traffic
from collapipe.v1 import blob_pb2_grpc, edge_server_pb2_grpc
from collapipe.v1.blob_pb2 import FetchBlobRequest, FetchBlobResponse
from collapipe.v1.edge_server_pb2 import PushedUnit, PushUnitRequest, PushUnitResponse
from collapipe.v1.job_pb2 import BlobSource
from collapipe.v1.plan_pb2 import Attempt
from collapipe.weights import transfer
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import BlobStore, JobStores, StoredBlob
from collapipe.weights.tensor_blob import TensorBlob
from collapipe.weights.transfer import BlobServicer, fetch_blob, fetch_vocabulary, push_unit

PLAIN = Security.insecure()
DATA = bytes(range(251)) * 12_000  # between two and three chunks
DIGEST = hashlib.sha256(DATA).hexdigest()
LIMIT_SECONDS = 60.0

Servicer = blob_pb2_grpc.BlobServiceServicer | edge_server_pb2_grpc.EdgeServerServiceServicer
Start = Callable[[Servicer], str]
Answers = Callable[[int], Iterator[FetchBlobResponse]]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PAUSE_SECONDS", 0.0)


@pytest.fixture
def start() -> Iterator[Start]:
    """Serves a servicer on a free port and returns the address."""
    with ExitStack() as servers:

        def start(servicer: Servicer) -> str:
            def add(server: grpc.Server, address: str) -> None:
                if isinstance(servicer, blob_pb2_grpc.BlobServiceServicer):
                    blob_pb2_grpc.add_BlobServiceServicer_to_server(servicer, server)
                else:
                    edge_server_pb2_grpc.add_EdgeServerServiceServicer_to_server(servicer, server)

            server = serve("127.0.0.1:0", PLAIN, add)
            servers.callback(server.drain, 0)
            return server.address

        yield start


@pytest.fixture
def channels() -> Iterator[ChannelPool]:
    pool = ChannelPool(PLAIN)
    yield pool
    pool.close()


@pytest.fixture
def keeper(tmp_path: Path, start: Start) -> str:
    """The address of a host that has the blob on its disk."""
    stores = JobStores(tmp_path)
    stores.store("job").put_bytes(DATA)
    return start(BlobServicer(stores.find))


def answer(data: bytes, total_bytes: int = len(DATA)) -> Iterator[FetchBlobResponse]:
    yield FetchBlobResponse(total_bytes=total_bytes)
    for first in range(0, len(data), CHUNK_BYTES):
        yield FetchBlobResponse(chunk=data[first : first + CHUNK_BYTES])


class Host(blob_pb2_grpc.BlobServiceServicer):
    """Gives one answer after the other, then repeats the last one; records the offsets of the requests."""

    def __init__(self, *answers: Answers) -> None:
        self._answers = list(answers)
        self.offsets: list[int] = []

    def FetchBlob(
        self, request: FetchBlobRequest, context: grpc.ServicerContext
    ) -> Iterator[FetchBlobResponse]:
        self.offsets.append(request.offset)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        yield from answer(request.offset)


def breaking_after(count: int) -> Answers:
    def answers(offset: int) -> Iterator[FetchBlobResponse]:
        yield from answer(DATA[offset : offset + count])
        raise PeerLostError("", "the machine went away")

    return answers


@pytest.fixture
def silent() -> Iterator[Host]:
    """A host that sends ten bytes and then nothing."""
    over = threading.Event()

    def answers(offset: int) -> Iterator[FetchBlobResponse]:
        yield from answer(DATA[offset:10])
        over.wait(LIMIT_SECONDS)

    yield Host(answers)
    over.set()


# --- fetching


def test_blob_of_tensors_in_memory_leaves_over_the_link_to_the_host_that_fetches_it(
    emulation: ChangingEmulation, start: Start
) -> None:
    emulation.set(links={"keeper>fetcher": {"rate_bps": 5000}})
    shaper = NotingShaper()
    keeper = OutgoingLinks("keeper", emulation.file, shaper)
    blob = TensorBlob({"weight": torch.randn(50), "small": torch.randn(3)})
    address = start(BlobServicer({blob.digest: blob}.__getitem__, keeper))
    for fetcher, expected in (("", 0.0), ("fetcher", 5000.0)):
        shaper.waits.clear()
        pool = ChannelPool(PLAIN, OutgoingLinks.unlimited(fetcher) if fetcher else None)
        assert fetch_blob(pool, blob.digest, [address]) == b"".join(blob.read())
        pool.close()
        assert sum(num_bytes for num_bytes, _ in shaper.waits) == blob.total_bytes
        assert {*shaper.rates} == {expected}
    assert {*shaper.kinds} == {Traffic.WEIGHTS}


def test_chunks_are_small_and_the_size_comes_first(channels: ChannelPool, keeper: str) -> None:
    stub = blob_pb2_grpc.BlobServiceStub(channels.channel(keeper))
    request = FetchBlobRequest(digest=DIGEST, offset=5)
    first, *others = stub.FetchBlob(request, timeout=LIMIT_SECONDS)
    assert (first.total_bytes, first.chunk) == (len(DATA), b"")
    assert max(len(other.chunk) for other in others) <= CHUNK_BYTES
    assert b"".join(other.chunk for other in others) == DATA[5:]


def test_fetch_that_broke_off_resumes_where_it_stopped(channels: ChannelPool, start: Start) -> None:
    def whole(offset: int) -> Iterator[FetchBlobResponse]:
        yield from answer(DATA[offset:])

    host = Host(breaking_after(CHUNK_BYTES + 10), breaking_after(100), whole)
    assert fetch_blob(channels, DIGEST, [start(host)]) == DATA
    assert host.offsets == [0, CHUNK_BYTES + 10, CHUNK_BYTES + 110]


def test_next_host_is_tried_when_transfers_from_the_first_keep_breaking_off(
    channels: ChannelPool, start: Start, keeper: str
) -> None:
    host = Host(breaking_after(10), breaking_after(0))
    assert fetch_blob(channels, DIGEST, [start(host), keeper]) == DATA
    assert host.offsets == [0, 10, 10, 10]  # three tries that brought no byte


def test_silent_host_is_lost(channels: ChannelPool, start: Start, silent: Host) -> None:
    with pytest.raises(PeerLostError, match=DIGEST):
        fetch_blob(channels, DIGEST, [start(silent)], silence_seconds=0.01)


def test_fetch_ends_in_its_middle_when_nobody_wants_the_blob_any_more(
    channels: ChannelPool, start: Start, keeper: str, silent: Host
) -> None:
    def stop(num_bytes: int) -> None:
        raise WrongStateError("a newer attempt took over")

    with pytest.raises(WrongStateError, match="newer attempt"):
        fetch_blob(channels, DIGEST, [start(silent), keeper], go_on=stop)


def test_next_host_is_tried_when_the_first_lacks_the_blob(
    channels: ChannelPool, start: Start, keeper: str, tmp_path: Path
) -> None:
    empty = start(BlobServicer(JobStores(tmp_path / "other").find))
    assert fetch_blob(channels, DIGEST, [empty, keeper]) == DATA
    for addresses in ([empty], []):
        with pytest.raises(NotFoundError, match=DIGEST):
            fetch_blob(channels, DIGEST, addresses)


@pytest.mark.parametrize(
    ("sent", "total_bytes", "named"),
    [
        (DATA[:-1], len(DATA), DIGEST),
        (DATA[:-1] + b"x", len(DATA), DIGEST),
        (b"", len(DATA), DIGEST),
        (DATA, 1 << 50, f"{1 << 50} bytes"),
    ],
    ids=["cut", "flipped", "none", "size over the limit"],
)
def test_garbled_blob_is_corrupt(
    channels: ChannelPool, start: Start, sent: bytes, total_bytes: int, named: str
) -> None:
    address = start(Host(lambda offset: answer(sent, total_bytes)))
    with pytest.raises(PeerFaultyError, match=named) as refused:
        fetch_blob(channels, DIGEST, [address])
    assert address in str(refused.value)
    assert refused.value.host_id == address


def test_host_that_sends_a_garbled_blob_is_named_and_not_the_one_that_lacks_it(
    channels: ChannelPool, start: Start, tmp_path: Path
) -> None:
    garbling = start(Host(lambda offset: answer(DATA[:-1] + b"x")))
    lacking = start(BlobServicer(JobStores(tmp_path / "other").find))
    with pytest.raises(PeerFaultyError, match=garbling) as refused:
        fetch_blob(channels, DIGEST, [garbling, lacking])
    assert refused.value.host_id == garbling


def test_host_that_must_have_a_blob_is_named_if_no_host_has_it(
    channels: ChannelPool, start: Start, tmp_path: Path
) -> None:
    first, last = (start(BlobServicer(JobStores(tmp_path / name).find)) for name in "ab")
    with pytest.raises(PeerFaultyError, match=f"{first} .*{last}") as refused:
        fetch_blob(channels, DIGEST, [first, last], holder=first)
    assert refused.value.host_id == first


def test_link_that_garbles_once_costs_a_second_transfer(
    channels: ChannelPool, start: Start
) -> None:
    host = Host(lambda offset: answer(DATA[:-1] + b"x"), lambda offset: answer(DATA))
    assert fetch_blob(channels, DIGEST, [start(host)]) == DATA
    assert host.offsets == [0, 0]


def test_damaged_file_is_named_by_the_host_that_has_it(
    channels: ChannelPool, start: Start, tmp_path: Path
) -> None:
    stores = JobStores(tmp_path)
    path = stores.store("job").path(stores.store("job").put_bytes(DATA))
    path.write_bytes(DATA[:-1] + b"x")
    address = start(BlobServicer(stores.find))
    with pytest.raises(NotFoundError, match=f"{path} is damaged.*restore the file"):
        fetch_blob(channels, DIGEST, [address])


def test_damaged_frozen_weights_are_deleted_so_that_the_next_attempt_makes_them_again(
    channels: ChannelPool, start: Start, tmp_path: Path
) -> None:
    cache = BlobCache(tmp_path)
    path = cache.file(DIGEST, lambda store: store.put(DIGEST, [DATA]))
    path.write_bytes(b"damaged")
    with pytest.raises(NotFoundError, match=f"{path} is damaged"):
        fetch_blob(channels, DIGEST, [start(BlobServicer(cache.find))])
    assert DIGEST not in cache


def test_damaged_vocabulary_is_fetched_again_once(
    channels: ChannelPool, keeper: str, tmp_path: Path
) -> None:
    store = BlobStore(tmp_path / "own")
    store.path(DIGEST).write_bytes(b"damaged")
    source = BlobSource(digest=DIGEST, address=keeper)
    assert fetch_vocabulary(store, channels, source) == DATA
    assert store.read_checked(DIGEST) == DATA


def test_damaged_vocabulary_of_the_only_host_that_has_it_is_named(
    channels: ChannelPool, keeper: str, tmp_path: Path
) -> None:
    store = JobStores(tmp_path).store("job")
    path = store.path(DIGEST)
    path.write_bytes(b"damaged")
    with pytest.raises(NotFoundError, match=f"{path} is damaged"):
        fetch_vocabulary(store, channels, BlobSource(digest=DIGEST, address=keeper))
    assert path.exists()


def test_more_bytes_than_announced_are_refused_as_they_arrive(
    channels: ChannelPool, start: Start
) -> None:
    ended = threading.Event()

    def endless(offset: int) -> Iterator[FetchBlobResponse]:
        try:
            yield FetchBlobResponse(total_bytes=100)
            while True:
                yield FetchBlobResponse(chunk=bytes(60))
        finally:
            ended.set()

    with pytest.raises(PeerFaultyError, match=r"120 bytes .* 100"):
        fetch_blob(channels, DIGEST, [start(Host(endless))])
    assert ended.wait(LIMIT_SECONDS)


def test_empty_pieces_are_refused_because_they_could_go_on_for_ever(
    channels: ChannelPool, start: Start
) -> None:
    def empty(offset: int) -> Iterator[FetchBlobResponse]:
        yield FetchBlobResponse(total_bytes=len(DATA))
        yield FetchBlobResponse()
        yield from answer(DATA)

    with pytest.raises(PeerFaultyError, match="sent 0 bytes"):
        fetch_blob(channels, DIGEST, [start(Host(empty))])


def test_offset_beyond_the_end_is_refused(channels: ChannelPool, keeper: str) -> None:
    stub = blob_pb2_grpc.BlobServiceStub(channels.channel(keeper))

    def read(request: FetchBlobRequest, timeout: float) -> list[FetchBlobResponse]:
        return list(stub.FetchBlob(request, timeout=timeout))

    request = FetchBlobRequest(digest=DIGEST, offset=len(DATA) + 1)
    with pytest.raises(InvalidInputError, match=f"{len(DATA) + 1} .* {len(DATA)} bytes"):
        call(read, request, "the host", LIMIT_SECONDS)


# --- pushing

BLOB = TensorBlob({"x": torch.randn(10 * CHUNK_BYTES // 4)})
UNIT = PushedUnit(attempt=Attempt(job_id="job"), num_samples=1, total_bytes=BLOB.total_bytes)


class Edge(edge_server_pb2_grpc.EdgeServerServiceServicer):
    """Receives pushes as the edge server does, and records where each stream began.

    Args:
        answers: Answers that each stream gives before it breaks off; the last number stands for all later streams.
    """

    def __init__(self, directory: Path, *answers: int) -> None:
        def find(*_: object) -> Path:
            return directory

        sizes, averaging = [BLOB.total_bytes], AveragingConfig()
        self._pushed = PushedUnits(directory / "pushed", 1, sizes, find, find, averaging)
        self._answers = list(answers)
        self.offsets: list[int] = []
        self.goes_on = threading.Event()
        """A stream that breaks off waits for this event before."""
        self.goes_on.set()

    def PushUnit(
        self, request_iterator: Iterator[PushUnitRequest], context: grpc.ServicerContext
    ) -> Iterator[PushUnitResponse]:
        left = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        for answer in receive_push(request_iterator, self._begin):
            if not left:
                self.goes_on.wait(LIMIT_SECONDS)
                raise PeerLostError("", "the machine went away")
            left -= 1
            yield answer

    def _begin(self, unit: PushedUnit) -> PushStream:
        stream = self._pushed.begin(unit)
        self.offsets.append(stream.received_bytes)
        return stream


def test_push_that_broke_off_continues_at_the_byte_where_it_stopped(
    channels: ChannelPool, start: Start, tmp_path: Path
) -> None:
    edge = Edge(tmp_path, 2, 1000)
    reports: list[int] = []
    push_unit(channels, start(edge), UNIT, BLOB, LIMIT_SECONDS, reports.append)
    first, second = edge.offsets
    assert first == 0 < second < BLOB.total_bytes
    assert {0, second, BLOB.total_bytes} <= {*reports}
    assert reports == sorted(reports)


def test_push_is_given_up_after_three_tries_that_brought_no_byte(
    channels: ChannelPool, start: Start, tmp_path: Path
) -> None:
    edge = Edge(tmp_path, 2, 0)
    with pytest.raises(PeerLostError, match="machine went away"):
        push_unit(channels, start(edge), UNIT, BLOB, LIMIT_SECONDS)
    assert len(edge.offsets) == 4


def test_sender_is_at_most_2_mib_ahead_of_the_edge_server(
    channels: ChannelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    ahead: list[int] = []

    class LateAnswers:
        """The edge server answers only when the sender waits for it."""

        def __init__(self) -> None:
            self._reached = 0

        def put(self, received_bytes: int | None) -> None:
            pass

        def get(self) -> int:
            ahead.append(sum(sent) - self._reached)
            self._reached = sum(sent)
            return self._reached

    class Call:
        def __init__(self, requests: Iterator[PushUnitRequest]) -> None:
            self._requests = requests

        def __iter__(self) -> Iterator[PushUnitResponse]:
            for request in self._requests:
                sent.append(len(request.chunk))
            yield PushUnitResponse(received_bytes=sum(sent), complete=True)

        def cancel(self) -> None:
            pass

    stubs = SimpleNamespace(EdgeServerServiceStub=lambda channel: SimpleNamespace(PushUnit=Call))
    monkeypatch.setattr(transfer, "queue", SimpleNamespace(SimpleQueue=LateAnswers))
    monkeypatch.setattr(transfer, "edge_server_pb2_grpc", stubs)
    push_unit(channels, "127.0.0.1:9", UNIT, BLOB, LIMIT_SECONDS)
    assert sum(sent) == BLOB.total_bytes
    assert CHUNK_BYTES < max(ahead) <= 2 * CHUNK_BYTES


def test_silent_edge_server_is_lost(channels: ChannelPool, start: Start, tmp_path: Path) -> None:
    edge = Edge(tmp_path, 0)
    edge.goes_on.clear()
    with pytest.raises(PeerLostError, match="unit 0"):
        push_unit(channels, start(edge), UNIT, BLOB, silence_seconds=0.01)
    edge.goes_on.set()


def test_blob_is_in_memory_once_while_it_is_fetched(
    channels: ChannelPool, start: Start, tmp_path: Path
) -> None:
    store = BlobStore(tmp_path)
    data = bytes(32 << 20)
    digest = store.put_bytes(data)
    address = start(BlobServicer(lambda digest: StoredBlob(store, digest)))
    tracemalloc.start()
    try:
        assert fetch_blob(channels, digest, [address]) == data
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1.6 * len(data)  # Pieces that are joined at the end take twice the size.
