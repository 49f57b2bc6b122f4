"""The commands `collapipe certs`: the authority of a deployment, its certificates and its join tokens."""

import datetime
import ipaddress
import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from collapipe.certificates import Identity, Role, pki, tokens
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.certificates.identity import (
    IN_A_CLUSTER,
    OF_OPERATORS,
    OF_THIS_MACHINE,
    is_host_name,
)
from collapipe.errors import InvalidInputError
from collapipe.protocol import OURS
from collapipe.v1.enrollment_pb2 import JoinToken
from collapipe_client.addresses import read_address
from collapipe_client.cli_options import AsJson, Yes
from collapipe_client.reporting import complain, exit_codes, print_json, say

certs_app = typer.Typer(
    no_args_is_help=True, help="Certificates: which hosts belong to a deployment, and their roles."
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the authority.")]
Root = Annotated[
    Path | None,
    typer.Option("--root", metavar="FOLDER", help="Folder of the root. Default: DIR/root."),
]
Addresses = Annotated[
    list[str] | None,
    typer.Option(
        "--address",
        metavar="HOST",
        help="DNS name or IP address of the host, besides NAME. May be repeated.",
    ),
]
Init = Annotated[bool, typer.Option("--init", help="Make the authority first, if there is none.")]
Days = Annotated[int, typer.Option(min=1, max=3650, help="Lifetime of the certificates.")]
_HOLDER = "ROLE:NAME[@CLUSTER]"
_ROLES_HELP = (
    f"ROLE is {', '.join(role.value for role in OF_OPERATORS)}; NAME is the host id; CLUSTER is the cluster of a control unit or "
    "a device, 0 by default."
)

_OF_COMMANDS = ("COLLAPIPE_TLS_", "COLLAPIPE_INSECURE")
_HOSTS = IN_A_CLUSTER | {Role.EDGE_SERVER}

_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


@certs_app.command("init")
def init(folder: Folder, root: Root = None, as_json: AsJson = False) -> None:
    """Make an authority for a whole deployment: a root, which every host trusts, and an issuing authority, which signs certificates.

    Then move the folder of the root to a machine or a medium that is not connected. Back both folders up and keep them secret.
    If the environment has COLLAPIPE_AUTHORITY_PASSPHRASE, both keys are encrypted with it. All commands that use the authority need it then.
    """
    with exit_codes(as_json):
        authority = AuthorityFolder.create(folder, root=root)
        root = root or AuthorityFolder.root_in(folder)
        if as_json:
            print_json({"ca": str(authority.ca_file), "root": str(root)})
            return
        say(f"the authority is in {folder}; keep {folder}/issuing.pem secret")
        say(f"every host trusts {authority.ca_file}")
        say(_advice_for_root(root))
        say(f"next: {_issue_command(folder)}")


@certs_app.command("issuing")
def issuing(
    folder: Folder,
    root: Root = None,
    revoke: Annotated[
        bool,
        typer.Option(
            "--revoke",
            help="After a theft: all hosts refuse what earlier issuing authorities have signed, and all tokens are deleted.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a new issuing authority in place, which needs the folder of the root. Hosts go on, and keep their ca.pem.

    Do so once a year, because certificates never outlive the issuing authority, which lasts two years.
    """
    with exit_codes(as_json):
        authority = AuthorityFolder(folder)
        authority.renew_issuer(root or AuthorityFolder.root_in(folder), revoke=revoke)
        expires = authority.issuer.not_valid_after_utc
        if as_json:
            print_json({"expires": expires.isoformat(), "file": str(authority.revoked_file)})
            return
        say(f"the new issuing authority in {folder} lasts until {expires:%Y-%m-%d}")
        if revoke:
            say(
                f"every certificate so far is revoked: copy {authority.revoked_file} to the scheduler's machine, repeat `collapipe certs "
                "issue`, and make new tokens for `collapipe join --again`"
            )


@certs_app.command("issue")
def issue(
    folder: Folder,
    holders: Annotated[list[str], typer.Argument(metavar=f"{_HOLDER}...", help=_ROLES_HELP)],
    address: Addresses = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write a folder NAME here for each. Default: DIR/issued."
        ),
    ] = None,
    days: Days = 365,
    init: Init = False,
    as_json: AsJson = False,
) -> None:
    """Make certificates: NAME/ca.pem, cert.pem and key.pem.

    The command can be repeated. It keeps good certificates, renews those with less than a third of their life
    left, and replaces those with other addresses.
    """
    with exit_codes(as_json):
        identities = [Identity.parse(holder) for holder in holders]
        authority = _open(folder, init)
        lifetime = datetime.timedelta(days=days)
        done = []
        for identity in identities:
            target = (out or folder / "issued") / identity.name
            outcome, expires = authority.issue(identity, address or [], target, lifetime)
            done.append({**_entry(identity, expires), "folder": str(target), "outcome": outcome})
            if not as_json:
                say(f"{identity}: {outcome}, until {expires:%Y-%m-%d}: {target}")
        _warn_of_end(authority, folder)
        if as_json:
            print_json({"certificates": done})


@certs_app.command("list")
def list_certificates(folder: Folder, as_json: AsJson = False) -> None:
    """List the valid certificates."""
    with exit_codes(as_json):
        authority = AuthorityFolder(folder)
        issued = authority.certificates()
        _warn_of_end(authority, folder)
        if as_json:
            entries = [
                {**_entry(one.identity, one.expires), "addresses": sorted(one.hosts)}
                for one in issued
            ]
            print_json({"certificates": entries})
            return
        for one in issued:
            days = (one.expires - pki.utc_now()).days
            say(
                f"{one.identity.role.value:13} {_place(one.identity):24} until {one.expires:%Y-%m-%d} ({days} days)  "
                f"{', '.join(sorted(one.hosts - {one.identity.name}))}".rstrip()
            )
        if not issued:
            say(f"no certificates yet; next: {_issue_command(folder)}")


@certs_app.command("revoke")
def revoke(
    folder: Folder,
    holders: Annotated[list[str], typer.Argument(metavar=f"{_HOLDER}...", help=_ROLES_HELP)],
    as_json: AsJson = False,
) -> None:
    """Revoke the keys of holders, for example of a stolen box. Each may be in any cluster.

    A scheduler with --tls-revoked DIR/revoked.pb tells its hosts, and all of them refuse these keys within seconds.
    """
    with exit_codes(as_json):
        identities = [Identity.parse(holder) for holder in holders]
        authority = AuthorityFolder(folder)
        revoked = []
        for identity in identities:
            keys = authority.revoke(identity)
            revoked.append({"role": identity.role.value, "name": identity.name, "keys": keys})
            if not as_json:
                name = f"{identity.role.value}:{identity.name}"
                say(f"{name}: {keys} key{'s' * (keys != 1)} revoked, and its tokens deleted")
        if as_json:
            print_json({"revoked": revoked, "file": str(authority.revoked_file)})
            return
        say(
            f"a scheduler that runs with --tls-revoked {authority.revoked_file} reads the list within seconds; if it is on another "
            "machine, copy the file there"
        )


@certs_app.command("serve")
def serve(
    folder: Folder,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where boxes reach the authority.")
    ] = "0.0.0.0:7101",
    init: Init = False,
) -> None:
    """Run the authority, which boxes call when they join or renew their certificate. Ctrl-C ends it."""
    with exit_codes(False):
        read_address("--listen", listen)
        _open(folder, init)  # It says in one line if it cannot be used.
        # -I keeps out modules of the current folder. The certificates in the environment are those of commands.
        line = [sys.executable, "-I", "-m", "collapipe.authority"]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_COMMANDS)}
        os.execve(line[0], [*line, "--dir", str(folder), "--listen", listen], kept)


@certs_app.command("token")
def token(
    folder: Folder,
    holders: Annotated[list[str], typer.Argument(metavar=f"{_HOLDER}...", help=_ROLES_HELP)],
    scheduler: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the box reaches the scheduler.")
    ],
    authority: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where the box reaches `collapipe certs serve`."),
    ],
    address: Addresses = None,
    valid: Annotated[
        str, typer.Option(metavar="TIME", help="How long the token can be used: 30m, 12h, 7d.")
    ] = "1h",
    days: Days = 365,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make a join token for each holder. Whoever has it can join once as NAME, with `collapipe join TOKEN`.

    Hand it over as you would a password. After its use it is worthless. If a name is in use, the command asks whether the same box
    joins again.
    """
    with exit_codes(as_json):
        identities = [Identity.parse(holder) for holder in holders]
        for option, value in (("--scheduler", scheduler), ("--authority", authority)):
            _check_reaches_others(option, value)
        if address and len(identities) > 1:
            raise InvalidInputError(
                f"--address {address[0]}: is an address of one host, but {len(identities)} tokens are made: make the token of that host alone"
            )
        names = [identity.name for identity in identities]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise InvalidInputError(
                f"two tokens are for the name {repeated}: give each holder a name of its own"
            )
        duration = read_duration("--valid", valid)
        opened = AuthorityFolder(folder)
        if not yes:
            _ask_of_names_in_use(opened, identities)
        lifetime = datetime.timedelta(days=days)
        made = []
        for identity in identities:
            hosts = list(address or [])
            at = read_address("--scheduler", scheduler)[0]
            if identity.role is Role.SCHEDULER and at not in OF_THIS_MACHINE:
                hosts.append(at)
            message = JoinToken(
                secret=opened.make_token(identity, hosts, duration, lifetime),
                authority_certificate=pki.der(opened.root),
                authority_address=authority,
                scheduler_address=scheduler,
                identity=identity.uri,
                protocol=OURS,
            )
            text = tokens.encode_token(message)
            made.append({"token": text, "role": identity.role.value, "name": identity.name})
        if as_json:
            print_json({"tokens": made})
            return
        for identity, one in zip(identities, made, strict=True):
            # This goes to stderr, so that the output of the command is only tokens.
            complain(f"{identity} can join once within {valid}: collapipe join TOKEN")
            print(one["token"], flush=True)


def _ask_of_names_in_use(authority: AuthorityFolder, identities: Sequence[Identity]) -> None:
    """Asks whether the same box joins again, for each host whose name has a certificate. Aborts the command if not."""
    for used in authority.certificates():
        for identity in identities:
            if used.identity.is_same_holder(identity) and identity.role in _HOSTS:
                typer.confirm(
                    f"{used.identity} has a certificate until {used.expires:%Y-%m-%d}. If another box joins as {identity.name}, the "
                    "scheduler refuses it while this one runs. Does the same box join again?",
                    abort=True,
                    err=True,
                )


def _check_reaches_others(option: str, address: str) -> None:
    """Raises `InvalidInputError` if no machine could call an address. Warns of a name that means another machine elsewhere."""
    host, _ = read_address(option, address)
    remedy = "give the address that other machines use, such as 192.168.1.10:7100"
    if not is_host_name(host):
        with suppress(ValueError):
            if ipaddress.ip_address(host).is_unspecified:
                raise InvalidInputError(f"{option} {address}: is no address to call: {remedy}")
        return
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        complain(f"warning: {option} {address}: this machine does not know the name {host}")
        return
    if all(ipaddress.ip_address(ip.partition("%")[0]).is_loopback for ip in found):
        complain(
            f"warning: {option} {address}: services on this machine take {host} for {min(found)}, where others cannot reach them: {remedy}"
        )


def read_duration(option: str, text: str) -> datetime.timedelta:
    """Reads 30m, 12h or 7d. Raises `InvalidInputError` for any other text."""
    found = re.fullmatch(r"(\d{1,4})([mhd])", text, re.ASCII)
    if not found or not int(found[1]):
        raise InvalidInputError(f"{option} {text}: is not a duration, for example 30m, 12h or 7d")
    return datetime.timedelta(**{_UNITS[found[2]]: int(found[1])})


def _open(folder: Path, init: bool) -> AuthorityFolder:
    """Returns the authority of a folder. With `init`, it makes one if there is none."""
    if init and not AuthorityFolder.exists(folder):
        authority = AuthorityFolder.create(folder)
        complain(_advice_for_root(AuthorityFolder.root_in(folder)))
        return authority
    return AuthorityFolder(folder)


def _advice_for_root(root: Path) -> str:
    return (
        f"now move {root} to a machine or a medium that is not connected: only `collapipe certs issuing` needs it, once a year or after "
        "a theft"
    )


def _warn_of_end(authority: AuthorityFolder, folder: Path) -> None:
    """Tells on stderr that the issuing authority should be renewed. Certificates never outlive it."""
    if authority.is_issuer_due:
        complain(
            f"the issuing authority ends on {authority.issuer.not_valid_after_utc:%Y-%m-%d}, and so do all certificates: "
            f"make a new one with `collapipe certs issuing {shlex.quote(str(folder))} --root FOLDER`"
        )


def _issue_command(folder: Path) -> str:
    return f"collapipe certs issue {shlex.quote(str(folder))} scheduler:scheduler"


def _entry(identity: Identity, expires: datetime.datetime) -> dict[str, Any]:
    entry = {"role": identity.role.value, "name": identity.name, "expires": expires.isoformat()}
    return entry | ({"cluster": identity.cluster} if identity.role in IN_A_CLUSTER else {})


def _place(identity: Identity) -> str:
    """Returns the name, with the cluster if there is one."""
    cluster = f"@{identity.cluster}" if identity.role in IN_A_CLUSTER else ""
    return f"{identity.name}{cluster}"
