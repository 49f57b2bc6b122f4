"""What a join token grants to a box, and what a host may renew."""

import datetime
import json
import os
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from collapipe.certificates import Identity, Role, pki
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.errors import CollapipeError, InvalidInputError, NotPermittedError

from .conftest import DEVICE, HERE, HOUR, SCHEDULER, Clock, certificate_in, key_in

# --- enrolling


def grant(authority: AuthorityFolder, *hosts: str, identity: Identity = DEVICE) -> bytes:
    return authority.make_token(identity, hosts, HOUR)


def request(*hosts: str, identity: Identity = DEVICE) -> bytes:
    return pki.build_request(identity, hosts, pki.new_key())


def refuse(
    authority: AuthorityFolder,
    secret: bytes,
    reason: str,
    kind: type[CollapipeError] = NotPermittedError,
) -> None:
    with pytest.raises(kind, match=reason):
        authority.enroll(secret, request(), HERE)


def test_token_can_be_used_once_for_its_name_its_hosts_and_the_observed_address(
    authority: AuthorityFolder, folder: Path
) -> None:
    secret = grant(authority, "pi.lan")
    enrolled = authority.enroll(secret, request(), HERE)
    assert pki.identity_of(enrolled.certificate) == DEVICE
    assert pki.hosts_of(enrolled.certificate) == {"pi", "pi.lan", HERE}
    for again in (authority, AuthorityFolder(folder)):
        refuse(again, secret, "used before")
    assert len(authority.certificates()) == 1


def test_token_stays_usable_if_the_certificate_cannot_be_stored(
    authority: AuthorityFolder, folder: Path
) -> None:
    secret = grant(authority)
    records = folder / "certificates"
    records.write_text("a file here makes the folder as unwritable as a full disk does")
    refuse(authority, secret, str(records), InvalidInputError)
    records.unlink()
    assert authority.enroll(secret, request(), HERE).identity == DEVICE


def test_token_expires(authority: AuthorityFolder, clock: Clock) -> None:
    secret = grant(authority)
    clock.advance(hours=1)
    refuse(authority, secret, "expired at .* UTC")
    clock.advance(days=31)
    grant(authority)  # making a token deletes old ones
    refuse(authority, secret, "not of this authority")


def test_token_of_another_authority_is_refused(
    authority: AuthorityFolder, other: AuthorityFolder
) -> None:
    refuse(authority, grant(other), "not of this authority")


def test_secret_is_not_stored(authority: AuthorityFolder, folder: Path) -> None:
    secret = grant(authority)
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert secret not in data + str(path).encode()
        assert secret.hex() not in data.decode(errors="ignore") + str(path)


def test_stored_token_is_read_as_earlier_versions_wrote_it(
    authority: AuthorityFolder, folder: Path
) -> None:
    secret = grant(authority)
    (file,) = (folder / "tokens").iterdir()
    file.write_text(
        '{"expires": "2999-01-01T00:00:00.5+00:00", "hosts": ["pi.lan"], '
        '"identity": "spiffe://collapipe/device-agent/pi/cluster/0", "lifetime_seconds": 86400.0}'
    )
    certificate = authority.enroll(secret, request(), None).certificate
    assert pki.hosts_of(certificate) == {"pi", "pi.lan"}
    assert pki.lifetime_of(certificate) == datetime.timedelta(days=1)


@pytest.mark.parametrize("damage", ["expires", "hosts", "identity", "lifetime_seconds"])
def test_error_for_a_damaged_token_file_names_it(
    authority: AuthorityFolder, folder: Path, damage: str
) -> None:
    secret = grant(authority)
    (file,) = (folder / "tokens").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {damage: {}}))
    refuse(authority, secret, str(file), InvalidInputError)


def test_address_of_another_host_is_refused_and_the_token_stays_usable(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    authority.issue(SCHEDULER, [HERE], tmp_path / "s")
    secret = grant(authority)
    refuse(authority, secret, f"{HERE}, .*scheduler.*--address {HERE}")
    assert authority.enroll(secret, request(), "192.168.1.8").identity == DEVICE
    named = authority.enroll(grant(authority, "pi.lan"), request(), HERE)
    assert pki.hosts_of(named.certificate) == {"pi", "pi.lan"}
    allowed = authority.enroll(grant(authority, HERE), request(HERE), HERE)
    assert pki.hosts_of(allowed.certificate) == {"pi", HERE}
    on_own = authority.enroll(grant(authority), request(), HERE, is_own=True)
    assert pki.hosts_of(on_own.certificate) == {"pi", HERE}


@pytest.mark.parametrize("here", ["127.0.0.1", "::1"])
def test_hosts_on_the_machine_of_the_authority_share_its_address(
    authority: AuthorityFolder, here: str
) -> None:
    for name in ("d0", "d1"):
        identity = Identity(Role.DEVICE_AGENT, name)
        secret = grant(authority, identity=identity)
        enrolled = authority.enroll(secret, request(identity=identity), here)
        assert pki.hosts_of(enrolled.certificate) == {name}


def test_name_that_another_host_got_after_the_token_is_refused(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    secret = grant(authority)
    authority.issue(Identity(Role.EDGE_SERVER, "pi"), [], tmp_path / "x")
    refuse(authority, secret, "pi", InvalidInputError)


BEYOND = {
    "another role": request(identity=Identity(Role.SCHEDULER, "pi")),
    "another name": request(identity=Identity(Role.DEVICE_AGENT, "pi-2")),
    "another host": request("scheduler"),
    "another address": request("10.0.0.9"),
    "the name of a role": request("scheduler.role.collapipe.internal"),
    "everything": request("*.lan"),
}


def other_request(key: object, *extensions: x509.ExtensionType) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name.from_rfc4514_string("CN=scheduler")
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    signed = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
    return signed.public_bytes(serialization.Encoding.DER)


GENERAL_NAME_OF_X400 = bytes.fromhex("3002a300")

GARBAGE = {
    "nothing": b"",
    "another version": request().replace(b"\x02\x01\x00", b"\x02\x01\x07", 1),
    "a name of an unknown kind": other_request(
        pki.new_key(),
        x509.UnrecognizedExtension(x509.OID_SUBJECT_ALTERNATIVE_NAME, GENERAL_NAME_OF_X400),
    ),
    "noise": b"\x30\x82" + bytes(range(256)),
    "cut off": request()[:-7],
    "too long": request() + bytes(pki.MAX_REQUEST_BYTES),
    "RSA": other_request(rsa.generate_private_key(65537, 2048)),
    "another curve": other_request(ec.generate_private_key(ec.SECP384R1())),
    "an authority": other_request(pki.new_key(), x509.BasicConstraints(True, None)),
    "an e-mail address": other_request(
        pki.new_key(), x509.SubjectAlternativeName([x509.RFC822Name("a@b.c")])
    ),
    "a signature of another key": request()[:-3] + b"\0\0\0",
}


@pytest.mark.parametrize("wrong", [*BEYOND, *GARBAGE])
def test_malformed_request_or_one_beyond_the_grant_is_refused_and_the_token_stays_usable(
    authority: AuthorityFolder, wrong: str
) -> None:
    secret = grant(authority, "pi.lan")
    with pytest.raises(NotPermittedError if wrong in BEYOND else InvalidInputError):
        authority.enroll(secret, (BEYOND | GARBAGE)[wrong], HERE)
    assert not authority.certificates()
    assert authority.enroll(secret, request("pi.lan", HERE), HERE).identity == DEVICE


def test_subject_of_a_request_is_ignored(authority: AuthorityFolder) -> None:
    enrolled = authority.enroll(grant(authority), other_request(pki.new_key()), HERE)
    assert enrolled.certificate.subject.rfc4514_string() == "CN=pi"
    assert pki.identity_of(enrolled.certificate) == DEVICE


# --- renewing


def test_renewed_certificate_has_the_same_key_names_and_lifetime(
    authority: AuthorityFolder, clock: Clock
) -> None:
    key = pki.new_key()
    asked = pki.build_request(DEVICE, [HERE], key)
    first = authority.enroll(grant(authority), asked, HERE).certificate
    clock.advance(days=300)
    second = authority.renew(pki.der(first), asked).certificate
    assert pki.hosts_of(second) == pki.hosts_of(first)
    assert pki.is_of_key(second, key.public_key())
    gained = second.not_valid_after_utc - first.not_valid_after_utc
    assert gained == datetime.timedelta(days=300)


def test_repeated_renewals_leave_two_certificates(authority: AuthorityFolder, folder: Path) -> None:
    asked = pki.build_request(DEVICE, [], pki.new_key())
    present = authority.enroll(grant(authority), asked, HERE).certificate
    for _ in range(3):  # as if each answer were lost
        last = authority.renew(pki.der(present), asked).certificate
    assert len(os.listdir(folder / "certificates")) == 2
    assert authority.renew(pki.der(last), asked).identity == DEVICE
    assert len(os.listdir(folder / "certificates")) == 2


def test_certificate_of_another_holder_cannot_be_renewed(
    authority: AuthorityFolder, other: AuthorityFolder, tmp_path: Path, clock: Clock
) -> None:
    authority.issue(DEVICE, [], tmp_path / "d", datetime.timedelta(days=2))
    present, key = pki.der(certificate_in(tmp_path / "d")), key_in(tmp_path / "d")
    other.issue(DEVICE, [], tmp_path / "x")
    foreign = pki.der(certificate_in(tmp_path / "x"))
    for certificate, asked, reason in (
        (present, request(), "another key"),
        (present, pki.build_request(DEVICE, ["10.0.0.9"], key), "10.0.0.9"),
        (foreign, request(), "another authority"),
    ):
        with pytest.raises(NotPermittedError, match=reason):
            authority.renew(certificate, asked)
    clock.advance(days=3)
    with pytest.raises(NotPermittedError, match="expired"):
        authority.renew(present, pki.build_request(DEVICE, [], key))
