"""Two levels: the root, which every process trusts, and the issuing authority, which signs certificates."""

from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils

from collapipe.certificates import Role, pki, signatures
from collapipe.certificates.revoked_keys import sign_list
from collapipe.certificates.signatures import Signer, check_signature
from collapipe.errors import CollapipeError, InvalidInputError, NotPermittedError, WrongStateError
from collapipe.rpc import Security, to_error
from collapipe.v1.enrollment_pb2 import RevokedKeys, SignedRevokedKeys

from .authorities import Authority, Unchecked
from .serving import ECHO, serving

SERVER, DEVICE = "scheduler:server", "device-agent:d"
DAY = pki.datetime.timedelta(days=1)
OTHER_ROOT = "issuing authority is of another root"
REVOKED = "issuing authority .* was revoked"


def call(server: Security, caller: Security) -> None:
    """Makes a call; raises `CollapipeError` if the server refuses it."""
    with serving(ECHO, server, caller) as served:
        try:
            assert served.call("unary_unary")
        except grpc.RpcError as error:
            raise to_error(error, "the server") from None


def signed_by(signer: Security) -> tuple[bytes, bytes, bytes]:
    """Returns what a holder signs, with its certificate, whether or not anybody accepts that."""
    assert signer.key is not None and signer.certificate is not None
    own = Signer(signer.key.read_bytes(), signer.certificate.read_bytes())
    return b"data", own.sign(b"data"), own.certificate


def refusal(authority: Authority, signer: Security) -> str:
    """Returns why neither a call nor a signature of a process counts. `Security.of` refuses its files, too."""
    with pytest.raises(CollapipeError):
        call(authority.security(SERVER), signer)
    with pytest.raises((InvalidInputError, WrongStateError), match="--tls-cert"):
        Security.of(False, signer.ca, signer.certificate, signer.key)
    with pytest.raises(NotPermittedError) as raised:
        check_signature(*signed_by(signer), authority.path.read_bytes(), Role.DEVICE_AGENT)
    return str(raised.value)


def test_holder_cannot_sign_certificates_even_with_its_issuing_authority_in_the_chain(
    authority: Authority,
) -> None:
    posing = authority.issued_by(authority.security("device-agent:other"), DEVICE)
    assert OTHER_ROOT in refusal(authority, posing)
    assert posing.certificate is not None
    longer = posing.certificate.read_bytes() + pki.pem(authority.stolen()[1])
    posing.certificate.write_bytes(longer)
    with pytest.raises(CollapipeError):
        call(authority.security(SERVER), posing)


def test_issuing_authority_cannot_make_another_one(authority: Authority) -> None:
    key, issuer = authority.stolen()
    own = pki.new_key()
    second = pki.build_issuer(own.public_key(), (key, issuer), pki.utc_now(), 9 * DAY)
    posing = authority.forged((own, second), DEVICE)
    assert OTHER_ROOT in refusal(authority, posing)
    assert posing.certificate is not None
    posing.certificate.write_bytes(posing.certificate.read_bytes() + pki.pem(issuer))
    # A path length of 0 does not count authorities with the name of their issuer (RFC 5280, section 4.2.1.9), so TLS takes it.
    with pytest.raises(NotPermittedError, match="2 certificates, .* not 3 "):
        call(authority.security(SERVER), posing)


def test_expired_issuing_authority_or_one_of_another_root_is_refused(
    authority: Authority, others: Authority
) -> None:
    assert OTHER_ROOT in refusal(authority, authority.forged(others.stolen(), DEVICE))
    late = authority.with_expired_issuer(DEVICE)
    assert "issuing authority is not valid now" in refusal(authority, late)


def test_certificate_file_of_an_older_version_is_refused_with_the_reason(fresh: Authority) -> None:
    device = fresh.security(DEVICE)
    assert device.certificate is not None and device.key is not None
    key = pki.read_key(device.key.read_bytes()).public_key()
    root = pki.read_key((fresh.path.parent / "root" / "ca-key.pem").read_bytes())
    by_root = (root, pki.read_certificate(fresh.path.read_bytes()))
    now = pki.utc_now()
    old = pki.build_certificate(pki.Identity.parse(DEVICE), [], key, by_root, now, now + DAY)
    device.certificate.write_bytes(pki.pem(old))
    with pytest.raises(InvalidInputError, match="2 certificates, .* not 1 "):
        Security.of(False, device.ca, device.certificate, device.key)


def test_old_and_new_holders_talk_after_a_renewal_of_the_issuing_authority(
    fresh: Authority,
) -> None:
    server, old = fresh.security(SERVER), fresh.security(DEVICE)
    with serving(ECHO, server, old) as of_old:
        assert of_old.call("unary_unary")
        server.learn_revoked(fresh.renew_issuer())
        new = fresh.security("device-agent:new")
        assert of_old.call("unary_unary")
        call(server, new)
        call(fresh.security("scheduler:another"), old)
        new.check_signature(*signed_by(old), Role.DEVICE_AGENT)
        old.check_signature(*signed_by(new), Role.DEVICE_AGENT)
        # The server itself gets a certificate of the new one, for another address.
        fresh.security(SERVER, "10.0.0.1")
        assert of_old.call("unary_unary")
        call(server, new)


def test_nothing_of_a_revoked_issuing_authority_counts(fresh: Authority) -> None:
    server, stolen = fresh.security(SERVER), fresh.stolen()
    honest, forged = fresh.security(DEVICE), fresh.forged(stolen, "device-agent:forged")
    with serving(ECHO, server, forged) as served:
        assert served.call("unary_unary")
        server.learn_revoked(fresh.renew_issuer(revoke=True))
        with pytest.raises(grpc.RpcError, match=REVOKED):
            served.call("unary_unary")
    for refused in (honest, forged, fresh.forged(stolen, "device-agent:later")):
        with pytest.raises(NotPermittedError, match=REVOKED):
            call(server, refused)
        with pytest.raises(NotPermittedError, match=REVOKED):
            server.check_signature(*signed_by(refused), Role.DEVICE_AGENT)
    new = fresh.security("device-agent:new")
    call(server, new)
    server.check_signature(*signed_by(new), Role.DEVICE_AGENT)


def test_names_chosen_by_a_thief_do_not_hide_the_issuing_authority(fresh: Authority) -> None:
    """OpenSSL compares names without case. So the name of the issuer may differ from that in the list."""
    server, (key, issuer) = fresh.security(SERVER), fresh.stolen()
    template = fresh.forged((key, issuer), DEVICE)
    assert template.certificate is not None and template.key is not None
    made = pki.read_chain(template.certificate.read_bytes()).certificate
    builder = (
        x509.CertificateBuilder()
        .subject_name(made.subject)
        .issuer_name(x509.Name.from_rfc4514_string("CN=COLLAPIPE  Issuing authority"))
        .public_key(pki.read_key(template.key.read_bytes()).public_key())
        .serial_number(made.serial_number)
        .not_valid_before(made.not_valid_before_utc)
        .not_valid_after(made.not_valid_after_utc)
    )
    for extension in made.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    for hash_ in (hashes.SHA256(), hashes.SHA384()):
        chain = pki.Chain(builder.sign(key, hash_), issuer)
        template.certificate.write_bytes(chain.pem)
        posing = Unchecked(template.ca, template.certificate, template.key)
        list_before = Security(server.ca, server.certificate, server.key)
        call(list_before, posing)  # TLS alone takes it.
        list_before.learn_revoked(fresh.renew_issuer(revoke=True))
        with pytest.raises(NotPermittedError, match=REVOKED):
            call(list_before, posing)


def test_thief_of_the_issuing_key_cannot_bring_back_an_older_list(fresh: Authority) -> None:
    device, (key, issuer) = fresh.security(DEVICE), fresh.stolen()
    fresh.security("device-agent:box")
    older = fresh.revoke("device-agent:box")
    forged = sign_list(RevokedKeys(number=2**63), key, issuer)
    device.learn_revoked(older)
    device.learn_revoked(forged)  # Nobody knows of the theft yet.
    assert device.revoked.number == 2**63
    newest = fresh.renew_issuer(revoke=True)
    device.learn_revoked(newest)
    assert device.revoked.signed == newest
    mixed = SignedRevokedKeys(
        keys=forged.keys,
        signature=forged.signature,
        issuer=pki.der(_with_other_bytes(issuer)),
        revoked_issuers=newest.revoked_issuers,
        root_signature=newest.root_signature,
    )
    for attempt in (older, forged, mixed):
        with pytest.raises(NotPermittedError, match="revoked"):
            device.learn_revoked(attempt)
    # Without the part of the root, the list of the new issuing authority still takes nothing back.
    device.learn_revoked(
        SignedRevokedKeys(keys=newest.keys, signature=newest.signature, issuer=newest.issuer)
    )
    stolen = fresh.forged((key, issuer), "device-agent:forged")
    with pytest.raises(NotPermittedError, match=REVOKED):
        device.check_signature(*signed_by(stolen), Role.DEVICE_AGENT)


def test_only_the_root_revokes_an_issuing_authority(fresh: Authority) -> None:
    device, (key, issuer) = fresh.security(DEVICE), fresh.stolen()
    newest = fresh.renew_issuer(revoke=True)
    signed = sign_list(RevokedKeys(number=2**40), key, issuer)
    signed.revoked_issuers = newest.revoked_issuers
    signed.root_signature = key.sign(
        b"collapipe revoked issuers\0" + signed.revoked_issuers, ec.ECDSA(hashes.SHA256())
    )
    with pytest.raises(NotPermittedError, match="root .* not signed"):
        device.learn_revoked(signed)
    assert device.revoked.num_changes == 0


def _with_other_bytes(certificate: x509.Certificate) -> x509.Certificate:
    """Returns the same certificate with the other valid ECDSA signature, which anybody can compute."""
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    r, s = utils.decode_dss_signature(certificate.signature)
    other = utils.encode_dss_signature(r, order - s)
    # The signature is the last field. Its size may differ by a byte, so the sizes before it may, too.
    old = pki.der(certificate)
    body = old[4 : -len(certificate.signature) - 3]
    bits = b"\x03" + bytes([len(other) + 1]) + b"\0" + other
    size = len(body) + len(bits)
    made = pki.read_certificate(b"\x30\x82" + size.to_bytes(2, "big") + body + bits)
    assert made != certificate and made.public_key() == certificate.public_key()
    return made


def test_each_signature_of_many_clusters_is_verified_once(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each round, a host sees the grant of each cluster with every push."""
    verified = 0

    def public_key_of(certificate: Any) -> Any:
        nonlocal verified
        verified += 1
        return pki.public_key_of(certificate)

    monkeypatch.setattr(signatures, "public_key_of", public_key_of)
    server = authority.security("scheduler:server")
    assert server.key is not None and server.certificate is not None
    own = Signer(server.key.read_bytes(), server.certificate.read_bytes())
    grants = [f"grant {number}".encode() for number in range(200)]
    signed = [(grant, own.sign(grant), own.certificate) for grant in grants]
    for _ in range(2):
        for each in signed:
            check_signature(*each, authority.path.read_bytes(), Role.SCHEDULER)
    assert verified == len(grants)
