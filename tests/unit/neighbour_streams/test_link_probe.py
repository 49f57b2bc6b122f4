"""Probes of links: the receiver measures."""

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from emulated_links import ChangingEmulation, NotingShaper
from prometheus_client import REGISTRY

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.neighbour_streams import link_probe
from collapipe.neighbour_streams.link_probe import LinkServicer, answer_probe
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.traffic_shaping.pacing import Traffic
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
    """Two hosts with one emulation file. The shaper of the first one notes what it is to wait for."""

    def __init__(self, emulation: ChangingEmulation) -> None:
        self.shaper = NotingShaper()
        self.channels = ChannelPool(PLAIN)
        self.prober, probed = (
            LinkServicer(
                OutgoingLinks(
                    host_id, emulation.file, self.shaper, EmulatedRadioDriver(emulation.file)
                ),
                self.channels,
            )
            for host_id in ("probing", "probed")
        )
        self.server = serve(
            "127.0.0.1:0",
            PLAIN,
            lambda server, _: link_pb2_grpc.add_LinkServiceServicer_to_server(probed, server),
        )

    def measure(self, host_id: str = "probed", address: str | None = None) -> MeasureLinkResponse:
        address = self.server.address if address is None else address
        request = MeasureLinkRequest(host_id=host_id, address=address)
        context: Any = None
        return self.prober.MeasureLink(request, context)


@pytest.fixture
def pair(emulation: ChangingEmulation) -> Iterator[Pair]:
    made = Pair(emulation)
    yield made
    made.channels.close()
    made.server.drain(0)


class Clock:
    """Goes on by 10 ms with each reading, so that a burst has few chunks, and by the seconds of each sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []
        self._lock = threading.Lock()

    def perf_counter(self) -> float:
        with self._lock:
            self.now += 0.01
            return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        with self._lock:
            self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(link_probe, "time", clock)
    return clock


def metric(name: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"link": "probing>probed"})


def test_probe_waits_for_the_wire_and_the_radio_and_reports_what_it_measured(
    pair: Pair, emulation: ChangingEmulation, clock: Clock
) -> None:
    emulation.set(links={"probing>probed": {"rate_bps": 4e6}})
    answer = pair.measure()
    assert set(pair.shaper.rates) == {4e6}
    assert set(pair.shaper.kinds) == {Traffic.ACTIVATIONS}
    assert metric("collapipe_link_probed_bps") == answer.goodput_bps > 0
    assert metric("collapipe_link_round_trip_seconds") == answer.round_trip_seconds
    # At nominal power, the signal is as strong as the noise in 20 MHz. That gives 1 bit/s for each Hz.
    noise = 4e-21
    radio = {"gain": 20e6 * noise / 0.1, "noise_watts_per_hertz": noise}
    emulation.set(radios={"probing>probed": radio})
    pair.shaper.waits.clear()
    pair.measure()
    assert pair.shaper.rates and pair.shaper.rates == pytest.approx([20e6] * len(pair.shaper.rates))
    assert metric("collapipe_radio_channel_gain") == radio["gain"]


def test_round_trip_has_the_delay_of_both_directions(
    pair: Pair, emulation: ChangingEmulation, clock: Clock
) -> None:
    delays = {"probing>probed": 0.5, "probed>probing": 1.0}
    emulation.set(links={link: {"delay_seconds": seconds} for link, seconds in delays.items()})
    assert pair.measure().round_trip_seconds >= 1.5
    assert clock.naps == [1.5] * link_probe._ROUND_TRIPS
    emulation.set()
    assert pair.measure().round_trip_seconds < 1.5


def test_unreachable_host_is_named(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerLostError, match="device-9") as raised:
        pair.measure("device-9", address)
    assert raised.value.host_id == "device-9"


def test_silent_host_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "_SILENCE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PeerLostError, match=r"device-9 .*0\.05 s"):
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
    with pytest.raises(InvalidInputError, match=f"'{host_id}' at address '{address}'"):
        pair.measure(host_id, address)


# --- the receiver


def chunk(num_bytes: int) -> ReceiveProbeRequest:
    return ReceiveProbeRequest(host_id="a", chunk=bytes(num_bytes))


LAST = ReceiveProbeRequest(host_id="a", last=True)


def set_clock(monkeypatch: pytest.MonkeyPatch, *readings: float) -> None:
    now = iter(readings)
    clock = SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr(link_probe, "time", clock)


def test_rate_counts_the_chunks_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, 5.0, 6.0, 7.0, 7.5)
    requests = [chunk(999), chunk(1000), chunk(1000), LAST]
    (answer,) = answer_probe(requests, "b", NOWHERE)
    assert answer.goodput_bps == 8 * 2000 / 2.0


@pytest.mark.parametrize("reads_on", [False, True])
def test_long_burst_is_answered_before_its_end_and_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch, reads_on: bool
) -> None:
    set_clock(monkeypatch, 0.0, 1.5, 3.0, 9.0, 9.5)
    requests = iter([chunk(1000)] * 4 + [LAST])
    answers = answer_probe(requests, "b", NOWHERE)
    assert next(answers).goodput_bps == 8 * 2000 / 3.0
    if reads_on:
        assert not list(answers)
    left = 0 if reads_on else 2  # The answer does not wait for the rest of the burst.
    assert len(list(requests)) == left


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


@pytest.mark.parametrize("requests", [[chunk(1000), LAST], [LAST]], ids=["one", "none"])
def test_burst_of_fewer_than_two_chunks_is_refused(requests: list[ReceiveProbeRequest]) -> None:
    with pytest.raises(InvalidInputError, match="2 chunks"):
        list(answer_probe(requests, "b", NOWHERE))


def test_too_many_round_trips_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="100 round trips"):
        list(answer_probe([ReceiveProbeRequest(host_id="a")] * 101, "b", NOWHERE))
