"""Probes of links over real gRPC: each host takes part in one probe at a time."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest

from collapipe.errors import InvalidInputError
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.scheduler.host_registry import JobHosts
from collapipe.scheduler.profiling import probe_links
from collapipe.scheduler.round_problem import link_pairs
from collapipe.v1 import link_pb2, link_pb2_grpc

from .jobs import hosts

PROBE_SECONDS = 0.02
UNREACHABLE = "device-1"


class Probed(link_pb2_grpc.LinkServiceServicer):
    """A host whose probes take some time and are recorded."""

    def __init__(self, host_id: str, record: "Record") -> None:
        self._host_id, self._record = host_id, record

    def MeasureLink(
        self, request: link_pb2.MeasureLinkRequest, context: grpc.ServicerContext
    ) -> link_pb2.MeasureLinkResponse:
        with self._record.record_probe({self._host_id, request.host_id}):
            time.sleep(PROBE_SECONDS)
        if self._host_id == UNREACHABLE:
            raise InvalidInputError("this host cannot send")
        return link_pb2.MeasureLinkResponse(goodput_bps=1e6, round_trip_seconds=0.01)


class Record:
    """The hosts that are being probed, and the probes that met a busy host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: list[str] = []
        self.clashes: list[set[str]] = []
        self.most_at_once = 0

    def record_probe(self, ends: set[str]) -> ExitStack:
        with self._lock:
            if ends & set(self._busy):
                self.clashes.append(ends)
            self._busy += ends
            self.most_at_once = max(self.most_at_once, len(self._busy) // 2)
        stack = ExitStack()
        stack.callback(self._done, ends)
        return stack

    def _done(self, ends: set[str]) -> None:
        with self._lock:
            for end in ends:
                self._busy.remove(end)


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def served(record: Record) -> Iterator[JobHosts]:
    of = hosts(num_devices=4)
    servers = []
    for host in (of.edge_server, of.clusters[0].control_unit, *of.clusters[0].devices):
        servicer = Probed(host.host_id, record)
        server = serve(
            "127.0.0.1:0",
            Security.insecure(),
            lambda server, _, servicer=servicer: (  # type: ignore[misc]
                link_pb2_grpc.add_LinkServiceServicer_to_server(servicer, server)
            ),
        )
        host.address = server.address
        servers.append(server)
    yield of
    for server in servers:
        server.drain(0)


def test_every_link_is_probed_and_no_host_takes_part_in_two_probes_at_a_time(
    served: JobHosts, record: Record
) -> None:
    channels = ChannelPool(Security.insecure())
    found = probe_links(served, channels)
    channels.close()
    pairs = link_pairs(served.clusters[0], served.edge_server)
    assert found.keys() == {f"{sender}>{receiver}" for sender, receiver in pairs}
    assert record.clashes == []
    assert record.most_at_once > 1, "probes without a common host run at the same time"


def test_link_whose_probe_fails_has_no_capacity(served: JobHosts) -> None:
    channels = ChannelPool(Security.insecure())
    found = probe_links(served, channels)
    channels.close()
    for name, link in found.items():
        assert link.capacity_bps == (0.0 if name.startswith(f"{UNREACHABLE}>") else 1e6)
