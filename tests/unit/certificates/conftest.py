"""An authority whose clock a test can set."""

import datetime
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509

from collapipe.certificates import Identity, Role, pki
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.certificates.pki import utc_now

SCHEDULER = Identity(Role.SCHEDULER, "scheduler")
DEVICE = Identity(Role.DEVICE_AGENT, "pi")
HOUR = datetime.timedelta(hours=1)
HERE = "192.168.1.7"


def certificate_in(folder: Path) -> x509.Certificate:
    return pki.read_certificate((folder / "cert.pem").read_bytes())


def key_in(folder: Path) -> pki.ec.EllipticCurvePrivateKey:
    return pki.read_key((folder / "key.pem").read_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@dataclass
class Clock:
    now: datetime.datetime

    def __call__(self) -> datetime.datetime:
        return self.now

    def advance(self, **time: float) -> None:
        self.now += datetime.timedelta(**time)


@pytest.fixture
def clock() -> Clock:
    return Clock(utc_now())


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an authority. Each test gets a copy."""
    folder = tmp_path_factory.mktemp("made") / "authority"
    AuthorityFolder.create(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "authority"


@pytest.fixture
def authority(made: Path, folder: Path, clock: Clock) -> AuthorityFolder:
    shutil.copytree(made, folder)
    return AuthorityFolder(folder, clock)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> AuthorityFolder:
    """The authority of another deployment."""
    return AuthorityFolder.create(tmp_path_factory.mktemp("other") / "authority")
