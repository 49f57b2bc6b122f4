"""Retries and proxies of channels."""

import gc
import weakref
from collections.abc import Iterator

import grpc
import pytest

from collapipe.errors import PeerLostError
from collapipe.rpc import ChannelPool, open_channel, serve
from collapipe.rpc import channel as channel_module
from collapipe.rpc.channel import _IDEMPOTENT
from collapipe.v1 import profile_pb2, scheduler_pb2

from .serving import ECHO, PLAIN, SECONDS, SERVICE, serving

SCHEDULER = "collapipe.v1.SchedulerService"


@pytest.mark.parametrize(
    ("method", "arity", "num_calls"),
    [
        ("Heartbeat", "unary_unary", 3),  # It is idempotent.
        ("SubmitJob", "unary_unary", 1),
        ("WatchJob", "unary_stream", 1),
    ],
)
def test_only_idempotent_unary_methods_are_repeated_if_unavailable(
    method: str, arity: str, num_calls: int
) -> None:
    answers = iter([PeerLostError("disk", "not yet"), PeerLostError("disk", "not yet"), b"done"])
    called = 0

    def flaky(request: bytes, context: grpc.ServicerContext) -> bytes:
        nonlocal called
        called += 1
        answer = next(answers)
        if isinstance(answer, PeerLostError):
            raise answer
        return answer

    def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield flaky(request, context)

    handler = (
        grpc.unary_unary_rpc_method_handler(flaky)
        if arity == "unary_unary"
        else grpc.unary_stream_rpc_method_handler(stream)
    )
    handlers = grpc.method_handlers_generic_handler(SCHEDULER, {method: handler})
    server = serve(
        "127.0.0.1:0", PLAIN, lambda server, address: server.add_generic_rpc_handlers((handlers,))
    )
    with open_channel(server.address, PLAIN) as channel:
        call = getattr(channel, arity)(f"/{SCHEDULER}/{method}")
        if num_calls == 3:
            assert call(b"", timeout=SECONDS) == b"done"
        else:
            with pytest.raises(grpc.RpcError):
                list(call(b"", timeout=SECONDS))
    server.drain(0)
    assert called == num_calls


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
        pools = ChannelPool(PLAIN), ChannelPool(PLAIN)
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


def test_pool_has_one_channel_for_each_peer_until_it_is_closed() -> None:
    pool = ChannelPool(PLAIN)
    with serving(ECHO) as served:
        channel = pool.channel(served.server.address)
        assert pool.channel(served.server.address) is channel
        assert pool.channel("127.0.0.1:1") is not channel
        assert channel.unary_unary(f"/{SERVICE}/unary_unary")(b"x", timeout=SECONDS) == b"x"
        pool.close()
        with pytest.raises(ValueError, match="closed"):
            channel.unary_unary(f"/{SERVICE}/unary_unary")(b"x", timeout=SECONDS)


def test_a_pool_forgets_the_channel_that_was_used_least_recently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "_MOST_CHANNELS", 3)
    pool = ChannelPool(PLAIN)
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
