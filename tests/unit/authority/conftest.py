"""A running authority, and functions that run `collapipe` commands for it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from collapipe.v1.enrollment_pb2 import EnrollRequest, EnrollResponse, JoinToken
from collapipe_client.cli import app

SCHEDULER = "10.0.0.1:7100"


def collapipe(*arguments: Any, answer: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=answer)


@dataclass
class Served:
    """The folder of an authority, and the service that uses it."""

    folder: Path
    running: Running
    channel: grpc.Channel

    @contextmanager
    def connected(self) -> Iterator["Served"]:
        """Opens another connection."""
        root = (self.folder / "ca.pem").read_bytes()
        with open_authority_channel(self.running.address, root) as channel:
            yield replace(self, channel=channel)

    @property
    def address(self) -> str:
        return self.running.address

    @property
    def stub(self) -> enrollment_pb2_grpc.EnrollmentServiceStub:
        return enrollment_pb2_grpc.EnrollmentServiceStub(self.channel)

    def token(self, holder: str = "device-agent:pi", *options: str) -> str:
        made = collapipe(
            *("certs", "token", self.folder, holder, "--scheduler", SCHEDULER, "--json"),
            *("--authority", self.address, "--yes", *options),
        )
        assert made.exit_code == 0, made.output
        (token,) = json.loads(made.stdout)["tokens"]
        return str(token["token"])

    def secret(self) -> bytes:
        return decode_token(self.token())[0].secret

    def enroll(self, secret: bytes, asked: bytes) -> EnrollResponse:
        message = EnrollRequest(secret=secret, certificate_request=asked)
        return self.stub.Enroll(message, timeout=60)

    def holders(self) -> list[str]:
        """Returns the identities with a certificate, except the authority itself."""
        issued = AuthorityFolder(self.folder).certificates()
        return [str(one.identity) for one in issued if one.identity.name != "authority"]


Serve = Callable[[], Served]


@pytest.fixture(autouse=True)
def _own_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever joins as a person gets a context."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an authority. Each test gets a copy."""
    folder = tmp_path_factory.mktemp("made") / "authority"
    assert collapipe("certs", "init", folder).exit_code == 0
    return folder


@pytest.fixture
def serve(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts the service, also a second time as after a restart."""
    folder, started = tmp_path / "authority", list[Served]()
    shutil.copytree(made, folder)
    monkeypatch.setattr("sys.argv", ["authority", "--dir", str(folder)])

    def serve() -> Served:
        running = start(AuthoritySettings(), "")  # type: ignore[call-arg]
        channel = open_authority_channel(running.address, (folder / "ca.pem").read_bytes())
        started.append(Served(folder, running, channel))
        return started[-1]

    yield serve
    for served in started:
        served.channel.close()
        served.running.drain()


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve()


def changed(token: str, **fields: Any) -> JoinToken:
    read, _ = decode_token(token)
    for name, value in fields.items():
        setattr(read, name, value)
    return read
