"""Transfers of blobs over slow links, long links and links that break."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from collapipe.edge_server.push_stream import PushStream, receive_push
from collapipe.edge_server.pushed_units import PushedUnits
from collapipe.errors import PeerLostError
from collapipe.job import AveragingConfig
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.v1 import blob_pb2_grpc, edge_server_pb2_grpc
from collapipe.v1.edge_server_pb2 import PushedUnit, PushUnitRequest, PushUnitResponse
from collapipe.v1.plan_pb2 import Attempt
from collapipe.weights.tensor_blob import TensorBlob
from collapipe.weights.transfer import BlobServicer, fetch_blob, push_unit

from .relays import Relay, relay

PLAIN = Security.insecure()
SLOW_BPS = 64_000
SILENCE_SECONDS = 5.0
MOST_BYTES = 10 << 20
"""No blob of the tests has more bytes of tensors."""


class Edge(edge_server_pb2_grpc.EdgeServerServiceServicer):
    """Receives pushes as the edge server does, and records where each stream began."""

    def __init__(self, directory: Path) -> None:
        self.pushed = PushedUnits(
            directory / "pushed",
            1,
            [MOST_BYTES],
            lambda *_: directory,
            lambda *_: directory,
            AveragingConfig(),
        )
        self.offsets: list[int] = []
        self.stop = threading.Event()
        self.is_silent = False
        self.acknowledges = True
        """Otherwise, only the first answer of a stream is sent."""

    def PushUnit(
        self, request_iterator: Iterator[PushUnitRequest], context: grpc.ServicerContext
    ) -> Iterator[PushUnitResponse]:
        for number, answer in enumerate(receive_push(request_iterator, self._begin)):
            if self.is_silent and self.stop.wait(30):
                return
            if self.acknowledges or number == 0:
                yield answer

    def _begin(self, unit: PushedUnit) -> PushStream:
        stream = self.pushed.begin(unit)
        self.offsets.append(stream.received_bytes)
        return stream


@pytest.fixture
def edge(tmp_path: Path) -> Iterator[tuple[Edge, str]]:
    """An edge server that receives pushes and serves the blob of `blob_of(20_000)`, and its address."""
    servicer, blob = Edge(tmp_path), blob_of(20_000)

    def add_services(server: grpc.Server, address: str) -> None:
        edge_server_pb2_grpc.add_EdgeServerServiceServicer_to_server(servicer, server)
        blob_pb2_grpc.add_BlobServiceServicer_to_server(
            BlobServicer({blob.digest: blob}.__getitem__), server
        )

    server = serve("127.0.0.1:0", PLAIN, add_services)
    yield servicer, server.address
    servicer.stop.set()
    server.drain(0)


@pytest.fixture
def channels() -> Iterator[ChannelPool]:
    pool = ChannelPool(PLAIN)
    yield pool
    pool.close()


def blob_of(num_values: int) -> TensorBlob:
    return TensorBlob({"x": torch.randn(num_values, generator=torch.Generator().manual_seed(1))})


def push(channels: ChannelPool, through: Relay, blob: TensorBlob, silence: float) -> None:
    unit = PushedUnit(attempt=Attempt(job_id="job"), num_samples=1, total_bytes=blob.total_bytes)
    push_unit(channels, through.address, unit, blob, silence)


def test_push_over_a_slow_link_is_not_given_up(
    channels: ChannelPool, edge: tuple[Edge, str]
) -> None:
    servicer, address = edge
    with relay(address, SLOW_BPS) as slow:
        push(channels, slow, blob_of(12_000), SILENCE_SECONDS)  # 6 s at this rate
    assert servicer.offsets == [0]


def test_push_that_broke_off_continues_at_the_byte_where_it_stopped(
    channels: ChannelPool, edge: tuple[Edge, str]
) -> None:
    servicer, address = edge
    blob = blob_of(20_000)
    with relay(address, 8 * SLOW_BPS) as slow:
        slow.cut_after_bytes = 40_000
        push(channels, slow, blob, SILENCE_SECONDS)
        assert slow.num_connections == 2
        # The second connection did not carry the first bytes again.
        assert slow.forwarded_bytes < blob.total_bytes + 30_000
    assert len(servicer.offsets) == 2
    assert 10_000 < servicer.offsets[1] < 40_000


def test_fetch_that_broke_off_continues_at_the_byte_where_it_stopped(
    channels: ChannelPool, edge: tuple[Edge, str]
) -> None:
    _, address = edge
    blob = blob_of(20_000)
    with relay(address, 8 * SLOW_BPS) as slow:
        slow.cut_after_bytes = 40_000
        data = fetch_blob(channels, blob.digest, [slow.address], SILENCE_SECONDS)
        assert slow.num_connections == 2
        assert slow.forwarded_bytes < blob.total_bytes + 30_000
    assert data == b"".join(blob.read())


def test_blobs_cross_a_link_with_a_long_round_trip(
    channels: ChannelPool, edge: tuple[Edge, str]
) -> None:
    servicer, address = edge
    blob = blob_of(20_000)
    with relay(address, delay_seconds=0.3) as far:
        assert fetch_blob(channels, blob.digest, [far.address], SILENCE_SECONDS)
        push(channels, far, blob, SILENCE_SECONDS)
    assert servicer.offsets == [0]


def test_edge_server_that_receives_nothing_is_lost(
    channels: ChannelPool, edge: tuple[Edge, str]
) -> None:
    servicer, address = edge
    servicer.is_silent = True
    with relay(address) as direct, pytest.raises(PeerLostError, match="receive unit 0"):
        push(channels, direct, blob_of(100), silence=0.2)
    assert len(servicer.offsets) == 3  # every try stopped before its first byte


def test_sender_is_at_most_2_mib_ahead_of_the_edge_server(
    channels: ChannelPool, edge: tuple[Edge, str]
) -> None:
    servicer, address = edge
    servicer.acknowledges = False
    blob = blob_of(MOST_BYTES // 4)
    with relay(address) as direct, pytest.raises(PeerLostError):
        push(channels, direct, blob, silence=0.5)
    steps = [end - begin for begin, end in itertools.pairwise(servicer.offsets)]
    assert servicer.offsets[-1] == blob.total_bytes
    assert 1 << 20 < max(steps) <= 2 << 20


def test_fast_push_is_acknowledged_before_it_must_wait(
    channels: ChannelPool, edge: tuple[Edge, str]
) -> None:
    servicer, address = edge
    with relay(address) as direct:
        push(channels, direct, blob_of(MOST_BYTES // 4), SILENCE_SECONDS)
    assert servicer.offsets == [0]
