"""What an authority signs, keeps and refuses."""

import datetime
from pathlib import Path

import pytest
from cryptography import x509

from collapipe.certificates import Identity, Role, pki
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.certificates.private_files import PASSPHRASE_VARIABLE
from collapipe.errors import InvalidInputError, NotPermittedError

from .conftest import DEVICE, HERE, HOUR, SCHEDULER, Clock, certificate_in

# --- the folder


def test_only_the_owner_can_read_the_key_of_the_authority(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    for key in ("issuing.pem", "root/ca-key.pem"):
        assert (tmp_path / "authority" / key).stat().st_mode & 0o777 == 0o600
    assert authority.ca_file.stat().st_mode & 0o777 == 0o644


def test_authority_is_never_overwritten(authority: AuthorityFolder, tmp_path: Path) -> None:
    before = authority.ca_file.read_bytes()
    with pytest.raises(InvalidInputError, match="holds an authority"):
        AuthorityFolder.create(tmp_path / "authority")
    authority.ca_file.unlink()  # the key alone must not be overwritten either
    with pytest.raises(InvalidInputError, match="holds an authority"):
        AuthorityFolder.create(tmp_path / "authority")
    authority.ca_file.write_bytes(before)
    AuthorityFolder(tmp_path / "authority")


def test_error_for_a_folder_without_an_authority_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"collapipe certs init {tmp_path}"):
        AuthorityFolder(tmp_path)
    with pytest.raises(InvalidInputError, match="x cannot be used"):
        AuthorityFolder(tmp_path / ("x" * 300))  # fails like a folder without permission


def test_issuing_authority_of_another_root_is_detected(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    other = AuthorityFolder.create(tmp_path / "other")
    (tmp_path / "authority" / "issuing.pem").write_bytes(
        (other.ca_file.parent / "issuing.pem").read_bytes()
    )
    with pytest.raises(InvalidInputError, match="do not belong together"):
        AuthorityFolder(tmp_path / "authority")


@pytest.mark.parametrize("name", ["ca.pem", "issuing.pem"])
@pytest.mark.parametrize("left", [None, b"", b"half a fi"])
def test_error_for_a_lost_or_damaged_file_of_the_authority_names_it(
    authority: AuthorityFolder, tmp_path: Path, name: str, left: bytes | None
) -> None:
    file = tmp_path / "authority" / name
    file.unlink()
    if left is not None:
        file.write_bytes(left)
    with pytest.raises(InvalidInputError, match=f"{file}: .*: restore the folder from a backup"):
        AuthorityFolder(tmp_path / "authority")


def test_error_for_a_folder_that_cannot_be_written_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="file/authority cannot be used"):
        AuthorityFolder.create(tmp_path / "file" / "authority")


# --- issuing


def test_certificate_has_the_role_the_names_and_nothing_else(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    authority.issue(SCHEDULER, ["10.0.0.1", "Gate.LAN"], tmp_path / "s")
    certificate = certificate_in(tmp_path / "s")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert sorted(str(name.value) for name in names) == sorted(
        [
            *("spiffe://collapipe/scheduler/scheduler", "scheduler.role.collapipe.internal"),
            *("scheduler", "localhost", "127.0.0.1", "::1", "10.0.0.1", "gate.lan"),
        ]
    )
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert not constraints.value.ca and constraints.critical
    assert (tmp_path / "s" / "key.pem").stat().st_mode & 0o777 == 0o600
    certificate.verify_directly_issued_by(authority.issuer)


def test_good_certificate_is_kept(authority: AuthorityFolder, tmp_path: Path) -> None:
    assert authority.issue(SCHEDULER, [], tmp_path / "s")[0] == "issued"
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    assert authority.issue(SCHEDULER, [], tmp_path / "s")[0] == "kept"
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before


def test_certificate_with_less_than_a_third_of_its_life_left_is_renewed_for_the_same_key(
    authority: AuthorityFolder, tmp_path: Path, clock: Clock
) -> None:
    _, first = authority.issue(SCHEDULER, [], tmp_path / "s", datetime.timedelta(days=90))
    key = (tmp_path / "s" / "key.pem").read_bytes()
    clock.advance(days=58)
    assert authority.issue(SCHEDULER, [], tmp_path / "s", datetime.timedelta(days=90))[0] == "kept"
    clock.advance(days=3)
    done, second = authority.issue(SCHEDULER, [], tmp_path / "s", datetime.timedelta(days=90))
    assert done == "renewed"
    assert second - first == datetime.timedelta(days=61)
    assert (tmp_path / "s" / "key.pem").read_bytes() == key


def test_certificate_for_other_addresses_is_replaced(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    authority.issue(SCHEDULER, ["10.0.0.1"], tmp_path / "s")
    assert authority.issue(SCHEDULER, ["10.0.0.2"], tmp_path / "s")[0] == "renewed"
    assert pki.hosts_of(certificate_in(tmp_path / "s")) == {"10.0.0.2", "scheduler"}


@pytest.mark.parametrize("damaged", ["key.pem", "cert.pem"])
def test_files_that_do_not_belong_together_are_replaced(
    authority: AuthorityFolder, tmp_path: Path, damaged: str
) -> None:
    authority.issue(SCHEDULER, [], tmp_path / "s")
    (tmp_path / "s" / damaged).write_text("half a fi")
    assert authority.issue(SCHEDULER, [], tmp_path / "s")[0] == "issued"
    key = pki.read_key((tmp_path / "s" / "key.pem").read_bytes())
    assert pki.is_of_key(certificate_in(tmp_path / "s"), key.public_key())


def test_certificate_of_another_authority_is_replaced(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    AuthorityFolder.create(tmp_path / "other").issue(SCHEDULER, [], tmp_path / "s")
    assert authority.issue(SCHEDULER, [], tmp_path / "s")[0] == "issued"
    certificate_in(tmp_path / "s").verify_directly_issued_by(authority.issuer)
    assert (tmp_path / "s" / "ca.pem").read_bytes() == authority.ca_file.read_bytes()


@pytest.mark.parametrize(
    ("identity", "hosts"),
    [
        (Identity(Role.DEVICE_AGENT, "scheduler"), []),
        (Identity(Role.DEVICE_AGENT, "gate.lan"), []),
        (DEVICE, ["scheduler"]),
        (DEVICE, ["gate.lan"]),
        (Identity(Role.DEVICE_AGENT, "me"), []),
        (DEVICE, ["me"]),
    ],
    ids=str,
)
def test_name_of_another_holder_is_refused(
    authority: AuthorityFolder, tmp_path: Path, identity: Identity, hosts: list[str]
) -> None:
    authority.issue(SCHEDULER, ["gate.lan"], tmp_path / "s")
    authority.issue(Identity(Role.CLIENT, "me"), [], tmp_path / "me")
    with pytest.raises(InvalidInputError, match="each name belongs to one host"):
        authority.issue(identity, hosts, tmp_path / "x")
    with pytest.raises(InvalidInputError, match="each name belongs to one host"):
        authority.make_token(identity, hosts, HOUR)
    assert not (tmp_path / "x" / "cert.pem").exists()


def test_name_is_free_again_when_its_certificate_has_expired(
    authority: AuthorityFolder, tmp_path: Path, clock: Clock
) -> None:
    authority.issue(SCHEDULER, [], tmp_path / "s", datetime.timedelta(days=2))
    clock.advance(days=3)
    authority.issue(Identity(Role.DEVICE_AGENT, "scheduler"), [], tmp_path / "x")
    assert [str(issued.identity) for issued in authority.certificates()] == [
        "device-agent:scheduler"
    ]


def test_clock_that_was_ahead_for_a_while_deletes_no_certificate(
    authority: AuthorityFolder, tmp_path: Path, clock: Clock
) -> None:
    authority.issue(SCHEDULER, [], tmp_path / "s")
    clock.advance(days=500)
    authority.issue(DEVICE, [], tmp_path / "d")
    clock.advance(days=-500)
    assert [issued.identity for issued in authority.certificates()] == [DEVICE, SCHEDULER]


def test_clock_before_the_authority_was_made_signs_nothing(
    authority: AuthorityFolder, tmp_path: Path, clock: Clock
) -> None:
    clock.advance(days=-300)
    with pytest.raises(InvalidInputError, match=r"the clock .* says .*: set the clock"):
        authority.issue(SCHEDULER, [], tmp_path / "s")


def test_other_certificate_in_the_folder_of_issued_ones_is_ignored(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    authority.issue(SCHEDULER, [], tmp_path / "s")
    records = tmp_path / "authority" / "certificates"
    (records / "backup.pem").write_bytes(authority.ca_file.read_bytes() * 2)
    authority.issue(DEVICE, [], tmp_path / "d")
    assert [issued.identity for issued in authority.certificates()] == [DEVICE, SCHEDULER]


def test_holders_on_one_machine_share_its_address(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    authority.issue(SCHEDULER, [HERE], tmp_path / "s")
    authority.issue(DEVICE, [HERE], tmp_path / "d")


def test_no_certificate_outlives_the_authority(
    authority: AuthorityFolder, tmp_path: Path, clock: Clock
) -> None:
    clock.advance(days=729)
    assert authority.issue(SCHEDULER, [], tmp_path / "s")[1] == authority.issuer.not_valid_after_utc
    clock.advance(days=2)
    with pytest.raises(InvalidInputError, match=r"the issuing authority in .* expired at"):
        authority.issue(SCHEDULER, [], tmp_path / "s")


# --- revoking


def test_revoked_key_gets_no_certificate_again(authority: AuthorityFolder, tmp_path: Path) -> None:
    authority.issue(DEVICE, [], tmp_path / "box")
    key, before = (tmp_path / "box" / "key.pem").read_bytes(), certificate_in(tmp_path / "box")
    assert authority.revoke(DEVICE) == 1
    assert authority.certificates() == []
    request = pki.build_request(DEVICE, [], pki.read_key(key))
    with pytest.raises(NotPermittedError, match="was revoked"):
        authority.renew(pki.der(before), request)
    secret = authority.make_token(DEVICE, [], HOUR)
    with pytest.raises(NotPermittedError, match="needs a new key"):
        authority.enroll(secret, request, None)
    assert authority.issue(DEVICE, [], tmp_path / "box")[0] == "issued"
    assert (tmp_path / "box" / "key.pem").read_bytes() != key


def test_revoking_takes_every_key_and_the_tokens_of_a_holder(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    for folder in ("one", "other"):
        authority.issue(DEVICE, [], tmp_path / folder)
    authority.issue(SCHEDULER, [], tmp_path / "scheduler")
    secret = authority.make_token(DEVICE, [], HOUR)
    moved = Identity(DEVICE.role, DEVICE.name, 3)
    assert authority.revoke(moved) == 2  # a holder in any cluster
    assert not authority.has_token(secret)
    assert [held.identity for held in authority.certificates()] == [SCHEDULER]
    with pytest.raises(InvalidInputError, match="has neither a valid certificate"):
        authority.revoke(DEVICE)


# --- the root and the issuing authority


def test_everything_but_a_new_issuing_authority_works_without_the_root(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    (tmp_path / "authority" / "root").rename(tmp_path / "medium")
    opened = AuthorityFolder(tmp_path / "authority")
    opened.issue(SCHEDULER, [], tmp_path / "s")
    key = pki.new_key()
    request = pki.build_request(DEVICE, [], key)
    joined = opened.enroll(opened.make_token(DEVICE, [], HOUR), request, None)
    opened.renew(pki.der(joined.certificate), request)
    assert opened.revoke(DEVICE) == 1
    with pytest.raises(InvalidInputError, match=r"root/ca.pem: .* with --root"):
        opened.renew_issuer(AuthorityFolder.root_in(tmp_path / "authority"))
    opened.renew_issuer(tmp_path / "medium")
    opened.issue(Identity(Role.CLIENT, "me"), [], tmp_path / "me")


def test_another_root_makes_no_issuing_authority(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    other = AuthorityFolder.create(tmp_path / "other", root=tmp_path / "medium")
    assert not (tmp_path / "other" / "root").exists()
    with pytest.raises(InvalidInputError, match="holds another root"):
        authority.renew_issuer(tmp_path / "medium")
    other.renew_issuer(tmp_path / "medium")
    with pytest.raises(InvalidInputError, match="holds the key of an authority already"):
        AuthorityFolder.create(tmp_path / "third", root=tmp_path / "medium")
    with pytest.raises(InvalidInputError, match="is the folder of the root"):
        AuthorityFolder.create(tmp_path / "fourth", root=tmp_path / "fourth")


def test_authority_of_an_older_version_is_refused_with_the_remedy(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    folder = tmp_path / "authority"
    (folder / "issuing.pem").rename(folder / "ca-key.pem")
    with pytest.raises(InvalidInputError, match="older version .* in another folder with"):
        AuthorityFolder(folder)


def test_new_issuing_authority_keeps_certificates_and_the_list_of_revoked_keys(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    authority.issue(SCHEDULER, [], tmp_path / "s")
    authority.issue(DEVICE, [], tmp_path / "d")
    revoked = (tmp_path / "d" / "key.pem").read_bytes()
    authority.revoke(DEVICE)
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    request = pki.build_request(
        SCHEDULER, [], pki.read_key((tmp_path / "s" / "key.pem").read_bytes())
    )
    running = AuthorityFolder(tmp_path / "authority")  # as in the service
    authority.renew_issuer(AuthorityFolder.root_in(tmp_path / "authority"))
    assert authority.issue(SCHEDULER, [], tmp_path / "s")[0] == "kept"
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before
    renewed = running.renew(pki.der(certificate_in(tmp_path / "s")), request)
    assert renewed.chain.issuer == authority.issuer
    stolen = pki.build_request(DEVICE, [], pki.read_key(revoked))
    with pytest.raises(NotPermittedError, match="was revoked"):
        running.enroll(running.make_token(DEVICE, [], HOUR), stolen, None)


def test_nothing_of_a_revoked_issuing_authority_is_renewed(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    authority.issue(SCHEDULER, [], tmp_path / "s")
    key = (tmp_path / "s" / "key.pem").read_bytes()
    secret = authority.make_token(DEVICE, [], HOUR)
    running = AuthorityFolder(tmp_path / "authority")
    authority.renew_issuer(AuthorityFolder.root_in(tmp_path / "authority"), revoke=True)
    request = pki.build_request(SCHEDULER, [], pki.read_key(key))
    with pytest.raises(NotPermittedError, match="no valid record"):
        running.renew(pki.der(certificate_in(tmp_path / "s")), request)
    with pytest.raises(NotPermittedError, match="not of this authority"):
        running.enroll(secret, pki.build_request(DEVICE, [], pki.new_key()), None)
    assert authority.issue(SCHEDULER, [], tmp_path / "s")[0] == "issued"
    assert (tmp_path / "s" / "key.pem").read_bytes() != key


def test_crash_during_a_revocation_leaves_a_folder_that_signs_nothing_until_it_is_repeated(
    authority: AuthorityFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = AuthorityFolder.root_in(tmp_path / "authority")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("collapipe.certificates.authority_folder._write_issuer", crash)
    with pytest.raises(KeyboardInterrupt):
        authority.renew_issuer(root, revoke=True)
    monkeypatch.undo()
    opened = AuthorityFolder(tmp_path / "authority")
    with pytest.raises(InvalidInputError, match=r"was revoked: .*collapipe certs issuing"):
        opened.issue(SCHEDULER, [], tmp_path / "s")
    opened.renew_issuer(root, revoke=True)
    opened.issue(SCHEDULER, [], tmp_path / "s")


def test_renewed_certificate_is_not_short_for_ever_because_the_issuing_authority_ended_soon(
    authority: AuthorityFolder, clock: Clock, tmp_path: Path
) -> None:
    clock.advance(days=720)
    assert authority.is_issuer_due
    request = pki.build_request(DEVICE, [], pki.new_key())
    joined = authority.enroll(authority.make_token(DEVICE, [], HOUR), request, None)
    assert joined.expires == authority.issuer.not_valid_after_utc
    authority.renew_issuer(AuthorityFolder.root_in(tmp_path / "authority"))
    renewed = authority.renew(pki.der(joined.certificate), request)
    assert pki.lifetime_of(renewed.certificate) == datetime.timedelta(days=365)


def test_issuing_authority_that_has_expired_can_be_replaced(
    authority: AuthorityFolder, clock: Clock, tmp_path: Path
) -> None:
    clock.advance(days=731)
    with pytest.raises(InvalidInputError, match="expired at .*collapipe certs issuing"):
        authority.issue(SCHEDULER, [], tmp_path / "s")
    authority.renew_issuer(AuthorityFolder.root_in(tmp_path / "authority"))
    authority.issue(SCHEDULER, [], tmp_path / "s")


# --- the passphrase


def test_encrypted_key_needs_its_passphrase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "correct horse")
    AuthorityFolder.create(tmp_path / "a").issue(DEVICE, [], tmp_path / "box")
    for key in ("issuing.pem", "root/ca-key.pem"):
        assert b"ENCRYPTED" in (tmp_path / "a" / key).read_bytes()
    assert b"ENCRYPTED" not in (tmp_path / "box" / "key.pem").read_bytes()
    AuthorityFolder(tmp_path / "a")
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "wrong")
    with pytest.raises(InvalidInputError, match="that this passphrase opens"):
        AuthorityFolder(tmp_path / "a")
    monkeypatch.delenv(PASSPHRASE_VARIABLE)
    with pytest.raises(InvalidInputError, match=f"set {PASSPHRASE_VARIABLE} to its passphrase"):
        AuthorityFolder(tmp_path / "a")


def test_passphrase_does_not_matter_for_a_key_without_one(
    authority: AuthorityFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "anything")
    AuthorityFolder(tmp_path / "authority")
