"""Retries and proxies of channels."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from collapipe.errors import PeerLostError
from collapipe.rpc import ChannelPool, Security, open_channel, serve
from collapipe.rpc import channel as channel_module
from collapipe.rpc.channel import _IDEMPOTENT
from collapipe.v1 import profile_pb2, scheduler_pb2

from .serving import ECHO, SERVICE, serving

SECONDS = 20.0
SCHEDULER = "collapipe.v1.SchedulerService"


class Flaky:
    """Fails twice before it answers."""

    def __init__(self) -> None:
        self.num_calls = 0

    def unary(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.num_calls += 1
        if self.num_calls < 3:
            raise PeerLostError("disk", "not yet")
        return b"done"

    def stream(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield self.unary(request, context)


@contextmanager
def scheduler(method: str, handler: Any) -> Iterator[grpc.Channel]:
    handlers = grpc.method_handlers_generic_handler(SCHEDULER, {method: handler})
    plain = Security.insecure()
    server = serve(
        "127.0.0.1:0", plain, lambda server, address: server.add_generic_rpc_handlers((handlers,))
    )
    with open_channel(server.address, plain) as channel:
        yield channel
    server.drain(0)


def test_idempotent_method_is_repeated_if_unavailable() -> None:
    flaky = Flaky()
    with scheduler("Heartbeat", grpc.unary_unary_rpc_method_handler(flaky.unary)) as channel:
        assert channel.unary_unary(f"/{SCHEDULER}/Heartbeat")(b"", timeout=SECONDS) == b"done"
    assert flaky.num_calls == 3


def test_other_method_is_called_once() -> None:
    flaky = Flaky()
    with (
        scheduler("SubmitJob", grpc.unary_unary_rpc_method_handler(flaky.unary)) as channel,
        pytest.raises(grpc.RpcError),
    ):
        channel.unary_unary(f"/{SCHEDULER}/SubmitJob")(b"", timeout=SECONDS)
    assert flaky.num_calls == 1


def test_stream_is_called_once() -> None:
    flaky = Flaky()
    with (
        scheduler("WatchJob", grpc.unary_stream_rpc_method_handler(flaky.stream)) as channel,
        pytest.raises(grpc.RpcError),
    ):
        list(channel.unary_stream(f"/{SCHEDULER}/WatchJob")(b"", timeout=SECONDS))
    assert flaky.num_calls == 1


def test_repeated_methods_exist_and_are_unary() -> None:
    services = {
        service.full_name: service
        for module in (profile_pb2, scheduler_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    }
    for service, names in _IDEMPOTENT.items():
        for name in names:
            method = services[service].methods_by_name[name]
            assert not method.client_streaming and not method.server_streaming


def test_channel_ignores_the_proxy_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("no_grpc_proxy", "no_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with serving(ECHO) as served:
        assert served.call("unary_unary", b"hello") == [b"hello"]


def test_weights_have_a_connection_of_their_own() -> None:
    method = f"/{SERVICE}/unary_unary"
    with serving({"unary_unary": lambda request, context: context.peer().encode()}) as served:
        pools = ChannelPool(Security.insecure()), ChannelPool(Security.insecure())
        usual, weights = (
            {
                pool.channel(served.server.address, for_weights=own).unary_unary(method)(b"")
                for pool in pools
            }
            for own in (False, True)
        )
        for pool in pools:
            pool.close()
    assert len(usual) == 1  # The other channels to a peer share one connection.
    assert len(weights) == 2 and not usual & weights


def test_a_pool_forgets_the_channel_that_was_used_least_recently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "_MOST_CHANNELS", 3)
    pool = ChannelPool(Security.insecure())
    first, second = pool.channel("127.0.0.1:1"), pool.channel("127.0.0.1:2")
    assert pool.channel("127.0.0.1:1") is first
    forgotten = weakref.ref(second)
    del second
    for port in (3, 4):
        pool.channel(f"127.0.0.1:{port}")
    gc.collect()
    assert forgotten() is None
    assert pool.channel("127.0.0.1:1") is first
    pool.close()
