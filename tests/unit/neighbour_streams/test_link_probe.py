"""Probes of links: the receiver measures."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.neighbour_streams import link_probe
from collapipe.neighbour_streams.link_probe import LinkServicer, answer_probe
from collapipe.rpc import ChannelPool, Security, call, serve
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.traffic_shaping.pacing import PacedShaper
from collapipe.traffic_shaping.radio_driver import EmulatedRadioDriver
from collapipe.v1 import link_pb2_grpc
from collapipe.v1.link_pb2 import (
    MeasureLinkRequest,
    MeasureLinkResponse,
    ReceiveProbeRequest,
)

PLAIN = Security.insecure()

NOWHERE = EmulationFile(None)


class Pair:
    """Two hosts with one emulation file."""

    def __init__(self, emulation_path: Path) -> None:
        self.emulation_path = emulation_path
        self.set()
        self.channels = ChannelPool(PLAIN)
        self.servers = []
        for host_id in ("probing", "probed"):
            file = EmulationFile(emulation_path)
            links = OutgoingLinks(host_id, file, PacedShaper(), EmulatedRadioDriver(file))
            servicer = LinkServicer(links, self.channels)
            self.servers.append(
                serve(
                    "127.0.0.1:0",
                    PLAIN,
                    lambda server, _, servicer=servicer: (  # type: ignore[misc]
                        link_pb2_grpc.add_LinkServiceServicer_to_server(servicer, server)
                    ),
                )
            )

    def set(self, **sections: object) -> None:
        self.emulation_path.write_text(json.dumps(sections))

    def measure(self, host_id: str = "probed", address: str | None = None) -> MeasureLinkResponse:
        request = MeasureLinkRequest(
            host_id=host_id, address=self.servers[1].address if address is None else address
        )
        stub = link_pb2_grpc.LinkServiceStub(self.channels.channel(self.servers[0].address))
        return call(stub.MeasureLink, request, "the prober", 30.0)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path / "emulation.json")
    yield made
    made.channels.close()
    for server in made.servers:
        server.drain(0)


def metric(name: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"link": "probing>probed"})


def test_probe_measures_and_reports_the_rate_of_an_emulated_wire(pair: Pair) -> None:
    pair.set(links={"probing>probed": {"rate_bps": 4e6}})
    answer = pair.measure()
    assert 1e6 < answer.goodput_bps < 8e6  # A busy machine is slower.
    assert metric("collapipe_link_probed_bps") == answer.goodput_bps
    assert metric("collapipe_link_round_trip_seconds") == answer.round_trip_seconds
    pair.set()
    assert pair.measure().goodput_bps > 2 * answer.goodput_bps


def test_probe_measures_the_rate_of_an_emulated_radio_and_reports_its_state(pair: Pair) -> None:
    # At nominal power, the signal is as strong as the noise in 20 MHz. That gives 1 bit/s for each Hz.
    noise = 4e-21
    radio = {"gain": 20e6 * noise / 0.1, "noise_watts_per_hertz": noise}
    pair.set(radios={"probing>probed": radio})
    answer = pair.measure()
    assert 4e6 < answer.goodput_bps < 40e6
    assert metric("collapipe_radio_channel_gain") == radio["gain"]


def test_round_trip_has_the_delay_of_both_directions(pair: Pair) -> None:
    pair.set(
        links={
            "probing>probed": {"delay_seconds": 0.05},
            "probed>probing": {"delay_seconds": 0.1},
        }
    )
    assert pair.measure().round_trip_seconds >= 0.15
    pair.set()
    assert pair.measure().round_trip_seconds < 0.15


def test_unreachable_host_is_named(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerLostError, match="device-9 cannot be reached") as raised:
        pair.measure("device-9", address)
    assert raised.value.host_id == "device-9"


def test_silent_host_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "_SILENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PeerLostError, match="device-9 has sent no sign of life for 0.2 s"):
            pair.measure("device-9", address)


def test_host_without_the_service_is_refused(pair: Pair) -> None:
    other = serve("127.0.0.1:0", PLAIN, lambda server, address: None)
    with pytest.raises(Exception, match="UNIMPLEMENTED"):
        pair.measure("device-9", other.address)
    other.drain(0)


@pytest.mark.parametrize(
    ("host_id", "address"), [("", "a:1"), ("b", ""), ("b", "a"), ("b", "{}:1")]
)
def test_probe_without_a_host_or_an_address_is_refused(
    pair: Pair, host_id: str, address: str
) -> None:
    with pytest.raises(InvalidInputError, match="a link is measured to a host and its address"):
        pair.measure(host_id, address)


# --- the receiver


def chunk(num_bytes: int) -> ReceiveProbeRequest:
    return ReceiveProbeRequest(host_id="a", chunk=bytes(num_bytes))


LAST = ReceiveProbeRequest(host_id="a", last=True)


def test_rate_counts_the_chunks_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([5.0, 6.0, 7.0, 7.5])
    monkeypatch.setattr(link_probe.time, "perf_counter", lambda: next(now))
    requests = [chunk(999), chunk(1000), chunk(1000), LAST]
    (answer,) = answer_probe(requests, "b", NOWHERE)
    assert answer.goodput_bps == 8 * 2000 / 2.0


def test_long_burst_is_answered_before_its_end_and_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0.0, 1.5, 3.0, 9.0, 9.5])
    monkeypatch.setattr(link_probe.time, "perf_counter", lambda: next(now))
    requests = iter([chunk(1000)] * 4 + [LAST])
    answers = answer_probe(requests, "b", NOWHERE)
    assert next(answers).goodput_bps == 8 * 2000 / 3.0
    assert len(list(requests)) == 2, "the answer does not wait for the rest"

    now = iter([0.0, 1.5, 3.0, 9.0, 9.5])
    requests = iter([chunk(1000)] * 4 + [LAST])
    assert len(list(answer_probe(requests, "b", NOWHERE))) == 1
    assert not list(requests), "the stream ends when the burst has arrived"


def test_large_burst_is_answered_before_its_end() -> None:
    taken = 0

    def endless() -> Iterator[ReceiveProbeRequest]:
        nonlocal taken
        while True:
            taken += 1
            yield chunk(1 << 20)

    (answer,) = answer_probe(endless(), "b", NOWHERE)
    assert answer.goodput_bps > 0
    assert taken <= 10


def test_burst_of_fewer_than_two_chunks_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="less than 2 chunks"):
        list(answer_probe([chunk(1000), LAST], "b", NOWHERE))
    with pytest.raises(InvalidInputError, match="less than 2 chunks"):
        list(answer_probe([LAST], "b", NOWHERE))


def test_too_many_round_trips_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="more than 100 round trips"):
        list(answer_probe([ReceiveProbeRequest(host_id="a")] * 101, "b", NOWHERE))
