"""An authority whose clock a test can set."""

import datetime
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


@pytest.fixture
def authority(tmp_path: Path, clock: Clock) -> AuthorityFolder:
    return AuthorityFolder.create(tmp_path / "authority", clock)
