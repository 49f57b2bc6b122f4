"""The commands `collapipe join` and `collapipe renew`, which give this machine its certificate."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from collapipe.certificates import Identity, Role, pki
from collapipe.certificates.box_folder import BoxFolder
from collapipe.certificates.identity import (
    IN_A_CLUSTER,
    OF_OPERATORS,
    OF_THIS_MACHINE,
    PEOPLE,
    read_host,
)
from collapipe.certificates.pki import HolderCertificate
from collapipe.certificates.tokens import decode_token
from collapipe.errors import InvalidInputError
from collapipe.protocol import why_not_understood
from collapipe.rpc import call, open_authority_channel
from collapipe.v1.enrollment_pb2 import EnrollRequest, JoinToken, RenewRequest
from collapipe.v1.enrollment_pb2_grpc import EnrollmentServiceStub
from collapipe_client.addresses import read_address
from collapipe_client.cli_options import AsJson
from collapipe_client.job_files import read_toml
from collapipe_client.reporting import exit_codes, print_json, say

_DEADLINE_SECONDS = 20.0
_MODULES = {
    role: f"collapipe.{role.value.replace('-', '_')}"
    for role in OF_OPERATORS
    if role not in PEOPLE | {Role.PROMETHEUS}
}
"""The service of CollaPipe that a box runs, by its role. A person runs none."""
_COMPUTING = (Role.EDGE_SERVER, *IN_A_CLUSTER)

DEFAULT_FOLDER = Path("/etc/collapipe")
_STATE_OF_SYSTEM = Path("/var/lib/collapipe")
"""The state of a service in the default folder. Others keep their state below their folder, which belongs to the same user."""
_LISTEN, _METRICS_LISTEN = "0.0.0.0:7100", "0.0.0.0:9100"
_DECIDED_ANEW = frozenset(
    {
        *("host_id", "scheduler", "cluster_index", "listen", "metrics_listen", "advertise"),
        *("tls_ca", "tls_cert", "tls_key"),
    }
)
"""The settings that each join with a new token decides. It keeps all others."""
BoxOption = Annotated[
    Path,
    typer.Option("--folder", metavar="DIR", help="Folder for the certificate and the settings."),
]


def join(
    token: Annotated[
        str, typer.Argument(envvar="COLLAPIPE_JOIN_TOKEN", help="From `collapipe certs token`.")
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
        str | None,
        typer.Option(metavar="HOST:PORT", help=f"Where the service listens. Default: {_LISTEN}."),
    ] = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Where the service serves /metrics. Default: {_METRICS_LISTEN}.",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"State of the service. Default: {_STATE_OF_SYSTEM}, or the folder state in another --folder.",
        ),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run the service, after joining if necessary.")
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Join with a new key, even if the certificate is valid."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make this machine a part of a deployment. Its key is made here and never leaves it.

    The command can be repeated. Then it changes the settings whose options are given. Another host in --advertise needs a new token.
    After the key of the machine was revoked, use a new token and --again.
    """
    with exit_codes(as_json):
        read, identity = decode_token(token)
        if run and identity.role not in _MODULES:
            raise InvalidInputError(
                f"the token is for {identity}, which runs no service: leave --run out"
            )
        addresses = {"listen": listen, "metrics_listen": metrics_listen, "advertise": advertise}
        given = {name: address for name, address in addresses.items() if address is not None}
        for name, address in given.items():
            read_address(f"--{name.replace('_', '-')}", address)
        if state_dir is not None:
            given["state_dir"] = str(state_dir.absolute())
        host = read_host(read_address("--advertise", advertise)[0]) if advertise else None
        box = BoxFolder(folder.absolute())
        joined, observed = _already_joined(box, identity, read, host), ""
        if again:
            joined = None
        is_new = joined is None
        if joined is None:
            joined, observed = _enroll(box, identity, read, host)
        command = _next_command(identity, read, box)
        changed: dict[str, str] = {}
        if identity.role in _MODULES and (is_new or not box.settings_file(identity).exists()):
            port = given.get("listen", _LISTEN).rpartition(":")[2]
            reachable = f"{_reachable_host(joined, observed)}:{port}"
            settings = _settings(identity, read, box, reachable) | _kept(box, identity) | given
            box.write_settings(identity, settings)
        elif identity.role in _MODULES:
            changed = _change_settings(box, identity, given)
        if as_json:
            print_json(
                {
                    "role": identity.role.value,
                    "name": identity.name,
                    "expires": joined.expires.isoformat(),
                    "joined_now": is_new,
                    "changed": changed,
                    "next": command,
                }
            )
        else:
            when = "now" if is_new else "already"
            say(f"this machine is {when} {identity}, until {joined.expires:%Y-%m-%d}")
            if changed:
                words = ", ".join(f"{name} = {value}" for name, value in changed.items())
                restart = "" if run else "; restart the service"
                say(f"changed in {box.settings_file(identity)}: {words}{restart}")
            say(f"next: {shlex.join(command)}")
        if run:
            sys.stdout.flush()
            os.execv(command[0], command)


def renew(
    folder: BoxOption = DEFAULT_FOLDER,
    now: Annotated[
        bool, typer.Option("--now", help="Renew even if more than a third of its life is left.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Renew the certificate of a machine that joined, before it expires. Run this every day."""
    with exit_codes(as_json):
        box = BoxFolder(folder.absolute())
        joined = box.require_joined()
        is_due = now or joined.is_due(pki.utc_now())
        if is_due:
            address = box.authority_address()
            with open_authority_channel(address, pki.pem(box.root())) as channel:

                def ask(present: bytes, request: bytes) -> pki.Chain:
                    message = RenewRequest(certificate=present, certificate_request=request)
                    method = EnrollmentServiceStub(channel).Renew
                    answer = call(method, message, _peer(address), _DEADLINE_SECONDS)
                    return pki.read_chain(answer.certificate)

                joined = box.renew(ask)
        if as_json:
            print_json({"renewed": is_due, "expires": joined.expires.isoformat()})
        elif is_due:
            say(
                f"{joined.identity}: renewed, until {joined.expires:%Y-%m-%d}; the service uses it without a restart"
            )
        else:
            say(f"{joined.identity}: good until {joined.expires:%Y-%m-%d}, nothing to do")


def _already_joined(
    box: "BoxFolder", identity: Identity, token: JoinToken, host: str | None
) -> "HolderCertificate | None":
    """Returns the certificate of a box that need not use the token; `None` if it must join.

    Raises:
        InvalidInputError: The box has another identity, or belongs to another deployment.
    """

    joined = box.joined()
    if joined is None or (joined.identity == identity and joined.expires <= pki.utc_now()):
        return None
    is_elsewhere = box.root() != pki.read_certificate(token.authority_certificate)
    if not joined.identity.is_same_holder(identity) or is_elsewhere:
        deployment = " of another deployment" if is_elsewhere else ""
        raise InvalidInputError(
            f"this machine is {joined.identity}{deployment} by {box.tls}, and the token is for {identity}: give another "
            "--folder, or delete that one to let it change"
        )
    has_host = host is None or host in joined.hosts | OF_THIS_MACHINE
    return joined if box.is_renewable and has_host and joined.identity == identity else None


def _enroll(
    box: "BoxFolder", identity: Identity, token: JoinToken, host: str | None
) -> "tuple[HolderCertificate, str]":
    """Joins, and returns the certificate and the address from which the authority was called.

    Raises:
        InvalidInputError: Another version has made the token.
    """
    if why := why_not_understood("the maker of the join token", token.protocol, "this machine"):
        raise InvalidInputError(f"{why}, and make a new token with `collapipe certs token`")

    root = pki.read_certificate(token.authority_certificate)
    address = token.authority_address
    observed = ""
    with open_authority_channel(address, pki.pem(root)) as channel:

        def ask(request: bytes) -> pki.Chain:
            nonlocal observed
            message = EnrollRequest(secret=token.secret, certificate_request=request)
            method = EnrollmentServiceStub(channel).Enroll
            answer = call(method, message, _peer(address), _DEADLINE_SECONDS)
            observed = answer.observed_host
            return pki.read_chain(answer.certificate)

        hosts = frozenset({host} if host else ())
        return box.join(identity, root, address, hosts, ask), observed


def _peer(address: str) -> str:
    return f"the authority at {address}"


def _kept(box: "BoxFolder", identity: Identity) -> dict[str, Any]:
    """Returns the settings of an earlier join that the token and the addresses do not decide."""
    file = box.settings_file(identity)
    if not file.exists():
        return {}
    settings = read_toml(file, "delete it, and join again")
    return {name: value for name, value in settings.items() if name not in _DECIDED_ANEW}


def _change_settings(
    box: "BoxFolder", identity: Identity, given: Mapping[str, str]
) -> dict[str, str]:
    """Changes settings in the file of a box, and returns those that are new.

    If `advertise` has the port of `listen`, it gets the port of a new one.
    """
    file = box.settings_file(identity)
    settings = read_toml(file, "delete it, and join again")
    changed = {name: value for name, value in given.items() if settings.get(name) != value}
    host, _, port = str(settings.get("advertise", "")).rpartition(":")
    is_same = port and port == str(settings.get("listen", "")).rpartition(":")[2]
    if "listen" in changed and "advertise" not in given and is_same:
        changed["advertise"] = f"{host}:{changed['listen'].rpartition(':')[2]}"
    if changed:
        box.write_settings(identity, settings | changed)
    return changed


def _settings(
    identity: Identity, token: JoinToken, box: "BoxFolder", reachable: str
) -> dict[str, Any]:
    """Returns the settings of a service that joins for the first time. Others reach it at `reachable`, "host:port"."""
    settings: dict[str, Any] = {
        "listen": _LISTEN,
        "metrics_listen": _METRICS_LISTEN,
        "advertise": reachable,
        "host_id": identity.name,
    }
    if identity.role is not Role.SCHEDULER:
        settings["scheduler"] = token.scheduler_address
    if identity.role in IN_A_CLUSTER:
        settings["cluster_index"] = identity.cluster
    if identity.role in _MODULES:
        folder = box.tls.parent
        is_of_system = folder == DEFAULT_FOLDER
        settings["state_dir"] = str(_STATE_OF_SYSTEM if is_of_system else folder / "state")
    if identity.role in _COMPUTING:
        # A box computes for itself. Processes that share a machine keep the default of one thread.
        settings["threads"] = psutil.cpu_count(logical=False) or 1
    return settings | {
        f"tls_{name}": str(box.tls / f"{name}.pem") for name in ("ca", "cert", "key")
    }


def _reachable_host(joined: "HolderCertificate", observed: str) -> str:
    """Returns the host by which others probably reach this machine. An IPv6 address is in brackets."""
    others = sorted(joined.hosts - {joined.identity.name})
    host = others[0] if others else joined.identity.name
    if observed and (observed in others or not others):
        host = observed
    return f"[{host}]" if ":" in host else host


def _next_command(identity: Identity, token: JoinToken, box: "BoxFolder") -> list[str]:
    """Returns the command that runs the service; for a client, `collapipe status` with the certificate; for Prometheus, the renewal."""
    if identity.role in _MODULES:
        settings = str(box.settings_file(identity))
        return [sys.executable, "-m", _MODULES[identity.role], "--config", settings]
    if identity.role is Role.PROMETHEUS:
        return ["collapipe", "renew", "--folder", str(box.tls.parent)]
    files = [f"--tls-{name}={box.tls / name}.pem" for name in ("ca", "cert", "key")]
    return ["collapipe", "status", "--scheduler", token.scheduler_address, *files]
