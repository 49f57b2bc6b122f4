"""A running authority, and functions that run `collapipe` commands for it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import Result
from typer.testing import CliRunner

from collapipe.authority.app import AuthoritySettings, start
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.certificates.tokens import decode_token
from collapipe.rpc import open_authority_channel
from collapipe.service_process import Running
from collapipe.v1 import enrollment_pb2_grpc
from collapipe.v1.enrollment_pb2 import JoinToken
from collapipe_client.cli import app

SCHEDULER = "10.0.0.1:7100"


def collapipe(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@dataclass
class Served:
    """The folder of an authority, and the service that uses it."""

    folder: Path
    running: Running

    @property
    def address(self) -> str:
        return self.running.address

    def token(self, holder: str = "device-agent:pi", *options: str) -> str:
        made = collapipe(
            *("certs", "token", self.folder, holder, "--scheduler", SCHEDULER, "--json"),
            *("--authority", self.address, *options),
        )
        assert made.exit_code == 0, made.output
        return str(json.loads(made.stdout)["token"])

    def secret(self, holder: str = "device-agent:pi") -> bytes:
        return decode_token(self.token(holder))[0].secret

    def channel(self) -> grpc.Channel:
        return open_authority_channel(self.address, (self.folder / "ca.pem").read_bytes())

    def stub(self, channel: grpc.Channel) -> enrollment_pb2_grpc.EnrollmentServiceStub:
        return enrollment_pb2_grpc.EnrollmentServiceStub(channel)

    def holders(self) -> list[str]:
        """Returns the identities with a certificate, except the authority itself."""
        issued = AuthorityFolder(self.folder).certificates()
        return [str(one.identity) for one in issued if one.identity.name != "authority"]


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setattr("sys.argv", ["authority", "--dir", str(folder)])
    return start(AuthoritySettings(), "")  # type: ignore[call-arg]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    folder = tmp_path / "authority"
    assert collapipe("certs", "init", folder).exit_code == 0
    running = serve(folder, monkeypatch)
    yield Served(folder, running)
    running.drain()


def changed(token: str, **fields: Any) -> JoinToken:
    read, _ = decode_token(token)
    for name, value in fields.items():
        setattr(read, name, value)
    return read
