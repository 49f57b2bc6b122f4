"""Calls between two hosts whose link is emulated."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from emulated_links import ChangingEmulation, NotingShaper

from collapipe.rpc import ChannelPool, Security, serve
from collapipe.rpc.call_shaping import HOST_KEY, delayed
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.traffic_shaping.pacing import Traffic

from .serving import ARITIES, ECHO, SERVICE, Methods, Served, raising

PLAIN = Security.insecure()


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


@pytest.mark.parametrize("arity", ARITIES)
def test_call_takes_the_delay_of_both_directions(hosts: Hosts, arity: str) -> None:
    hosts.emulation.set(
        links={
            "caller>answering": {"delay_seconds": 0.2},
            "answering>caller": {"delay_seconds": 0.4},
        }
    )
    served = hosts.serve(ECHO)
    started = time.monotonic()
    answers = served.call(arity)
    assert time.monotonic() - started >= 0.6
    expected = {"stream_unary": [b"ask+ask"], "stream_stream": [b"ask", b"ask"]}
    assert answers == expected.get(arity, [b"ask"])


@pytest.mark.parametrize("arity", ARITIES)
def test_messages_wait_for_their_link_as_control_traffic(hosts: Hosts, arity: str) -> None:
    hosts.emulation.set(
        links={"caller>*": {"rate_bps": 1000}, "answering>caller": {"rate_bps": 2000}}
    )
    answers = hosts.serve(ECHO).call(arity)
    asked, answered = hosts.shapers["caller"], hosts.shapers["answering"]
    assert asked.waits == [(3, 1000.0)] * (2 if arity.startswith("stream") else 1)
    assert answered.waits == [(len(answer), 2000.0) for answer in answers]
    assert {*asked.kinds, *answered.kinds} == {Traffic.CONTROL}


def test_caller_that_is_no_host_is_not_delayed(hosts: Hosts) -> None:
    hosts.emulation.set(links={"*": {"delay_seconds": 30.0}})
    served = hosts.serve(ECHO)
    with grpc.insecure_channel(served.server.address) as channel:
        assert Served(served.server, channel).call("unary_unary") == [b"ask"]


def test_delays_of_the_messages_of_a_stream_overlap(hosts: Hosts) -> None:
    hosts.emulation.set(links={"answering>caller": {"delay_seconds": 0.5}})

    def count(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from (bytes([number]) for number in range(6))

    started = time.monotonic()
    answers = hosts.serve({"unary_stream": count}).call("unary_stream")
    assert answers == [bytes([number]) for number in range(6)]
    assert 0.5 <= time.monotonic() - started < 6 * 0.5


def test_error_of_a_delayed_stream_reaches_the_caller(hosts: Hosts) -> None:
    hosts.emulation.set(links={"*": {"delay_seconds": 0.01}})
    served = hosts.serve(raising(ValueError("no such step"), after=1))
    with pytest.raises(grpc.RpcError) as raised:
        served.call("unary_stream")
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert "no such step" in str(raised.value.details())


def test_delayed_handler_ends_when_its_caller_goes_away(hosts: Hosts) -> None:
    hosts.emulation.set(links={"*": {"delay_seconds": 0.01}})
    ended = threading.Event()

    def endless(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            while True:
                time.sleep(0.01)
                yield b"sign of life"
        finally:
            ended.set()

    served = hosts.serve({"unary_stream": endless})
    call = served.channel.unary_stream(f"/{SERVICE}/unary_stream")(b"ask", timeout=20)
    next(call)
    call.cancel()
    assert ended.wait(20)


def test_call_keeps_its_metadata_and_names_its_caller(hosts: Hosts) -> None:
    def metadata(request: bytes, context: grpc.ServicerContext) -> bytes:
        found = dict(context.invocation_metadata())
        return b"%b %b" % (str(found["mine"]).encode(), bytes(found[HOST_KEY]))

    served = hosts.serve({"unary_unary": metadata})
    assert served.call("unary_unary", metadata=(("mine", "kept"),)) == [b"kept caller"]


@pytest.mark.parametrize("arity", ARITIES)
def test_caller_learns_which_host_serves_at_an_address(hosts: Hosts, arity: str) -> None:
    served = hosts.serve(ECHO)
    links = OutgoingLinks("caller", hosts.emulation.file, NotingShaper())
    channels = ChannelPool(PLAIN, links)
    hosts.owned.callback(channels.close)
    address = served.server.address
    assert channels.link(address).receiver == ""
    Served(served.server, channels.channel(address)).call(arity)
    deadline = time.monotonic() + 20
    while not channels.link(address).receiver and time.monotonic() < deadline:
        time.sleep(0.01)  # Another thread learns it at the end of a stream.
    assert channels.link(address).receiver == "answering"


# --- the line of delayed messages


def test_delayed_messages_keep_their_order_when_the_delay_falls() -> None:
    delays = iter([0.3, 0.0, 0.0])
    started = time.monotonic()
    assert list(delayed([1, 2], lambda: next(delays))) == [1, 2]
    assert time.monotonic() - started >= 0.3


def test_number_of_delayed_messages_is_bounded() -> None:
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        while True:
            yield taken
            taken += 1

    line = delayed(endless(), lambda: 0.5)
    assert next(line) == 0
    assert taken <= 100
    line.close()  # type: ignore[attr-defined]
