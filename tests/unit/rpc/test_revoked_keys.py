"""A revoked key opens nothing any more, not even for calls that are open already."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from collapipe.errors import NotPermittedError
from collapipe.rpc import Security, check_session, sign_grant, to_error
from collapipe.v1.enrollment_pb2 import RevokedIssuers, SignedRevokedKeys
from collapipe.v1.plan_pb2 import Attempt, Grant, Plan
from collapipe.v1.stage_pb2 import ConfigureStage

from .authorities import Authority
from .serving import ARITIES, ECHO, serving


@pytest.fixture
def server(fresh: Authority) -> Security:
    return fresh.security("scheduler:server")


def test_server_refuses_the_next_call_of_a_revoked_key(fresh: Authority, server: Security) -> None:
    device, other = fresh.security("device-agent:d"), fresh.security("device-agent:other")
    with serving(ECHO, server, device) as served, serving(ECHO, server, other) as of_other:
        for arity in ARITIES:
            assert served.call(arity)
        server.learn_revoked(fresh.revoke("device-agent:d"))
        for arity in ARITIES:
            assert "key of this certificate" in served.refusal(arity)
            assert of_other.call(arity)


@pytest.mark.parametrize("reads", [True, False], ids=["requests", "answers"])
def test_open_stream_of_a_revoked_key_ends_with_the_next_message(
    fresh: Authority, server: Security, reads: bool
) -> None:
    def answer(requests: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield b"begun"
        if reads:
            for _ in requests:  # Nothing is answered, so only the requests can end it.
                pass
        yield from itertools.repeat(b"again")

    with serving({"stream_stream": answer}, server, fresh.security("device-agent:d")) as served:
        stream = served.method("stream_stream")(itertools.repeat(b"message"))
        assert next(stream)
        server.learn_revoked(fresh.revoke("device-agent:d"))
        with pytest.raises(grpc.RpcError) as raised:
            list(stream)
    assert isinstance(to_error(raised.value, "the server"), NotPermittedError)


def test_grant_signed_with_a_revoked_key_is_refused(fresh: Authority) -> None:
    scheduler = fresh.security("scheduler:scheduler")
    device, unit = fresh.security("device-agent:d"), fresh.security("control-unit:cu")
    grant = Grant(attempt=Attempt(job_id="job"), plan=Plan())
    signed = sign_grant(scheduler, grant)
    configure = ConfigureStage(attempt=grant.attempt, plan=grant.plan, grant=signed)
    device.learn_revoked(fresh.revoke("scheduler:scheduler"))

    def check(request: Any, context: grpc.ServicerContext) -> bytes:
        check_session(device, context, configure, "d")
        return b""

    with serving({"unary_unary": check}, device, unit) as served:
        assert "key of this certificate" in served.refusal()


def test_older_list_does_not_replace_a_newer_one(fresh: Authority, server: Security) -> None:
    for name in "ab":
        fresh.security(f"device-agent:{name}")
    older, newer = fresh.revoke("device-agent:a"), fresh.revoke("device-agent:b")
    server.learn_revoked(newer)
    server.learn_revoked(older)
    assert server.revoked.signed == newer


def test_list_that_the_authority_has_not_signed_is_refused(
    fresh: Authority, server: Security, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    other.security("device-agent:d")
    foreign = other.revoke("device-agent:d")
    own = fresh.revoke("scheduler:server")
    for signed in (
        foreign,
        SignedRevokedKeys(keys=own.keys, signature=foreign.signature),
        SignedRevokedKeys(keys=own.keys + b"\x08\x09", signature=own.signature),
        SignedRevokedKeys(keys=own.keys),
        SignedRevokedKeys(
            keys=own.keys,
            signature=own.signature,
            issuer=own.issuer,
            revoked_issuers=RevokedIssuers(sha256=[bytes(32)]).SerializeToString(),
        ),
    ):
        with pytest.raises(NotPermittedError, match="not signed"):
            server.learn_revoked(signed)
    assert server.revoked.number == 0


def test_plain_text_has_no_keys() -> None:
    plain = Security.insecure()
    plain.learn_revoked(SignedRevokedKeys())
    assert plain.revoked.number == 0
