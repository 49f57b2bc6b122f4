"""What an authority signs, keeps and refuses."""

import datetime
from pathlib import Path

import pytest
from cryptography import x509

from collapipe.certificates import Identity, Role, pki
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.certificates.private_files import PASSPHRASE_VARIABLE
from collapipe.errors import InvalidInputError, NotPermittedError

from .conftest import DEVICE, HERE, HOUR, SCHEDULER, Clock, certificate_in, contents, key_in

DAYS_90 = datetime.timedelta(days=90)
ME = Identity(Role.CLIENT, "me")


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """The folder of a holder."""
    return tmp_path / "box"


# --- the folder


def test_only_the_owner_can_read_the_keys(
    authority: AuthorityFolder, folder: Path, box: Path
) -> None:
    authority.issue(SCHEDULER, [], box)
    for key in (folder / "issuing.pem", folder / "root" / "ca-key.pem", box / "key.pem"):
        assert key.stat().st_mode & 0o777 == 0o600
    assert authority.ca_file.stat().st_mode & 0o777 == 0o644


def test_printed_command_has_the_folder_as_a_shell_needs_it(tmp_path: Path) -> None:
    folder = tmp_path / "a; $(b)"
    with pytest.raises(InvalidInputError) as refused:
        AuthorityFolder(folder)
    assert f"certs init '{folder}'`" in str(refused.value)


def test_authority_is_never_overwritten(authority: AuthorityFolder, folder: Path) -> None:
    before = authority.ca_file.read_bytes()
    with pytest.raises(InvalidInputError, match=str(folder)):
        AuthorityFolder.create(folder)
    authority.ca_file.unlink()  # the key alone must not be overwritten either
    with pytest.raises(InvalidInputError, match=str(folder)):
        AuthorityFolder.create(folder)
    authority.ca_file.write_bytes(before)
    AuthorityFolder(folder)


def test_error_for_a_folder_that_cannot_be_used_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"collapipe certs init {tmp_path}"):
        AuthorityFolder(tmp_path)
    with pytest.raises(InvalidInputError, match="xxx cannot be used"):
        AuthorityFolder(tmp_path / ("x" * 300))  # fails like a folder without permission
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="file/authority cannot be used"):
        AuthorityFolder.create(tmp_path / "file" / "authority")


def test_issuing_authority_of_another_root_is_detected(
    authority: AuthorityFolder, folder: Path, other: AuthorityFolder
) -> None:
    foreign = other.ca_file.with_name("issuing.pem").read_bytes()
    (folder / "issuing.pem").write_bytes(foreign)
    with pytest.raises(InvalidInputError, match="not belong together"):
        AuthorityFolder(folder)


@pytest.mark.parametrize("name", ["ca.pem", "issuing.pem"])
@pytest.mark.parametrize("left", [None, b"", b"half a fi"])
def test_error_for_a_lost_or_damaged_file_of_the_authority_names_it(
    authority: AuthorityFolder, folder: Path, name: str, left: bytes | None
) -> None:
    (folder / name).unlink()
    if left is not None:
        (folder / name).write_bytes(left)
    with pytest.raises(InvalidInputError, match=f"{folder / name}: .*backup"):
        AuthorityFolder(folder)


# --- issuing


def test_certificate_has_the_role_the_names_and_nothing_else(
    authority: AuthorityFolder, box: Path
) -> None:
    authority.issue(SCHEDULER, ["10.0.0.1", "Gate.LAN"], box)
    certificate = certificate_in(box)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(name.value) for name in names} == {
        *("spiffe://collapipe/scheduler/scheduler", "scheduler.role.collapipe.internal"),
        *("scheduler", "localhost", "127.0.0.1", "::1", "10.0.0.1", "gate.lan"),
    }
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert not constraints.value.ca and constraints.critical
    certificate.verify_directly_issued_by(authority.issuer)


def test_certificate_is_kept_until_a_third_of_its_life_is_left_and_renewed_for_the_same_key(
    authority: AuthorityFolder, box: Path, clock: Clock
) -> None:
    outcome, first = authority.issue(SCHEDULER, [], box, DAYS_90)
    assert outcome == "issued"
    before, key = contents(box), key_in(box)
    clock.advance(days=58)
    assert authority.issue(SCHEDULER, [], box, DAYS_90)[0] == "kept"
    assert contents(box) == before
    clock.advance(days=3)
    outcome, second = authority.issue(SCHEDULER, [], box, DAYS_90)
    assert outcome == "renewed"
    assert second - first == datetime.timedelta(days=61)
    assert pki.is_of_key(certificate_in(box), key.public_key())
    assert authority.issue(SCHEDULER, ["10.0.0.2"], box)[0] == "renewed"
    assert pki.hosts_of(certificate_in(box)) == {"10.0.0.2", "scheduler"}


@pytest.mark.parametrize("damaged", ["key.pem", "cert.pem"])
def test_files_that_do_not_belong_together_are_replaced(
    authority: AuthorityFolder, box: Path, damaged: str
) -> None:
    authority.issue(SCHEDULER, [], box)
    (box / damaged).write_text("half a fi")
    assert authority.issue(SCHEDULER, [], box)[0] == "issued"
    assert pki.is_of_key(certificate_in(box), key_in(box).public_key())


def test_certificate_of_another_authority_is_replaced(
    authority: AuthorityFolder, box: Path, other: AuthorityFolder
) -> None:
    other.issue(SCHEDULER, [], box)
    assert authority.issue(SCHEDULER, [], box)[0] == "issued"
    certificate_in(box).verify_directly_issued_by(authority.issuer)
    assert (box / "ca.pem").read_bytes() == authority.ca_file.read_bytes()


@pytest.mark.parametrize("name", ["scheduler", "gate.lan", "me"])
def test_name_of_another_holder_is_refused(
    authority: AuthorityFolder, tmp_path: Path, box: Path, name: str
) -> None:
    authority.issue(SCHEDULER, ["gate.lan"], tmp_path / "s")
    authority.issue(ME, [], tmp_path / "me")
    for identity, hosts in ((Identity(Role.DEVICE_AGENT, name), []), (DEVICE, [name])):
        with pytest.raises(InvalidInputError, match=name):
            authority.issue(identity, hosts, box)
        with pytest.raises(InvalidInputError, match=name):
            authority.make_token(identity, hosts, HOUR)
    assert not (box / "cert.pem").exists()


def test_name_is_free_again_when_its_certificate_has_expired(
    authority: AuthorityFolder, tmp_path: Path, clock: Clock
) -> None:
    authority.issue(SCHEDULER, [], tmp_path / "s", datetime.timedelta(days=2))
    clock.advance(days=3)
    successor = Identity(Role.DEVICE_AGENT, "scheduler")
    authority.issue(successor, [], tmp_path / "x")
    assert [issued.identity for issued in authority.certificates()] == [successor]


def test_holders_on_one_machine_share_its_address_and_other_files_are_ignored(
    authority: AuthorityFolder, folder: Path, tmp_path: Path
) -> None:
    authority.issue(SCHEDULER, [HERE], tmp_path / "s")
    backup = folder / "certificates" / "backup.pem"
    backup.write_bytes(authority.ca_file.read_bytes() * 2)
    authority.issue(DEVICE, [HERE], tmp_path / "d")
    assert [issued.identity for issued in authority.certificates()] == [DEVICE, SCHEDULER]


# --- the clock


def test_clock_that_was_ahead_for_a_while_deletes_no_certificate(
    authority: AuthorityFolder, tmp_path: Path, clock: Clock
) -> None:
    authority.issue(SCHEDULER, [], tmp_path / "s")
    clock.advance(days=500)
    authority.issue(DEVICE, [], tmp_path / "d")
    clock.advance(days=-500)
    assert [issued.identity for issued in authority.certificates()] == [DEVICE, SCHEDULER]


def test_clock_before_the_authority_was_made_signs_nothing(
    authority: AuthorityFolder, box: Path, clock: Clock
) -> None:
    clock.advance(days=-300)
    with pytest.raises(InvalidInputError, match="clock"):
        authority.issue(SCHEDULER, [], box)


def test_no_certificate_outlives_the_issuing_authority_which_can_be_replaced(
    authority: AuthorityFolder, folder: Path, box: Path, clock: Clock
) -> None:
    clock.advance(days=729)
    assert authority.issue(SCHEDULER, [], box)[1] == authority.issuer.not_valid_after_utc
    clock.advance(days=2)
    with pytest.raises(InvalidInputError, match="expired .*certs issuing"):
        authority.issue(SCHEDULER, [], box)
    authority.renew_issuer(AuthorityFolder.root_in(folder))
    authority.issue(SCHEDULER, [], box)


def test_renewed_certificate_is_not_short_for_ever_because_the_issuing_authority_ended_soon(
    authority: AuthorityFolder, clock: Clock, folder: Path
) -> None:
    clock.advance(days=720)
    assert authority.is_issuer_due
    request = pki.build_request(DEVICE, [], pki.new_key())
    joined = authority.enroll(authority.make_token(DEVICE, [], HOUR), request, None)
    assert joined.expires == authority.issuer.not_valid_after_utc
    authority.renew_issuer(AuthorityFolder.root_in(folder))
    renewed = authority.renew(pki.der(joined.certificate), request)
    assert pki.lifetime_of(renewed.certificate) == datetime.timedelta(days=365)


# --- revoking


def test_revoked_key_gets_no_certificate_again(authority: AuthorityFolder, box: Path) -> None:
    authority.issue(DEVICE, [], box)
    before, key = contents(box), key_in(box)
    present = pki.der(certificate_in(box))
    assert authority.revoke(DEVICE) == 1
    assert authority.certificates() == []
    request = pki.build_request(DEVICE, [], key)
    with pytest.raises(NotPermittedError, match="was revoked"):
        authority.renew(present, request)
    secret = authority.make_token(DEVICE, [], HOUR)
    with pytest.raises(NotPermittedError, match="new key"):
        authority.enroll(secret, request, None)
    assert authority.issue(DEVICE, [], box)[0] == "issued"
    assert contents(box)["key.pem"] != before["key.pem"]


def test_revoking_takes_every_key_and_the_tokens_of_a_holder(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    for name in ("one", "other"):
        authority.issue(DEVICE, [], tmp_path / name)
    authority.issue(SCHEDULER, [], tmp_path / "scheduler")
    secret = authority.make_token(DEVICE, [], HOUR)
    moved = Identity(DEVICE.role, DEVICE.name, 3)
    assert authority.revoke(moved) == 2  # a holder in any cluster
    assert not authority.has_token(secret)
    assert [held.identity for held in authority.certificates()] == [SCHEDULER]
    with pytest.raises(InvalidInputError, match=str(DEVICE)):
        authority.revoke(DEVICE)


# --- the root and the issuing authority


def test_everything_but_a_new_issuing_authority_works_without_the_root(
    authority: AuthorityFolder, folder: Path, tmp_path: Path
) -> None:
    (folder / "root").rename(tmp_path / "medium")
    opened = AuthorityFolder(folder)
    opened.issue(SCHEDULER, [], tmp_path / "s")
    request = pki.build_request(DEVICE, [], pki.new_key())
    joined = opened.enroll(opened.make_token(DEVICE, [], HOUR), request, None)
    opened.renew(pki.der(joined.certificate), request)
    assert opened.revoke(DEVICE) == 1
    with pytest.raises(InvalidInputError, match=r"root/ca.pem: .*--root"):
        opened.renew_issuer(AuthorityFolder.root_in(folder))
    opened.renew_issuer(tmp_path / "medium")
    opened.issue(ME, [], tmp_path / "me")


def test_another_root_makes_no_issuing_authority(
    authority: AuthorityFolder, tmp_path: Path
) -> None:
    medium = tmp_path / "medium"
    other = AuthorityFolder.create(tmp_path / "other", root=medium)
    assert not (tmp_path / "other" / "root").exists()
    with pytest.raises(InvalidInputError, match="another root"):
        authority.renew_issuer(medium)
    other.renew_issuer(medium)
    with pytest.raises(InvalidInputError, match="medium .*already"):
        AuthorityFolder.create(tmp_path / "third", root=medium)
    with pytest.raises(InvalidInputError, match="fourth .*root"):
        AuthorityFolder.create(tmp_path / "fourth", root=tmp_path / "fourth")


def test_authority_of_an_older_version_is_refused_with_the_remedy(
    authority: AuthorityFolder, folder: Path
) -> None:
    (folder / "issuing.pem").rename(folder / "ca-key.pem")
    with pytest.raises(InvalidInputError, match="older version .*certs init"):
        AuthorityFolder(folder)


def test_new_issuing_authority_keeps_certificates_and_the_list_of_revoked_keys(
    authority: AuthorityFolder, folder: Path, box: Path, tmp_path: Path
) -> None:
    authority.issue(SCHEDULER, [], box)
    authority.issue(DEVICE, [], tmp_path / "d")
    authority.revoke(DEVICE)
    before = contents(box)
    running = AuthorityFolder(folder)  # as in the service
    authority.renew_issuer(AuthorityFolder.root_in(folder))
    assert authority.issue(SCHEDULER, [], box)[0] == "kept"
    assert contents(box) == before
    request = pki.build_request(SCHEDULER, [], key_in(box))
    renewed = running.renew(pki.der(certificate_in(box)), request)
    assert renewed.chain.issuer == authority.issuer
    stolen = pki.build_request(DEVICE, [], key_in(tmp_path / "d"))
    with pytest.raises(NotPermittedError, match="was revoked"):
        running.enroll(running.make_token(DEVICE, [], HOUR), stolen, None)


def test_nothing_of_a_revoked_issuing_authority_is_renewed(
    authority: AuthorityFolder, folder: Path, box: Path
) -> None:
    authority.issue(SCHEDULER, [], box)
    key = contents(box)["key.pem"]
    secret = authority.make_token(DEVICE, [], HOUR)
    running = AuthorityFolder(folder)
    authority.renew_issuer(AuthorityFolder.root_in(folder), revoke=True)
    request = pki.build_request(SCHEDULER, [], key_in(box))
    with pytest.raises(NotPermittedError, match="no valid record"):
        running.renew(pki.der(certificate_in(box)), request)
    with pytest.raises(NotPermittedError, match="not of this authority"):
        running.enroll(secret, pki.build_request(DEVICE, [], pki.new_key()), None)
    assert authority.issue(SCHEDULER, [], box)[0] == "issued"
    assert contents(box)["key.pem"] != key


def test_crash_during_a_revocation_leaves_a_folder_that_signs_nothing_until_it_is_repeated(
    authority: AuthorityFolder, folder: Path, box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = AuthorityFolder.root_in(folder)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("collapipe.certificates.authority_folder._write_issuer", crash)
    with pytest.raises(KeyboardInterrupt):
        authority.renew_issuer(root, revoke=True)
    monkeypatch.undo()
    opened = AuthorityFolder(folder)
    with pytest.raises(InvalidInputError, match="was revoked: .*certs issuing"):
        opened.issue(SCHEDULER, [], box)
    opened.renew_issuer(root, revoke=True)
    opened.issue(SCHEDULER, [], box)


# --- the passphrase


def test_encrypted_key_needs_its_passphrase(
    tmp_path: Path, box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "correct horse")
    AuthorityFolder.create(tmp_path / "a").issue(DEVICE, [], box)
    for key in ("issuing.pem", "root/ca-key.pem"):
        assert b"ENCRYPTED" in (tmp_path / "a" / key).read_bytes()
    assert b"ENCRYPTED" not in contents(box)["key.pem"]
    AuthorityFolder(tmp_path / "a")
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "wrong")
    with pytest.raises(InvalidInputError, match="this passphrase"):
        AuthorityFolder(tmp_path / "a")
    monkeypatch.delenv(PASSPHRASE_VARIABLE)
    with pytest.raises(InvalidInputError, match=f"set {PASSPHRASE_VARIABLE}"):
        AuthorityFolder(tmp_path / "a")


def test_passphrase_does_not_matter_for_a_key_without_one(
    authority: AuthorityFolder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "anything")
    AuthorityFolder(folder)


def test_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(
    authority: AuthorityFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.make_token(DEVICE, [], HOUR)

    def listdir(folder: Path) -> list[str]:  # root may read everything
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", listdir)
    for act in (authority.certificates, lambda: authority.revoke(DEVICE)):
        with pytest.raises(InvalidInputError, match="Permission denied"):
            act()
