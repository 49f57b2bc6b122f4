"""One link that activations and weights share, and a link that is slow for real."""

import hashlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc
import pytest
import torch
from emulated_links import ChangingEmulation
from prometheus_client import REGISTRY

from collapipe.control_unit.stall_detector import StallDetector
from collapipe.emulation.emulation_file import EmulationFile
from collapipe.neighbour_streams.incoming_link import IncomingLink
from collapipe.neighbour_streams.link_settings import LinkSettings
from collapipe.neighbour_streams.outgoing_link import OutgoingLink
from collapipe.neighbour_streams.stream import (
    NeighbourLinks,
    StreamToNextStage,
    serve_previous_stage,
)
from collapipe.rpc import ChannelPool, Outbox, Security, serve
from collapipe.tensors import MAX_BYTES_OF_KINDS, Frame, FrameKind
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.traffic_shaping.pacing import PacedShaper
from collapipe.v1 import blob_pb2_grpc, stage_pb2, stage_pb2_grpc
from collapipe.v1.blob_pb2 import FetchBlobRequest
from collapipe.weights.transfer import BlobServicer

PLAIN = Security.insecure()
RATE_BPS = 4e6
BLOB = bytes(1_500_000)
DIGEST = hashlib.sha256(BLOB).hexdigest()


class Blob:
    total_bytes = len(BLOB)

    def read(self, offset: int = 0) -> Iterator[bytes]:
        yield BLOB[offset:]


@dataclass
class Host(stage_pb2_grpc.StageServiceServicer):
    """A host with its own server, shaper and channels, which notes when frames arrive."""

    name: str
    emulation: EmulationFile
    owned: ExitStack
    arrivals: "queue.SimpleQueue[tuple[float, Frame]]" = field(default_factory=queue.SimpleQueue)
    failures: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links = OutgoingLinks(self.name, self.emulation, PacedShaper())
        self.channels = ChannelPool(PLAIN, self.links)
        self.server = serve("127.0.0.1:0", PLAIN, self._add_services, links=self.links)
        self.owned.callback(self.server.drain, 0)
        self.owned.callback(self.channels.close)

    def _add_services(self, server: grpc.Server, address: str) -> None:
        stage_pb2_grpc.add_StageServiceServicer_to_server(self, server)
        blobs = BlobServicer(lambda digest: Blob(), self.links)
        blob_pb2_grpc.add_BlobServiceServicer_to_server(blobs, server)

    def links_with(self, other: str, outbox: Outbox[Frame]) -> NeighbourLinks:
        self.incoming = IncomingLink(
            other,
            self.name,
            MAX_BYTES_OF_KINDS,
            ("0", self.name),
            100,
            self.emulation,
            lambda frame: self.arrivals.put((time.monotonic(), frame)),
        )
        outgoing = OutgoingLink(self.links.link_to(other), LinkSettings())
        return NeighbourLinks(("0", self.name), outbox, outgoing, self.incoming)

    def ExchangeActivations(
        self,
        request_iterator: Iterator[stage_pb2.ExchangeActivationsRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[stage_pb2.ExchangeActivationsResponse]:
        next(request_iterator)
        outbox: Outbox[Frame] = Outbox()
        context.add_callback(outbox.close)  # otherwise the thread of this call never ends
        links = self.links_with("shared-a", outbox)
        yield from serve_previous_stage(request_iterator, links, self.failures.append)

    def open_stream(self, receiver: str, address: str) -> Outbox[Frame]:
        outbox: Outbox[Frame] = Outbox()
        stub = stage_pb2_grpc.StageServiceStub(self.channels.channel(address))
        links = self.links_with(receiver, outbox)
        stream = StreamToNextStage(stub, stage_pb2.OpenLink(), links, 30.0, self.failures.append)
        self.owned.callback(stream.close, broken=True)
        return outbox


MakeHost = Callable[[str], Host]


@pytest.fixture
def make_host(emulation: ChangingEmulation) -> Iterator[MakeHost]:
    with ExitStack() as owned:
        yield lambda name: Host(name, EmulationFile(emulation.path), owned)


def frame(num_bytes: int, number: int = 0) -> Frame:
    return Frame(FrameKind.FORWARD, 0, number, {"activation": torch.randn(num_bytes // 4)})


def test_activations_go_first_on_the_link_and_weights_get_what_is_left(
    emulation: ChangingEmulation, make_host: MakeHost
) -> None:
    emulation.set(links={"shared-a>shared-b": {"rate_bps": RATE_BPS}})
    sender, receiver = make_host("shared-a"), make_host("shared-b")
    receiver.links.link_to("shared-a", sender.server.address)
    outbox = sender.open_stream("shared-b", receiver.server.address)
    came: list[tuple[float, int]] = []

    def fetch() -> None:
        channel = receiver.channels.channel(sender.server.address)
        for answer in blob_pb2_grpc.BlobServiceStub(channel).FetchBlob(
            FetchBlobRequest(digest=DIGEST), timeout=100
        ):
            came.append((time.monotonic(), len(answer.chunk)))

    fetching = threading.Thread(target=fetch)
    started = time.monotonic()
    fetching.start()
    while len(came) < 5:
        time.sleep(0.001)
    num_frames, frame_bytes = 10, 100_000
    first_at = time.monotonic()
    for number in range(num_frames):
        outbox.put(frame(frame_bytes, number))
    last_at = [receiver.arrivals.get(timeout=100)[0] for _ in range(num_frames)][-1]
    fetching.join()
    ended = time.monotonic()

    activation_bytes = num_frames * frame_bytes
    beside = sum(size for moment, size in came if first_at < moment < last_at)
    assert beside < 0.3 * activation_bytes
    assert sum(size for _, size in came) == len(BLOB)
    # Nothing is faster than the link, alone or together. A busy machine may be slower.
    activation_bps = 8 * activation_bytes / (last_at - first_at)
    together_bps = 8 * (activation_bytes + len(BLOB)) / (ended - started)
    assert 0.5 * RATE_BPS < activation_bps < 1.1 * RATE_BPS
    assert 0.5 * RATE_BPS < together_bps < 1.1 * RATE_BPS
    # The receiver measures the rate of the link, not what the weights leave of it.
    values = {
        name: REGISTRY.get_sample_value(
            f"collapipe_link_transfer_{name}_total", {"link": "shared-a>shared-b", **labels}
        )
        for name, labels in (("bytes", {"codec": "fp32"}), ("seconds", {}))
    }
    assert 0.6 * RATE_BPS < 8 * (values["bytes"] or 0) / (values["seconds"] or 1) < 1.2 * RATE_BPS


class SlowRelay:
    """A TCP connection that carries only some bits a second in one direction."""

    def __init__(self, address: str, rate_bps: float) -> None:
        self._rate_bps = rate_bps
        self._listener = socket.socket()
        # The kernel must not take the whole frame at once. A smaller buffer makes it lose packets and wait for seconds.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._target = address
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _run(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        host, _, port = self._target.rpartition(":")
        far = socket.create_connection((host, int(port)))
        threading.Thread(target=self._copy, args=(far, near, None), daemon=True).start()
        self._copy(near, far, self._rate_bps)

    def _copy(self, source: socket.socket, target: socket.socket, rate_bps: float | None) -> None:
        with source, target:
            try:
                while data := source.recv(500):
                    if rate_bps:
                        time.sleep(8 * len(data) / rate_bps)
                    target.sendall(data)
            except OSError:
                return


def test_link_of_64_kbit_s_never_seems_silent(make_host: MakeHost) -> None:
    sender, receiver = make_host("shared-a"), make_host("slow-b")
    relay = SlowRelay(receiver.server.address, 64e3)
    sender.owned.callback(relay.close)
    # The frame takes ten seconds, which is twice the silence that counts as a stall.
    detector = StallDetector(silence_seconds=5.0)
    sender.open_stream("slow-b", relay.address).put(frame(80_000))
    received = 0
    while received < 80_000:
        incoming = getattr(receiver, "incoming", None)
        received = incoming.received_bytes if incoming else 0
        assert not detector.is_stalled("device-0-0 waits for a frame", received)
        assert not receiver.failures
        time.sleep(0.02)
    assert receiver.arrivals.get(timeout=30)[1].micro_batch == 0
