import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import torch
from emulated_links import ChangingEmulation, NotingShaper

from collapipe.errors import (
    CorruptDataError,
    InvalidInputError,
    NotFoundError,
    PeerLostError,
    WrongStateError,
)
from collapipe.rpc import ChannelPool, Security, call, serve
from collapipe.tensors import CHUNK_BYTES
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.traffic_shaping.pacing import Traffic
from collapipe.v1.blob_pb2 import FetchBlobRequest, FetchBlobResponse
from collapipe.v1.blob_pb2_grpc import (
    BlobServiceServicer,
    BlobServiceStub,
    add_BlobServiceServicer_to_server,
)
from collapipe.weights.blob_store import BlobStore, JobStores
from collapipe.weights.tensor_blob import TensorBlob
from collapipe.weights.transfer import BlobServicer, fetch_blob

PLAIN = Security.insecure()
DATA = bytes(range(251)) * 12_000  # between two and three chunks
DIGEST = hashlib.sha256(DATA).hexdigest()

Start = Callable[[BlobServiceServicer], str]


@pytest.fixture
def start() -> Iterator[Start]:
    """Serves a servicer on a free port and returns the address."""
    with ExitStack() as servers:

        def start(servicer: BlobServiceServicer) -> str:
            server = serve(
                "127.0.0.1:0",
                PLAIN,
                lambda grpc_server, address: add_BlobServiceServicer_to_server(
                    servicer, grpc_server
                ),
            )
            servers.callback(server.drain, 0)
            return server.address

        yield start


@pytest.fixture
def channels() -> Iterator[ChannelPool]:
    pool = ChannelPool(PLAIN)
    yield pool
    pool.close()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    stores = JobStores(tmp_path)
    stores.store("job").put_bytes(DATA)
    return stores.store("job")


@pytest.fixture
def keeper(tmp_path: Path, store: BlobStore, start: Start) -> str:
    """The address of a host that has the blob on its disk."""
    stores = JobStores(tmp_path)
    stores.store("job")
    return start(BlobServicer(stores.find))


def answer(data: bytes, total_bytes: int | None = None) -> Iterator[FetchBlobResponse]:
    yield FetchBlobResponse(total_bytes=len(DATA) if total_bytes is None else total_bytes)
    for first in range(0, len(data), CHUNK_BYTES):
        yield FetchBlobResponse(chunk=data[first : first + CHUNK_BYTES])


class Host(BlobServiceServicer):
    """Gives one answer after the other, then repeats the last one; records the offsets of the requests."""

    def __init__(self, *answers: Callable[[int], Iterator[FetchBlobResponse]]) -> None:
        self._answers = list(answers)
        self.offsets: list[int] = []

    def FetchBlob(
        self, request: FetchBlobRequest, context: grpc.ServicerContext
    ) -> Iterator[FetchBlobResponse]:
        self.offsets.append(request.offset)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        yield from answer(request.offset)


def breaking_after(count: int) -> Callable[[int], Iterator[FetchBlobResponse]]:
    def answers(offset: int) -> Iterator[FetchBlobResponse]:
        yield from answer(DATA[offset : offset + count])
        raise PeerLostError("", "the machine went away")

    return answers


def whole(offset: int) -> Iterator[FetchBlobResponse]:
    yield from answer(DATA[offset:])


def test_blob_on_disk_arrives(channels: ChannelPool, keeper: str) -> None:
    assert fetch_blob(channels, DIGEST, [keeper]) == DATA


def test_blob_of_tensors_in_memory_arrives(channels: ChannelPool, start: Start) -> None:
    blob = TensorBlob({"large": torch.randn(700, 1000), "small": torch.randn(3)})
    address = start(BlobServicer({blob.digest: blob}.__getitem__))
    assert fetch_blob(channels, blob.digest, [address]) == b"".join(blob.read())


def test_chunks_are_small_and_the_size_comes_first(channels: ChannelPool, keeper: str) -> None:
    stub = BlobServiceStub(channels.channel(keeper))
    first, *others = stub.FetchBlob(FetchBlobRequest(digest=DIGEST, offset=5), timeout=20)
    assert (first.total_bytes, first.chunk) == (len(DATA), b"")
    assert max(len(other.chunk) for other in others) <= CHUNK_BYTES
    assert b"".join(other.chunk for other in others) == DATA[5:]


def test_blob_leaves_over_the_link_to_the_host_that_fetches_it(
    emulation: ChangingEmulation, start: Start
) -> None:
    emulation.set(links={"keeper>fetcher": {"rate_bps": 5000, "delay_seconds": 0.3}})
    shaper = NotingShaper()
    keeper = OutgoingLinks("keeper", emulation.file, shaper)
    blob = TensorBlob({"weight": torch.zeros(50)})
    address = start(BlobServicer({blob.digest: blob}.__getitem__, keeper))
    for fetcher, expected in (("", 0.0), ("fetcher", 5000.0)):
        shaper.waits.clear()
        started = time.monotonic()
        pool = ChannelPool(PLAIN, OutgoingLinks.unlimited(fetcher) if fetcher else None)
        assert fetch_blob(pool, blob.digest, [address]) == b"".join(blob.read())
        pool.close()
        assert sum(num_bytes for num_bytes, _ in shaper.waits) == blob.total_bytes
        assert {rate for _, rate in shaper.waits} == {expected}
        assert not fetcher or time.monotonic() - started >= 0.3
    assert {*shaper.kinds} == {Traffic.WEIGHTS}


def test_transfer_that_broke_off_resumes_where_it_stopped(
    channels: ChannelPool, start: Start
) -> None:
    host = Host(breaking_after(CHUNK_BYTES + 10), breaking_after(100), whole)
    assert fetch_blob(channels, DIGEST, [start(host)]) == DATA
    assert host.offsets == [0, CHUNK_BYTES + 10, CHUNK_BYTES + 110]


def test_next_host_is_tried_when_transfers_from_the_first_keep_breaking_off(
    channels: ChannelPool, start: Start, keeper: str
) -> None:
    host = Host(breaking_after(10), breaking_after(0))
    assert fetch_blob(channels, DIGEST, [start(host), keeper]) == DATA
    assert host.offsets == [0, 10, 10, 10]  # three tries that brought no byte


def test_silent_host_is_lost(channels: ChannelPool, start: Start) -> None:
    over = threading.Event()

    def silent(offset: int) -> Iterator[FetchBlobResponse]:
        yield from answer(b"")
        over.wait(20)

    with pytest.raises(PeerLostError, match=f"send blob {DIGEST}"):
        fetch_blob(channels, DIGEST, [start(Host(silent))], silence_seconds=0.1)
    over.set()


def test_fetch_ends_in_its_middle_when_nobody_wants_the_blob_any_more(
    channels: ChannelPool, start: Start, keeper: str
) -> None:
    over = threading.Event()

    def slow(offset: int) -> Iterator[FetchBlobResponse]:
        yield from answer(DATA[:10])
        over.wait(20)

    def stop(num_bytes: int) -> None:
        raise WrongStateError("a newer attempt took over")

    with pytest.raises(WrongStateError, match="a newer attempt took over"):
        fetch_blob(channels, DIGEST, [start(Host(slow)), keeper], go_on=stop)
    over.set()


def test_next_host_is_tried_when_the_first_lacks_the_blob(
    channels: ChannelPool, start: Start, keeper: str, tmp_path: Path
) -> None:
    empty = start(BlobServicer(JobStores(tmp_path / "other").find))
    assert fetch_blob(channels, DIGEST, [empty, keeper]) == DATA
    with pytest.raises(NotFoundError, match=f"blob {DIGEST} is not stored here"):
        fetch_blob(channels, DIGEST, [empty])


def test_blob_without_an_address_is_not_found(channels: ChannelPool) -> None:
    with pytest.raises(NotFoundError, match=f"no address of a host with blob {DIGEST} is known"):
        fetch_blob(channels, DIGEST, [])


@pytest.mark.parametrize("sent", [DATA[:-1], DATA[:-1] + b"x", b""], ids=["cut", "flipped", "none"])
def test_garbled_blob_is_corrupt(channels: ChannelPool, start: Start, sent: bytes) -> None:
    address = start(Host(lambda offset: answer(sent)))
    with pytest.raises(CorruptDataError, match=f"{DIGEST} arrived garbled from {address}"):
        fetch_blob(channels, DIGEST, [address])


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

    with pytest.raises(CorruptDataError, match=r"sent 120 bytes .* announced 100"):
        fetch_blob(channels, DIGEST, [start(Host(endless))])
    assert ended.wait(20)


def test_size_over_the_limit_is_refused_before_the_bytes_arrive(
    channels: ChannelPool, start: Start
) -> None:
    address = start(Host(lambda offset: answer(DATA, total_bytes=1 << 50)))
    with pytest.raises(CorruptDataError, match=f"announced {1 << 50} bytes"):
        fetch_blob(channels, DIGEST, [address])


def test_offset_beyond_the_end_is_refused(channels: ChannelPool, keeper: str) -> None:
    stub = BlobServiceStub(channels.channel(keeper))

    def read(request: FetchBlobRequest, timeout: float) -> list[FetchBlobResponse]:
        return list(stub.FetchBlob(request, timeout=timeout))

    request = FetchBlobRequest(digest=DIGEST, offset=len(DATA) + 1)
    with pytest.raises(InvalidInputError, match=f"beyond the {len(DATA)} bytes"):
        call(read, request, "the host", 20)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "0" * 63])
def test_name_that_is_no_digest_is_not_found(
    channels: ChannelPool, keeper: str, digest: str
) -> None:
    with pytest.raises(NotFoundError):
        fetch_blob(channels, digest, [keeper])
