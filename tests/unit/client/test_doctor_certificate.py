import errno
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from collapipe.certificates import Identity, pki
from collapipe_client.doctor.certificate import check_certificate
from collapipe_client.doctor.check import Check

_NOW = datetime.now(timezone.utc)
_YEAR = timedelta(days=365)


class _Deployment:
    """An authority and the files of one box."""

    def __init__(self, folder: Path, issuer_left: timedelta = 2 * _YEAR) -> None:
        self._folder = folder
        self._key = pki.new_key()
        root_key = pki.new_key()
        root = pki.build_root(root_key, _NOW - 2 * _YEAR, 10 * _YEAR)
        self._issuer = pki.build_issuer(
            self._key.public_key(), (root_key, root), _NOW - 2 * _YEAR, 2 * _YEAR + issuer_left
        )
        self.ca = self._write("ca.pem", pki.pem(root))

    def box(
        self,
        identity: str = "device-agent:pi-3",
        *hosts: str,
        age: timedelta = timedelta(minutes=1),
    ) -> tuple[Path, Path, Path]:
        key = pki.new_key()
        certificate = pki.build_certificate(
            Identity.parse(identity),
            hosts,
            key.public_key(),
            (self._key, self._issuer),
            _NOW - age,
            _NOW - age + _YEAR,
        )
        key_file = self._write("key.pem", pki.key_pem(key))
        key_file.chmod(0o600)
        chain = pki.Chain(certificate, self._issuer)
        return self.ca, self._write("cert.pem", chain.pem), key_file

    def _write(self, name: str, data: bytes) -> Path:
        path = self._folder / name
        path.write_bytes(data)
        return path


@pytest.fixture
def deployment(tmp_path: Path) -> _Deployment:
    return _Deployment(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> _Deployment:
    (tmp_path / "other").mkdir()
    return _Deployment(tmp_path / "other")


def _failed(checks: list[Check]) -> list[str]:
    return [check.found for check in checks if check.result != "ok"]


@pytest.mark.parametrize("host", ["192.168.1.23", "pi-3"])
def test_certificate_of_the_deployment_passes(deployment: _Deployment, host: str) -> None:
    checks = check_certificate(
        *deployment.box("device-agent:pi-3", "192.168.1.23"),
        role="device-agent",
        advertised_host=host,
    )
    assert _failed(checks) == []
    assert "device-agent pi-3: valid for 364 days" in checks[-1].found


def test_key_of_another_certificate_fails(deployment: _Deployment) -> None:
    ca, certificate, key = deployment.box()
    key.write_bytes(pki.key_pem(pki.new_key()))
    assert "no certificate" in " ".join(_failed(check_certificate(ca, certificate, key)))


def test_certificate_of_another_authority_fails_unless_a_bundle_has_both(
    deployment: _Deployment, other: _Deployment
) -> None:
    ca, certificate, key = deployment.box()
    assert "signed by" in " ".join(_failed(check_certificate(other.ca, certificate, key)))
    ca.write_bytes(other.ca.read_bytes() + ca.read_bytes())
    assert _failed(check_certificate(ca, certificate, key)) == []


def test_certificate_of_another_role_or_another_host_fails(deployment: _Deployment) -> None:
    files = deployment.box("control-unit:cu-0")
    (failed,) = _failed(check_certificate(*files, role="device-agent"))
    assert "device-agent" in failed
    files = deployment.box("device-agent:pi-3", "192.168.1.23")
    (failed,) = _failed(check_certificate(*files, advertised_host="192.168.1.99"))
    assert "192.168.1.23" in failed and "192.168.1.99" in failed


@pytest.mark.parametrize(
    ("age", "result", "word"),
    [
        (-timedelta(days=3), "fail", "clock of this machine"),
        (timedelta(days=300), "ok", "64 days"),
        (timedelta(days=350), "warn", "14 days"),
        (timedelta(days=366), "fail", "expired"),
    ],
)
def test_dates_are_compared_with_the_clock_of_the_box(
    deployment: _Deployment, age: timedelta, result: str, word: str
) -> None:
    (check,) = check_certificate(*deployment.box(age=age))
    assert (check.result, word in check.found) == (result, True)


def test_remedy_for_a_certificate_is_a_command_that_helps(deployment: _Deployment) -> None:
    """`join` keeps a valid certificate. `renew` refuses an expired one, and cannot change its addresses."""
    (soon,) = check_certificate(*deployment.box(age=timedelta(days=350)))
    assert "collapipe renew" in soon.remedy and "collapipe join" not in soon.remedy
    (late,) = check_certificate(*deployment.box(age=timedelta(days=366)))
    assert "collapipe join TOKEN" in late.remedy and "collapipe renew" not in late.remedy
    moved = check_certificate(*deployment.box(), advertised_host="10.0.0.9")[0]
    assert "collapipe join TOKEN --advertise 10.0.0.9:PORT" in moved.remedy


def test_certificate_that_ends_with_its_issuing_authority_needs_a_new_one_first(
    tmp_path: Path,
) -> None:
    soon = _Deployment(tmp_path, issuer_left=timedelta(days=20))
    (check,) = check_certificate(*soon.box())
    assert check.result == "warn" and "19 days" in check.found
    assert "collapipe certs issuing" in check.remedy


def test_key_that_other_users_may_read_gives_a_warning(deployment: _Deployment) -> None:
    ca, certificate, key = deployment.box()
    key.chmod(0o640)
    (check,) = [c for c in check_certificate(ca, certificate, key) if c.result != "ok"]
    assert (check.name, check.result, "640" in check.found) == ("key", "warn", True)


def test_failure_names_the_file_that_cannot_be_read(deployment: _Deployment) -> None:
    for file in (files := deployment.box()):
        before = file.read_bytes()
        for content in (None, b"not PEM"):
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content)
            (check,) = check_certificate(*files)
            assert check.result == "fail" and str(file) in check.found
        file.write_bytes(before)


def test_remedy_for_a_key_without_permission_is_sudo(
    deployment: _Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = deployment.box()
    read_bytes = Path.read_bytes

    def refuse_the_key(path: Path) -> bytes:
        if path == files[2]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse_the_key)
    (check,) = check_certificate(*files)
    assert (check.result, "sudo" in check.remedy) == ("fail", True)
    assert str(files[2]) in check.found
