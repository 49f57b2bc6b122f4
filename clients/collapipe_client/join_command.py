"""`collapipe join`: makes this machine a part of a deployment, with one token."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from collapipe.certificates import Identity, Role
from collapipe.certificates.identity import read_host
from collapipe.errors import InvalidInputError
from collapipe.rpc import call, open_authority_channel
from collapipe.v1.enrollment_pb2 import EnrollRequest, JoinToken, RenewRequest
from collapipe.v1.enrollment_pb2_grpc import EnrollmentServiceStub
from collapipe_client.certs_commands import certs_extra, read_address
from collapipe_client.cli_options import AsJson
from collapipe_client.reporting import exit_codes, print_json, say

if TYPE_CHECKING:
    from cryptography import x509

    from collapipe.certificates.box_folder import BoxFolder, Joined

_DEADLINE_SECONDS = 20.0
_MODULES = {
    Role.SCHEDULER: "collapipe.scheduler",
    Role.EDGE_SERVER: "collapipe.edge_server",
    Role.CONTROL_UNIT: "collapipe.control_unit",
    Role.DEVICE_AGENT: "collapipe.device_agent",
}
"""What runs on a box, by its role; a client runs nothing."""
_KEEPS_STATE = (Role.SCHEDULER, Role.EDGE_SERVER, Role.CONTROL_UNIT)
_OF_A_CLUSTER = (Role.CONTROL_UNIT, Role.DEVICE_AGENT)

DEFAULT_FOLDER = Path("/etc/collapipe")
BoxOption = Annotated[
    Path, typer.Option("--folder", metavar="DIR", help="Gets the certificate and the settings.")
]


def join(
    token: Annotated[
        str, typer.Argument(envvar="COLLAPIPE_JOIN_TOKEN", help="Of `collapipe certs token`.")
    ],
    folder: BoxOption = DEFAULT_FOLDER,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="How others reach this machine. Default: the address that the authority sees.",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the service listens.")
    ] = "0.0.0.0:7100",
    metrics_listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where it serves /metrics.")
    ] = "0.0.0.0:9100",
    state_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Its state, if its role keeps any.")
    ] = Path("/var/lib/collapipe"),
    run: Annotated[
        bool, typer.Option("--run", help="Become the service. Where it has joined, only that.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make this machine a part of a deployment: get a certificate for a key that never leaves it.

    Can be repeated: where it has joined, nothing changes. To change the host of --advertise takes a new token.
    """
    with exit_codes(as_json), certs_extra():
        from collapipe.certificates.box_folder import BoxFolder
        from collapipe.certificates.tokens import decode_token, identity_of_token

        read = decode_token(token)
        identity = identity_of_token(read)
        assert identity is not None
        if run and identity.role not in _MODULES:
            raise InvalidInputError(
                f"the token is for {identity}, which runs no service: leave --run out"
            )
        for option, value in (("--listen", listen), ("--metrics-listen", metrics_listen)):
            read_address(option, value)
        host = read_host(read_address("--advertise", advertise)[0]) if advertise else None
        box = BoxFolder(folder.absolute())
        joined, observed = _already(box, identity, read, host), ""
        is_new = joined is None
        if joined is None:
            joined, observed = _enroll(box, identity, read, host)
        settings = box.settings_file(identity)
        if identity.role in _MODULES and (is_new or not settings.exists()):
            port = listen.rpartition(":")[2]
            address = advertise or f"{_bracketed(_reachable_host(joined, observed))}:{port}"
            document = {"listen": listen, "metrics_listen": metrics_listen, "advertise": address}
            box.write_settings(identity, document | _settings(identity, read, box, state_dir))
        _say_joined(joined, is_new, _next_command(identity, read, box), as_json)
        if run:
            _become(_MODULES[identity.role], settings)


def renew(
    folder: BoxOption = DEFAULT_FOLDER,
    now: Annotated[
        bool, typer.Option("--now", help="Also when more than a third of its life is left.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Renew the certificate of a machine that joined, before it expires. Made to be run every day."""
    with exit_codes(as_json), certs_extra():
        from collapipe.certificates import forms
        from collapipe.certificates.box_folder import BoxFolder

        box = BoxFolder(folder.absolute())
        joined = box.to_renew()
        is_due = now or joined.is_due
        if is_due:

            def ask(present: bytes, request: bytes) -> "x509.Certificate":
                message = RenewRequest(certificate=present, certificate_request=request)
                with _authority(box.authority_address(), box.authority()) as (stub, peer):
                    answer = call(stub.Renew, message, peer, _DEADLINE_SECONDS)
                return forms.read_certificate(answer.certificate)

            joined = box.renew(ask)
        if as_json:
            print_json({"renewed": is_due, "expires": joined.expires.isoformat()})
        elif is_due:
            say(f"{joined.identity}: renewed, until {joined.expires:%Y-%m-%d}; restart the service")
        else:
            say(f"{joined.identity}: good until {joined.expires:%Y-%m-%d}, nothing to do")


def _already(
    box: "BoxFolder", identity: Identity, token: JoinToken, host: str | None
) -> "Joined | None":
    """What the box is, if that is what the token would make it; refuses to make it something else."""
    from collapipe.certificates import forms

    joined = box.joined()
    if joined is None or (joined.identity == identity and joined.is_expired):
        return None
    is_elsewhere = box.authority() != forms.read_certificate(token.authority_certificate)
    if joined.identity != identity or is_elsewhere:
        of = " of another deployment" if is_elsewhere else ""
        raise InvalidInputError(
            f"this machine is {joined.identity}{of} by {box.tls}, and the token is for {identity}: give another "
            "--folder, or delete that one to let it change"
        )
    is_reached = host is None or host in joined.hosts | forms.OF_THIS_MACHINE
    return joined if box.is_renewable and is_reached else None


def _enroll(
    box: "BoxFolder", identity: Identity, token: JoinToken, host: str | None
) -> "tuple[Joined, str]":
    """Joins; returns also the address that the authority saw."""
    from collapipe.certificates import forms

    authority = forms.read_certificate(token.authority_certificate)
    observed = ""

    def ask(request: bytes) -> "x509.Certificate":
        nonlocal observed
        message = EnrollRequest(secret=token.secret, certificate_request=request)
        with _authority(token.authority_address, authority) as (stub, peer):
            answer = call(stub.Enroll, message, peer, _DEADLINE_SECONDS)
        observed = answer.observed_host
        return forms.read_certificate(answer.certificate)

    hosts = frozenset({host} if host else ())
    return box.join(identity, authority, token.authority_address, hosts, ask), observed


@contextmanager
def _authority(
    address: str, certificate: "x509.Certificate"
) -> Iterator[tuple[EnrollmentServiceStub, str]]:
    """The authority, proven by its certificate; and its name in errors."""
    from collapipe.certificates import forms

    with open_authority_channel(address, forms.pem(certificate)) as channel:
        yield EnrollmentServiceStub(channel), f"the authority at {address}"


def _settings(
    identity: Identity, token: JoinToken, box: "BoxFolder", state_dir: Path
) -> dict[str, str | int]:
    """What the service needs besides its addresses."""
    settings: dict[str, str | int] = {"host_id": identity.name}
    if identity.role is not Role.SCHEDULER:
        settings["scheduler"] = token.scheduler_address
    if identity.role in _OF_A_CLUSTER:
        settings["cluster_index"] = token.cluster_index
    if identity.role in _KEEPS_STATE:
        settings["state_dir"] = str(state_dir)
    return settings | {
        f"tls_{name}": str(box.tls / f"{name}.pem") for name in ("ca", "cert", "key")
    }


def _reachable_host(joined: "Joined", observed: str) -> str:
    """By which host others reach this machine, as far as one can tell."""
    others = sorted(joined.hosts - {joined.identity.name})
    if observed and (observed in others or not others):
        return observed
    return others[0] if others else joined.identity.name


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _next_command(identity: Identity, token: JoinToken, box: "BoxFolder") -> list[str]:
    if identity.role in _MODULES:
        settings = str(box.settings_file(identity))
        return [sys.executable, "-m", _MODULES[identity.role], "--config", settings]
    files = [f"--tls-{name}={box.tls / name}.pem" for name in ("ca", "cert", "key")]
    return ["collapipe", "status", "--scheduler", token.scheduler_address, *files]


def _say_joined(joined: "Joined", is_new: bool, command: list[str], as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "role": joined.identity.role.value,
                "name": joined.identity.name,
                "expires": joined.expires.isoformat(),
                "joined_now": is_new,
                "next": command,
            }
        )
        return
    word = "this machine is now" if is_new else "this machine is already"
    say(f"{word} {joined.identity}, until {joined.expires:%Y-%m-%d}")
    say(f"next: {shlex.join(command)}")


def _become(module: str, settings: Path) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, "--config", str(settings)])
