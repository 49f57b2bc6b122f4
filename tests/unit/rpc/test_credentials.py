import datetime
from pathlib import Path

import grpc
import pytest

from collapipe.certificates import Identity, Role
from collapipe.errors import InvalidInputError, PeerLostError, WrongStateError
from collapipe.rpc import Security, call

from .authorities import Authority, Unchecked
from .serving import ECHO, SERVICE, serving

PLAIN = Security.insecure()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("others"))


def ask(of_server: Security, of_client: Security) -> bytes:
    with serving(ECHO, of_server, of_client) as served:
        method = served.channel.unary_unary(f"/{SERVICE}/unary_unary")
        return call(method, b"hello", "the server", seconds=5)


def test_peers_of_one_authority_accept_each_other(ours: Authority) -> None:
    assert ask(ours.security("scheduler:server"), ours.security("client:me")) == b"hello"


def test_identity_of_the_caller_is_known_to_the_server(ours: Authority) -> None:
    def who(request: bytes, context: grpc.ServicerContext) -> bytes:
        return context.auth_context()["peer_uri"][0]

    with serving(
        {"unary_unary": who},
        ours.security("scheduler:server"),
        ours.security("device-agent:device-1"),
    ) as served:
        assert served.call("unary_unary") == [b"spiffe://collapipe/device-agent/device-1/cluster/0"]


def test_caller_of_another_authority_is_refused(ours: Authority, others: Authority) -> None:
    stranger = others.security("client:me")
    trusting = Unchecked(ours.path, stranger.certificate, stranger.key)
    with pytest.raises(PeerLostError, match="doctor` on both machines examines their certificates"):
        ask(ours.security("scheduler:server"), trusting)


def test_server_of_another_authority_is_refused(ours: Authority, others: Authority) -> None:
    impostor = others.security("scheduler:server")
    trusting = Unchecked(ours.path, impostor.certificate, impostor.key)
    with pytest.raises(PeerLostError, match="its certificate is of another authority"):
        ask(trusting, ours.security("client:me"))


def test_caller_without_a_certificate_is_refused(ours: Authority) -> None:
    with serving(ECHO, ours.security("scheduler:server")) as served:
        credentials = grpc.ssl_channel_credentials(ours.path.read_bytes())
        with grpc.secure_channel(served.server.address, credentials) as channel:
            method = channel.unary_unary(f"/{SERVICE}/unary_unary")
            with pytest.raises(PeerLostError):
                call(method, b"", "the server", seconds=5)


def test_plain_text_and_tls_do_not_connect(ours: Authority) -> None:
    for of_server, of_client in (
        (ours.security("scheduler:server"), PLAIN),
        (PLAIN, ours.security("client:me")),
    ):
        with pytest.raises(PeerLostError, match="the server cannot be reached"):
            ask(of_server, of_client)


# --- options of the operator


def test_missing_options_are_refused_with_both_remedies(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"--tls-ca, --tls-cert, --tls-key not given.*--ins"
    ):
        Security.of(False, None, None, None)


def test_missing_flag_is_named(ours: Authority) -> None:
    security = ours.security("device-agent:some")
    with pytest.raises(InvalidInputError, match="^--tls-key not given"):
        Security.of(False, security.ca, security.certificate, None)


def test_plain_text_with_certificates_is_refused(ours: Authority) -> None:
    with pytest.raises(InvalidInputError, match="contradict"):
        Security.of(True, ours.path, None, None)


def test_missing_file_is_named(ours: Authority, tmp_path: Path) -> None:
    security = ours.security("device-agent:some")
    with pytest.raises(InvalidInputError, match=r"--tls-cert .*absent.pem: there is no such file"):
        Security.of(False, security.ca, tmp_path / "absent.pem", security.key)


def test_file_in_an_unreadable_folder_is_named(ours: Authority) -> None:
    security = ours.security("device-agent:some")
    unusable = Path("x" * 300)  # Looking for it fails, as in an unreadable folder.
    with pytest.raises(InvalidInputError, match=r"--tls-key x+: there is no such file, or"):
        Security.of(False, security.ca, security.certificate, unusable)


def test_security_has_the_files_of_the_options(ours: Authority) -> None:
    security = ours.security("device-agent:some")
    assert Security.of(False, security.ca, security.certificate, security.key) == security
    assert not security.is_insecure
    assert Security.of(True, None, None, None) == PLAIN
    assert PLAIN.is_insecure
    assert PLAIN.server_credentials() is None
    assert PLAIN.channel_credentials() is None


# --- the own certificate


def test_identity_and_expiry_are_read_from_the_certificate(ours: Authority) -> None:
    presented = ours.security("control-unit:cu-0").presented()
    assert presented is not None
    assert presented.identity == Identity(Role.CONTROL_UNIT, "cu-0")
    year = datetime.timedelta(days=365)
    left = presented.expires - datetime.datetime.now(datetime.timezone.utc)
    assert year - datetime.timedelta(hours=1) < left <= year
    assert PLAIN.presented() is None


def test_certificate_that_has_expired_is_refused_at_the_start(ours: Authority) -> None:
    old = ours.expired("device-agent:old")
    with pytest.raises(WrongStateError, match=r"certificate has expired\): renew it.*clock"):
        Security.of(False, old.ca, old.certificate, old.key)


def test_certificate_of_the_future_is_refused_with_the_clock_of_this_machine(
    ours: Authority,
) -> None:
    young = ours.future("device-agent:young")
    with pytest.raises(WrongStateError, match=r"not yet valid\): set the clock.*UTC"):
        Security.of(False, young.ca, young.certificate, young.key)


def test_certificate_of_another_authority_is_refused_at_the_start(
    ours: Authority, others: Authority
) -> None:
    stranger = others.security("device-agent:stranger")
    with pytest.raises(InvalidInputError, match="must be signed by the authority of --tls-ca"):
        Security.of(False, ours.path, stranger.certificate, stranger.key)


def test_certificate_without_a_role_is_refused_with_the_remedy(ours: Authority) -> None:
    nobody = ours.without_role("nobody")
    with pytest.raises(InvalidInputError, match="has no role.*collapipe certs issue"):
        Security.of(False, nobody.ca, nobody.certificate, nobody.key)


# --- the certificate of the server


def test_server_whose_certificate_has_expired_is_refused_with_the_remedy(
    ours: Authority,
) -> None:
    with pytest.raises(PeerLostError, match="its certificate has expired: renew it"):
        ask(ours.expired("scheduler:server"), ours.security("client:me"))


def test_caller_whose_certificate_has_expired_is_refused_with_likely_causes(
    ours: Authority,
) -> None:
    with pytest.raises(PeerLostError, match="doctor` on both machines examines their certificates"):
        ask(ours.security("scheduler:server"), ours.expired("client:me"))


def test_server_at_an_address_that_its_certificate_lacks_is_refused(ours: Authority) -> None:
    elsewhere = ours.security("device-agent:elsewhere")
    with serving(ECHO, elsewhere, ours.security("client:me"), "127.0.0.2:0") as served:
        method = served.channel.unary_unary(f"/{SERVICE}/unary_unary")
        with pytest.raises(PeerLostError, match="its certificate has another name or role"):
            call(method, b"", "the server", seconds=5)


def test_server_is_reached_at_an_address_that_was_issued_to_it(ours: Authority) -> None:
    there = ours.security("device-agent:there", "127.0.0.3")
    with serving(ECHO, there, ours.security("client:me"), "127.0.0.3:0") as served:
        assert served.call("unary_unary") == [b"ask"]


def test_device_at_the_address_of_the_scheduler_is_refused(ours: Authority) -> None:
    device = ours.security("device-agent:device-0-0")
    with serving(ECHO, device, ours.security("client:me"), expected=Role.SCHEDULER) as served:
        method = served.channel.unary_unary(f"/{SERVICE}/unary_unary")
        with pytest.raises(PeerLostError, match="its certificate has another name or role"):
            call(method, b"", "the scheduler", seconds=5)


def test_scheduler_is_accepted_at_any_address_for_its_role(ours: Authority) -> None:
    scheduler = ours.security("scheduler:server")
    with serving(
        ECHO, scheduler, ours.security("client:me"), "127.0.0.4:0", expected=Role.SCHEDULER
    ) as served:
        assert served.call("unary_unary") == [b"ask"]


def test_client_cannot_serve_with_its_certificate(ours: Authority) -> None:
    with pytest.raises(PeerLostError, match="the server cannot be reached"):
        ask(ours.security("client:posing"), ours.security("client:me"))
