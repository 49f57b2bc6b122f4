"""Calls between two hosts whose link is emulated."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from emulated_links import ChangingEmulation, NotingShaper

from collapipe.rpc import ChannelPool, call_shaping, serve
from collapipe.rpc.call_shaping import HOST_KEY, delayed
from collapipe.rpc.options import COMMON_OPTIONS
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks, SharedLink
from collapipe.traffic_shaping.pacing import Traffic

from .serving import ARITIES, ECHO, PLAIN, SECONDS, Methods, Served, raising


class NotingLinks(OutgoingLinks):
    """Links of a host that note when the host learns an address."""

    learnt: threading.Event

    def link_to(self, receiver: str, address: str = "") -> SharedLink:
        link = super().link_to(receiver, address)
        self.learnt.set()
        return link


class Hosts:
    """A host that calls, and a host that answers."""

    def __init__(self, emulation: ChangingEmulation) -> None:
        self.emulation = emulation
        self.shapers = {"caller": NotingShaper(), "answering": NotingShaper()}
        self.links = {
            name: OutgoingLinks(name, emulation.file, shaper)
            for name, shaper in self.shapers.items()
        }
        self.owned = ExitStack()

    def serve(self, behaviours: dict[str, Any]) -> Served:
        methods = Methods(behaviours)
        server = serve(
            "127.0.0.1:0",
            PLAIN,
            lambda grpc_server, _: grpc_server.add_generic_rpc_handlers((methods,)),
            links=self.links["answering"],
        )
        self.owned.callback(server.drain, 0)
        self.links["caller"].link_to("answering", server.address)
        channels = ChannelPool(PLAIN, self.links["caller"])
        self.owned.callback(channels.close)
        return Served(server, channels.channel(server.address))


@pytest.fixture
def hosts(emulation: ChangingEmulation) -> Iterator[Hosts]:
    hosts = Hosts(emulation)
    with hosts.owned:
        yield hosts


class FakeTime:
    """A clock whose time passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.before_sleep: Callable[[], object] = bool

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.before_sleep()
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(call_shaping, "time", time)
    return time


@pytest.mark.parametrize("arity", ARITIES)
def test_call_takes_the_delay_of_both_directions(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, arity: str
) -> None:
    slept: list[float] = []
    stopped = SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(call_shaping, "time", stopped)
    there, back = {"delay_seconds": 0.2}, {"delay_seconds": 0.4}
    hosts.emulation.set(links={"caller>answering": there, "answering>caller": back})
    assert hosts.serve(ECHO).call(arity)
    assert set(slept) == {0.2, 0.4}


@pytest.mark.parametrize("arity", ARITIES)
def test_messages_wait_for_their_link_as_control_traffic(hosts: Hosts, arity: str) -> None:
    hosts.emulation.set(
        links={"caller>*": {"rate_bps": 1000}, "answering>caller": {"rate_bps": 2000}}
    )
    answers = hosts.serve(ECHO).call(arity)
    expected = {"stream_unary": [b"ask+ask"], "stream_stream": [b"ask", b"ask"]}
    assert answers == expected.get(arity, [b"ask"])
    asked, answered = hosts.shapers["caller"], hosts.shapers["answering"]
    assert asked.waits == [(3, 1000.0)] * (2 if arity.startswith("stream") else 1)
    assert answered.waits == [(len(answer), 2000.0) for answer in answers]
    assert {*asked.kinds, *answered.kinds} == {Traffic.CONTROL}


def test_caller_that_is_no_host_is_not_delayed(hosts: Hosts, time: FakeTime) -> None:
    hosts.emulation.set(links={"*": {"delay_seconds": 30.0}})
    served = hosts.serve(ECHO)
    with grpc.insecure_channel(served.server.address, COMMON_OPTIONS) as channel:
        assert Served(served.server, channel).call("unary_unary") == [b"ask"]
    assert time.slept == []


def test_error_of_a_delayed_stream_reaches_the_caller(hosts: Hosts, time: FakeTime) -> None:
    hosts.emulation.set(links={"*": {"delay_seconds": 30.0}})
    failure = hosts.serve(raising(ValueError("no such step"), after=1)).failure("unary_stream")
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "no such step" in str(failure.details())


def test_delayed_handler_ends_when_its_caller_goes_away(hosts: Hosts, time: FakeTime) -> None:
    hosts.emulation.set(links={"*": {"delay_seconds": 30.0}})
    ended = threading.Event()

    def endless(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from itertools.repeat(b"sign of life")
        finally:
            ended.set()

    call = hosts.serve({"unary_stream": endless}).method("unary_stream")(b"ask", timeout=SECONDS)
    next(call)
    call.cancel()
    assert ended.wait(SECONDS)


def test_call_keeps_its_metadata_and_names_its_caller(hosts: Hosts) -> None:
    def metadata(request: bytes, context: grpc.ServicerContext) -> bytes:
        found = dict(context.invocation_metadata())
        return b"%b %b" % (str(found["mine"]).encode(), bytes(found[HOST_KEY]))

    served = hosts.serve({"unary_unary": metadata})
    assert served.call("unary_unary", metadata=(("mine", "kept"),)) == [b"kept caller"]


@pytest.mark.parametrize("arity", ARITIES)
def test_caller_learns_which_host_serves_at_an_address(hosts: Hosts, arity: str) -> None:
    served = hosts.serve(ECHO)
    links = NotingLinks("caller", hosts.emulation.file, NotingShaper())
    links.learnt = threading.Event()
    channels = ChannelPool(PLAIN, links)
    hosts.owned.callback(channels.close)
    address = served.server.address
    assert channels.link(address).receiver == ""
    Served(served.server, channels.channel(address)).call(arity)
    assert links.learnt.wait(SECONDS)  # Another thread learns it at the end of a stream.
    assert channels.link(address).receiver == "answering"


# --- the line of delayed messages


def test_delays_of_messages_overlap_and_keep_their_order(time: FakeTime) -> None:
    taken = threading.Event()

    def messages() -> Iterator[int]:
        yield from range(6)
        taken.set()

    delays = iter([0.3, 0.2, 0.5, 0.0, 0.4, 0.1, 0.0])
    time.before_sleep = lambda: taken.wait(SECONDS)
    assert list(delayed(messages(), lambda: next(delays))) == [0, 1, 2, 3, 4, 5]
    assert time.slept == [0.3, 0.2]


def test_number_of_delayed_messages_is_bounded(time: FakeTime) -> None:
    taken = itertools.count()
    line = delayed(taken, lambda: 0.5)
    assert [next(line) for _ in range(20)] == list(range(20))
    assert next(taken) <= 100
    line.close()  # type: ignore[attr-defined]
