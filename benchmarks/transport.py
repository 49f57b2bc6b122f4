"""Measures the rate of tensors over a link, and its ratio to raw TCP on loopback.

    python -m benchmarks.transport

Measures both alternately and prints medians. The receiver is a separate process. Frames pass through the
project's own encoding, channel, server and assembler.
"""

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import grpc
import torch

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
from collapipe.stage_runtime import Mailbox
from collapipe.tensors import MAX_BYTES_OF_KINDS, Frame, FrameKind
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.v1 import stage_pb2, stage_pb2_grpc

NO_EMULATION = EmulationFile(None)
SIZES = (1 << 20, 8 << 20, 64 << 20)
REPETITIONS = 7


class Receiver(stage_pb2_grpc.StageServiceServicer):
    """Answers each frame with an empty one."""

    def ExchangeActivations(
        self,
        request_iterator: Iterator[stage_pb2.ExchangeActivationsRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[stage_pb2.ExchangeActivationsResponse]:
        next(request_iterator)
        outbox: Outbox[Frame] = Outbox()

        def acknowledge(frame: Frame) -> None:
            outbox.put(Frame(FrameKind.BACKWARD, frame.step_index, frame.micro_batch))

        links = links_between("receiver", "sender", outbox, acknowledge)
        yield from serve_previous_stage(request_iterator, links, lambda error: None)


def links_between(
    here: str, there: str, outbox: Outbox[Frame], deliver: Callable[[Frame], None]
) -> NeighbourLinks:
    labels = ("0", here)
    outgoing = OutgoingLink(OutgoingLinks.unlimited(here).link_to(there), LinkSettings())
    incoming = IncomingLink(there, here, MAX_BYTES_OF_KINDS, labels, 1, NO_EMULATION, deliver)
    return NeighbourLinks(labels, outbox, outgoing, incoming)


def receive(pipe: Connection) -> None:
    """Runs a gRPC server and a TCP server that acknowledge what they receive."""
    server = serve(
        "127.0.0.1:0",
        Security.insecure(),
        lambda server, _: stage_pb2_grpc.add_StageServiceServicer_to_server(Receiver(), server),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((server.address, listener.getsockname()))
    connection, _ = listener.accept()
    buffer = bytearray(1 << 20)
    while header := connection.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(header, "little")
        while left:
            left -= connection.recv_into(buffer, min(left, len(buffer)))
        connection.sendall(b"!")
    server.drain(0)


def main() -> None:
    """Measures tensors of every size."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(there,))
    process.start()
    grpc_address, tcp_address = here.recv()
    connection = socket.create_connection(tcp_address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mailbox = Mailbox(None)
    channels = ChannelPool(Security.insecure())
    stub = stage_pb2_grpc.StageServiceStub(channels.channel(grpc_address))
    outbox: Outbox[Frame] = Outbox()
    links = links_between("sender", "receiver", outbox, mailbox.put)
    stream = StreamToNextStage(stub, stage_pb2.OpenLink(), links, 30.0, mailbox.fail)
    for size in SIZES:
        tensor = torch.randn(size // 4)
        data = memoryview(tensor.numpy()).cast("B")

        seconds: dict[str, list[float]] = {"tcp": [], "grpc": []}
        for _ in range(REPETITIONS + 1):
            started = time.perf_counter()
            connection.sendall(size.to_bytes(8, "little"))
            connection.sendall(data)
            connection.recv(1)
            seconds["tcp"].append(time.perf_counter() - started)
            started = time.perf_counter()
            outbox.put(Frame(FrameKind.FORWARD, 0, 0, {"activation": tensor}))
            mailbox.take(forward=False, backward=True)
            seconds["grpc"].append(time.perf_counter() - started)
        tcp, link_seconds = (statistics.median(times[1:]) for times in seconds.values())
        print(
            f"{size >> 20:3} MiB: TCP {size / tcp / 1e6:6.0f} MB/s, link {size / link_seconds / 1e6:6.0f} MB/s, "
            f"ratio {tcp / link_seconds:.2f}"
        )
    stream.close(broken=True)
    connection.close()
    channels.close()
    process.join()


if __name__ == "__main__":
    main()
