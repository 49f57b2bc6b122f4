"""The service over TLS, for callers without a certificate."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from collapipe.authority.servicer import FailedAttempts, observed_host
from collapipe.certificates import Identity, Role, pki
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.errors import PeerLostError
from collapipe.rpc import Security, call, open_authority_channel
from collapipe.rpc import serve as serve_rpc
from collapipe.v1.enrollment_pb2 import EnrollRequest, RenewRequest

from .conftest import Served, collapipe, serve

PI = Identity(Role.DEVICE_AGENT, "pi")


def request() -> bytes:
    return pki.build_request(PI, [], pki.new_key())


def refusal(served: Served, secret: bytes, asked: bytes) -> tuple[grpc.StatusCode, str]:
    with served.channel() as channel, pytest.raises(grpc.RpcError) as raised:
        message = EnrollRequest(secret=secret, certificate_request=asked)
        served.stub(channel).Enroll(message, timeout=20)
    return raised.value.code(), str(raised.value.details())


def test_token_gets_a_certificate(served: Served) -> None:
    with served.channel() as channel:
        message = EnrollRequest(secret=served.secret(), certificate_request=request())
        answer = served.stub(channel).Enroll(message, timeout=20)
    assert answer.observed_host == "127.0.0.1"
    certificate = pki.read_certificate(answer.certificate)
    assert pki.identity_of(certificate) == PI
    assert served.holders() == ["device-agent:pi"]


def test_exactly_one_of_simultaneous_joins_with_one_token_succeeds(served: Served) -> None:
    message = EnrollRequest(secret=served.secret(), certificate_request=request())

    def attempt(_: int) -> grpc.StatusCode:
        with served.channel() as channel:
            try:
                served.stub(channel).Enroll(message, timeout=20)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(attempt, range(8)))
    assert sorted(code.name for code in codes) == ["OK"] + 7 * ["PERMISSION_DENIED"]


def test_used_token_stays_used_after_a_restart(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = served.secret()
    with served.channel() as channel:
        message = EnrollRequest(secret=secret, certificate_request=request())
        served.stub(channel).Enroll(message, timeout=20)
    restarted = serve(served.folder, monkeypatch)
    code, said = refusal(Served(served.folder, restarted), secret, request())
    restarted.drain()
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "was used before: make a new one with `collapipe certs token`" in said


def test_unused_token_is_usable_after_a_restart(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = EnrollRequest(secret=served.secret(), certificate_request=request())
    restarted = serve(served.folder, monkeypatch)
    again = Served(served.folder, restarted)
    with again.channel() as channel:
        assert again.stub(channel).Enroll(message, timeout=20).certificate
    restarted.drain()


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(32), bytes(50_000)], ids=len)
def test_wrong_secret_is_refused(served: Served, secret: bytes) -> None:
    code, _ = refusal(served, secret, request())
    assert code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)
    assert not served.holders()


def test_oversized_messages_are_refused(served: Served) -> None:
    code, said = refusal(served, served.secret(), bytes(5000))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "at most 4096" in said
    code, _ = refusal(served, served.secret(), bytes(1 << 20))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_refused_calls_do_not_use_up_the_calls_of_a_connection(served: Served) -> None:
    codes = []
    gc.disable()  # It would release the calls at some time.
    try:
        with served.channel() as channel:
            for _ in range(12):  # A connection may have four calls at a time.
                with pytest.raises(grpc.RpcError) as raised:
                    served.stub(channel).Renew(RenewRequest(), timeout=20)
                codes.append(raised.value.code())
    finally:
        gc.enable()
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 12


def test_caller_that_guesses_must_wait_but_a_good_token_from_its_address_works(
    served: Served,
) -> None:
    secret = served.secret()
    for guess in range(10):
        code, said = refusal(served, bytes([guess]) * 32, request())
        assert "not of this authority" in said
    code, said = refusal(served, bytes([10]) * 32, request())
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert said.startswith("127.0.0.1 has tried too many wrong join tokens: wait a minute")
    with served.channel() as channel:
        message = EnrollRequest(secret=secret, certificate_request=request())
        assert served.stub(channel).Enroll(message, timeout=20).certificate
    assert refusal(served, secret, request())[1].startswith("127.0.0.1 has tried too many")


def test_certificate_is_renewed_only_with_its_key(served: Served) -> None:
    key = pki.new_key()
    asked = pki.build_request(PI, [], key)
    with served.channel() as channel:
        stub = served.stub(channel)
        message = EnrollRequest(secret=served.secret(), certificate_request=asked)
        first = stub.Enroll(message, timeout=20).certificate
        present = pki.der(pki.read_chain(first).certificate)
        renewal = RenewRequest(certificate=present, certificate_request=asked)
        second = stub.Renew(renewal, timeout=20).certificate
        with pytest.raises(grpc.RpcError) as raised:
            renewal = RenewRequest(certificate=present, certificate_request=request())
            stub.Renew(renewal, timeout=20)
    assert second != first
    assert pki.is_of_key(pki.read_certificate(second), key.public_key())
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_secret_is_not_sent_to_a_service_of_another_role(served: Served, tmp_path: Path) -> None:
    collapipe("certs", "issue", served.folder, "scheduler:scheduler", "--out", tmp_path)
    tls = tmp_path / "scheduler"
    posing = Security(tls / "ca.pem", tls / "cert.pem", tls / "key.pem", asks_callers=False)
    server = serve_rpc("127.0.0.1:0", posing, lambda grpc_server, address: None)
    authority_pem = (served.folder / "ca.pem").read_bytes()
    with (
        open_authority_channel(server.address, authority_pem) as channel,
        pytest.raises(PeerLostError, match="its certificate has another name or role"),
    ):
        call(served.stub(channel).Enroll, EnrollRequest(), "the authority", 20)
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


def test_service_uses_the_issuing_authority_that_another_process_has_made(served: Served) -> None:
    with served.channel() as channel:
        stub, root = served.stub(channel), AuthorityFolder.root_in(served.folder)
        AuthorityFolder(served.folder).renew_issuer(root, revoke=True)
        message = EnrollRequest(secret=served.secret(), certificate_request=request())
        chain = pki.read_chain(stub.Enroll(message, timeout=20).certificate)
    assert chain.issuer == AuthorityFolder(served.folder).issuer
