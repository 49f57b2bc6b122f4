"""A revoked key opens nothing any more, not even for calls that are open already."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from collapipe.errors import NotPermittedError
from collapipe.rpc import Security, check_session, sign_grant, to_error
from collapipe.v1.enrollment_pb2 import SignedRevokedKeys
from collapipe.v1.plan_pb2 import Attempt, Grant, Plan
from collapipe.v1.stage_pb2 import ConfigureStage

from .authorities import Authority
from .serving import ARITIES, ECHO, SERVICE, serving

REFUSED = "the key of this certificate was revoked"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error = to_error(raised.value, "the server")
    assert isinstance(error, NotPermittedError), error
    return str(error)


@pytest.mark.parametrize("arity", ARITIES)
def test_server_refuses_the_next_call_of_a_revoked_key(authority: Authority, arity: str) -> None:
    server, device = authority.security("scheduler:server"), authority.security("device-agent:d")
    other = authority.security("device-agent:other")
    with serving(ECHO, server, device) as served, serving(ECHO, server, other) as of_other:
        assert served.call(arity)
        server.learn_revoked(authority.revoke("device-agent:d"))
        assert REFUSED in refusal(lambda: served.call(arity))
        assert of_other.call(arity)


@pytest.mark.parametrize("reads", [True, False], ids=["requests", "answers"])
def test_open_stream_of_a_revoked_key_ends_with_the_next_message(
    authority: Authority, reads: bool
) -> None:
    server, device = authority.security("scheduler:server"), authority.security("device-agent:d")

    def answer(requests: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield b"begun"
        if reads:
            for _ in requests:  # Nothing is answered, so only the requests can end it.
                pass
        while True:
            yield b"again"

    with serving({"stream_stream": answer}, server, device) as served:
        method = served.channel.stream_stream(f"/{SERVICE}/stream_stream")
        stream = method(_endless())
        assert next(stream)
        server.learn_revoked(authority.revoke("device-agent:d"))
        assert REFUSED in refusal(lambda: list(stream))


def test_grant_signed_with_a_revoked_key_is_refused(authority: Authority) -> None:
    scheduler = authority.security("scheduler:scheduler")
    device, unit = authority.security("device-agent:d"), authority.security("control-unit:cu")
    grant = Grant(attempt=Attempt(job_id="job"), plan=Plan())
    configure = ConfigureStage(
        attempt=grant.attempt, plan=grant.plan, grant=sign_grant(scheduler, grant)
    )
    device.learn_revoked(authority.revoke("scheduler:scheduler"))

    def check(request: Any, context: grpc.ServicerContext) -> bytes:
        check_session(device, context, configure, "d")
        return b""

    with serving({"unary_unary": check}, device, unit) as served:
        assert REFUSED in refusal(lambda: served.call("unary_unary"))


def test_older_list_does_not_replace_a_newer_one(authority: Authority) -> None:
    server = authority.security("scheduler:server")
    for name in "ab":
        authority.security(f"device-agent:{name}")
    older, newer = authority.revoke("device-agent:a"), authority.revoke("device-agent:b")
    server.learn_revoked(newer)
    server.learn_revoked(older)
    assert server.revoked.signed == newer


def test_list_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    server, other = authority.security("scheduler:server"), Authority(tmp_path / "other")
    other.security("device-agent:d")
    foreign = other.revoke("device-agent:d")
    own = authority.revoke("scheduler:server")
    for signed in (
        foreign,
        SignedRevokedKeys(keys=own.keys, signature=foreign.signature),
        SignedRevokedKeys(keys=own.keys + b"\x08\x09", signature=own.signature),
        SignedRevokedKeys(keys=own.keys),
    ):
        with pytest.raises(NotPermittedError, match="is not signed by the authority"):
            server.learn_revoked(signed)
    assert server.revoked.number == 0


def test_plain_text_has_no_keys(authority: Authority) -> None:
    plain = Security.insecure()
    plain.learn_revoked(SignedRevokedKeys())
    assert plain.revoked.number == 0


def _endless() -> Iterator[bytes]:
    while True:
        yield b"message"
