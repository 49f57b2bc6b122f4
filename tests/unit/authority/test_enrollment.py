"""The service over TLS, for callers without a certificate."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from collapipe.authority.servicer import FailedAttempts, observed_host
from collapipe.certificates import Identity, Role, pki
from collapipe.errors import PeerLostError
from collapipe.rpc import Security, call, open_authority_channel
from collapipe.rpc import serve as serve_rpc
from collapipe.v1.enrollment_pb2 import EnrollRequest, RenewRequest
from collapipe.v1.enrollment_pb2_grpc import EnrollmentServiceStub

from .conftest import Serve, Served, collapipe

PI = Identity(Role.DEVICE_AGENT, "pi")


def request() -> bytes:
    return pki.build_request(PI, [], pki.new_key())


def refusal(served: Served, secret: bytes, asked: bytes) -> tuple[grpc.StatusCode, str]:
    # The records that pytest keeps hold the refused calls open, so each has a connection of its own.
    with served.connected() as again, pytest.raises(grpc.RpcError) as raised:
        again.enroll(secret, asked)
    return raised.value.code(), str(raised.value.details())


def test_token_gets_a_certificate_once_also_across_restarts(serve: Serve) -> None:
    secret = serve().secret()
    restarted = serve()
    answer = restarted.enroll(secret, request())
    assert answer.observed_host == "127.0.0.1"
    assert pki.identity_of(pki.read_certificate(answer.certificate)) == PI
    assert restarted.holders() == ["device-agent:pi"]
    code, said = refusal(serve(), secret, request())
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "used before" in said and "collapipe certs token" in said


def test_exactly_one_of_simultaneous_joins_with_one_token_succeeds(served: Served) -> None:
    secret, asked = served.secret(), request()

    def attempt(_: int) -> grpc.StatusCode:
        try:
            served.enroll(secret, asked)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(attempt, range(4)))
    assert sorted(code.name for code in codes) == ["OK"] + 3 * ["PERMISSION_DENIED"]


def test_wrong_secrets_and_oversized_messages_are_refused(served: Served) -> None:
    for secret in (b"", bytes(31), bytes(50_000)):
        code, said = refusal(served, secret, request())
        assert code is grpc.StatusCode.INVALID_ARGUMENT and f" {len(secret)}:" in said
    code, _ = refusal(served, bytes(32), request())
    assert code is grpc.StatusCode.PERMISSION_DENIED
    secret = served.secret()
    code, said = refusal(served, secret, bytes(5000))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "4096" in said
    code, _ = refusal(served, secret, bytes(1 << 20))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not served.holders()


def test_refused_calls_do_not_use_up_the_calls_of_a_connection(served: Served) -> None:
    codes = []
    gc.disable()  # It would release the calls at some time.
    try:
        for _ in range(12):  # A connection may have four calls at a time.
            with pytest.raises(grpc.RpcError) as raised:
                served.stub.Renew(RenewRequest(), timeout=60)
            codes.append(raised.value.code())
    finally:
        gc.enable()
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 12


def test_caller_that_guesses_must_wait_but_a_good_token_from_its_address_works(
    served: Served,
) -> None:
    secret, blocked = served.secret(), "127.0.0.1 has tried too many"
    for guess in range(10):
        code, said = refusal(served, bytes([guess]) * 32, request())
        assert "not of this authority" in said
    code, said = refusal(served, bytes([10]) * 32, request())
    assert code is grpc.StatusCode.PERMISSION_DENIED and said.startswith(blocked)
    assert served.enroll(secret, request()).certificate
    assert refusal(served, secret, request())[1].startswith(blocked)


def test_secret_is_not_sent_to_a_service_of_another_role(made: Path, tmp_path: Path) -> None:
    collapipe("certs", "issue", made, "scheduler:scheduler", "--out", tmp_path)
    tls = tmp_path / "scheduler"
    posing = Security(tls / "ca.pem", tls / "cert.pem", tls / "key.pem", asks_callers=False)
    server = serve_rpc("127.0.0.1:0", posing, lambda grpc_server, address: None)
    with (
        open_authority_channel(server.address, (made / "ca.pem").read_bytes()) as channel,
        pytest.raises(PeerLostError, match="another name or role"),
    ):
        stub = EnrollmentServiceStub(channel)
        call(stub.Enroll, EnrollRequest(), "the authority", 60)
    server.drain(0)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.168.1.7:4711", "192.168.1.7"),
        ("ipv6:%5B2001:db8::7%5D:4711", "2001:db8::7"),
        ("ipv6:%5B::ffff:192.168.1.7%5D:4711", "192.168.1.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", None),
        ("unix:/run/x", None),
        ("ipv4:somewhere:1", None),
        ("", None),
    ],
)
def test_address_of_a_caller_is_read_from_its_name_in_grpc(peer: str, host: str | None) -> None:
    assert observed_host(peer) == host


def test_failed_attempts_of_a_caller_expire_after_a_minute() -> None:
    failed = FailedAttempts()
    for _ in range(10):
        assert not failed.is_blocked("a", 100.0)
        failed.add("a", 100.0)
    assert failed.is_blocked("a", 159.0)
    assert not failed.is_blocked("b", 159.0)
    assert not failed.is_blocked("a", 160.0)


def test_failed_attempts_of_many_callers_take_bounded_memory() -> None:
    failed = FailedAttempts()
    for number in range(5000):
        failed.add(str(number), float(number) / 1000)
    assert len(failed._counts) == 1024
