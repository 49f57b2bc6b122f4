"""The commands `collapipe join` and `collapipe renew`, which give this machine its certificate."""

import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
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
from collapipe.errors import CollapipeError, InvalidInputError, NotPermittedError
from collapipe.installation import Places, own_places, runs_systemd
from collapipe.protocol import why_not_understood
from collapipe.rpc import call, open_authority_channel
from collapipe.v1.enrollment_pb2 import EnrollRequest, JoinToken, RenewRequest
from collapipe.v1.enrollment_pb2_grpc import EnrollmentServiceStub
from collapipe_client.addresses import listen_briefly, read_address
from collapipe_client.cli_options import AsJson
from collapipe_client.contexts import Context, read_contexts, write_contexts
from collapipe_client.job_files import read_toml
from collapipe_client.reporting import FAILED, complain, exit_codes, print_json, say

_DEADLINE_SECONDS = 20.0
_MODULES = {
    role: f"collapipe.{role.value.replace('-', '_')}"
    for role in OF_OPERATORS
    if role not in PEOPLE | {Role.PROMETHEUS}
}
"""The service of CollaPipe that a box runs, by its role. A person runs none."""
_COMPUTING = (Role.EDGE_SERVER, *IN_A_CLUSTER)

_PORT, _METRICS_PORT = 7100, 9100
_MOST_PORTS = 100
"""How many ports after these are tried. Other services of the same machine may have the first ones."""
_DECIDED_ANEW = frozenset(
    {
        *("host_id", "scheduler", "cluster_index", "advertise"),
        *("tls_ca", "tls_cert", "tls_key"),
    }
)
"""The settings that each join with a new token decides. It keeps all others."""


def join(
    token: Annotated[
        str, typer.Argument(envvar="COLLAPIPE_JOIN_TOKEN", help="From `collapipe certs token`.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the certificate and the settings. Default: /etc/collapipe/ROLE for root, ~/.collapipe-box/ROLE for others.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="How others reach this machine. Default: the address that the authority sees.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Where the service listens. Default: the first free port from {_PORT} on.",
        ),
    ] = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Where the service serves /metrics. Default: the first free port from {_METRICS_PORT} on.",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="State of the service. Default: /var/lib/collapipe/NAME for /etc/collapipe/NAME, or the folder state in another --folder.",
        ),
    ] = None,
    data_root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with the data of a control unit. Jobs read files only there. Default: the folder data in the state.",
        ),
    ] = None,
    run: Annotated[
        bool,
        typer.Option("--run", help="Run the service in this terminal, after joining if necessary."),
    ] = False,
    start: Annotated[
        bool,
        typer.Option("--start", help="As --run, but by systemd if the service has a service file."),
    ] = False,
    role: Annotated[
        Role | None, typer.Option(help="Refuse a token of another role than this.")
    ] = None,
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
        _check_role(identity, role)
        given = _given(
            identity,
            {"listen": listen, "metrics_listen": metrics_listen, "advertise": advertise},
            {"state_dir": state_dir, "data_root": data_root},
            run or start,
        )
        host = read_host(read_address("--advertise", advertise)[0]) if advertise else None
        box = BoxFolder(_folder(folder, identity).absolute())
        before = box.settings(identity)
        if identity.role in PEOPLE:
            _check_is_person()
        joined, observed = _already_joined(box, identity, read, host), ""
        if again:
            joined = None
        is_new = joined is None
        if joined is None:
            if identity.role is Role.SCHEDULER and not before and listen is None:
                _check_port_is_free(read.scheduler_address, box.folder)
            joined, observed = _enroll(box, identity, read, host)
        changed: dict[str, Any] = {}
        if identity.role in _MODULES and (is_new or not before):
            reachable = _reachable_host(joined, observed)
            settings = _settings(identity, read, box, before, reachable, given)
            box.change_settings(identity, settings)
        elif identity.role in _MODULES:
            changed = _changed(before, given)
            box.change_settings(identity, changed)
        context = _use_context(read, box) if identity.role in PEOPLE else ""
        places = own_places(box.folder.name)
        of_systemd = [] if run or places.folder != box.folder else _of_systemd(places)
        following = of_systemd or _command(identity, box)
        if as_json:
            print_json(
                {
                    "role": identity.role.value,
                    "name": identity.name,
                    "expires": joined.expires.isoformat(),
                    "joined_now": is_new,
                    "changed": changed,
                    "next": following,
                }
            )
        else:
            when = "now" if is_new else "already"
            say(f"this machine is {when} {identity}, until {joined.expires:%Y-%m-%d}")
            _say_changes(box, identity, changed, is_to_run=run or start)
            if identity.role in _MODULES:
                _say_places(box, identity, read)
            if context:
                say(f"all commands use the context {context} now")
            _say_following(following, places if of_systemd else None, is_to_run=run or start)
        if run or start:
            sys.stdout.flush()
            os.execvp(following[0], following)


def renew(
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of `collapipe join`. Default: those of all services that this user has installed.",
        ),
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="Renew even if more than a third of its life is left.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Renew the certificate of a machine that joined, before it expires. Run this every day."""
    with exit_codes(as_json):
        if folder is not None:
            _renew(BoxFolder(folder.absolute()), now, as_json)
            return
        boxes = own_places("").folder
        found = sorted(document.parent for document in boxes.glob("*/joined.json"))
        if not found:
            raise InvalidInputError(
                f"no service below {boxes} has joined a deployment: name another folder with --folder, or run `collapipe join TOKEN` first"
            )
        has_failed = False
        for each in found:
            try:
                _renew(BoxFolder(each), now, as_json)
            except CollapipeError as error:  # The other services may have another authority.
                complain(f"error: {each}: {error}")
                has_failed = True
        if has_failed:
            raise typer.Exit(FAILED)


def _renew(box: BoxFolder, now: bool, as_json: bool) -> None:
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


def _given(
    identity: Identity,
    addresses: Mapping[str, str | None],
    folders: Mapping[str, Path | None],
    is_to_run: bool,
) -> dict[str, str]:
    """Returns the settings of the options that are given.

    Raises:
        InvalidInputError: An address cannot be read, or an option is not for this role.
    """
    if is_to_run and identity.role not in _MODULES:
        raise InvalidInputError(
            f"the token is for {identity}, which runs no service: leave --run and --start out"
        )
    if folders["data_root"] is not None and identity.role not in _COMPUTING:
        raise InvalidInputError(f"--data-root: a {identity.role.value} reads no data: leave it out")
    given = {name: address for name, address in addresses.items() if address is not None}
    for name, address in given.items():
        read_address(f"--{name.replace('_', '-')}", address)
    return given | {
        name: str(path.absolute()) for name, path in folders.items() if path is not None
    }


def _check_role(identity: Identity, wanted: Role | None) -> None:
    """Raises `InvalidInputError` if a token is for another role. That of a client may be for everybody who runs no service."""
    runs_none = wanted is Role.CLIENT and identity.role not in _MODULES
    if wanted not in (None, identity.role) and not runs_none:
        raise InvalidInputError(
            f"the token is for {identity}, and this is to be a {wanted.value}: use the token of the {wanted.value}"
        )


def _folder(given: Path | None, identity: Identity) -> Path:
    folder = given or own_places(identity.role.value).folder
    if given is None and not folder.is_absolute():
        raise InvalidInputError("this user has no home folder: name one with --folder DIR")
    return folder


def _check_is_person() -> None:
    """Raises an error if the commands of a person could not use the certificate, or the context with it, afterwards."""
    if os.geteuid() == 0 and "SUDO_USER" in os.environ:
        raise InvalidInputError(
            "the token is for a person, whose key only root could read with sudo: leave sudo out"
        )
    read_contexts()


def _check_port_is_free(address: str, folder: Path) -> None:
    """Raises `InvalidInputError` if another service of this machine has the port of the scheduler, or another program."""
    port = _port(address)
    try:
        listen_briefly("0.0.0.0", int(port))
        is_free = port not in _ports_of_others(folder)
    except OSError:
        is_free = False
    if not is_free:
        raise InvalidInputError(
            f"port {port} of this machine is taken, and hosts look for the scheduler at {address}: end what listens there, or make all "
            "tokens with another port in --scheduler"
        )


def _already_joined(
    box: BoxFolder, identity: Identity, token: JoinToken, host: str | None
) -> HolderCertificate | None:
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
            f"this machine is {joined.identity}{deployment} by {box.tls}, and the token is for {identity}: delete that folder to let it "
            "change, or give a second service another --folder (with deploy/install.py: --name NAME before --join)"
        )
    has_host = host is None or host in joined.hosts | OF_THIS_MACHINE
    return joined if box.is_renewable and has_host and joined.identity == identity else None


def _enroll(
    box: BoxFolder, identity: Identity, token: JoinToken, host: str | None
) -> tuple[HolderCertificate, str]:
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
            try:
                answer = call(method, message, _peer(address), _DEADLINE_SECONDS)
            except (InvalidInputError, NotPermittedError) as error:
                raise type(error)(f"{_peer(address)} says: {error}") from error
            observed = answer.observed_host
            return pki.read_chain(answer.certificate)

        hosts = frozenset({host} if host else ())
        return box.join(identity, root, address, hosts, ask), observed


def _peer(address: str) -> str:
    return f"the authority at {address}"


def _changed(before: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings of a service that are new.

    If `advertise` has the port of `listen`, it gets the port of a new one.
    """
    changed = {name: value for name, value in given.items() if before.get(name) != value}
    host, _, port = str(before.get("advertise", "")).rpartition(":")
    is_same = port and port == _port(before.get("listen"))
    if "listen" in changed and "advertise" not in given and is_same:
        changed["advertise"] = f"{host}:{_port(changed['listen'])}"
    return changed


def _settings(
    identity: Identity,
    token: JoinToken,
    box: BoxFolder,
    before: Mapping[str, Any],
    reachable: str,
    given: Mapping[str, str],
) -> dict[str, Any]:
    """Returns the settings of a service that joins with a new token.

    Args:
        before: Those of an earlier join.
        reachable: The host by which others reach it.
    """
    taken = _ports_of_others(box.folder)
    is_scheduler = identity.role is Role.SCHEDULER
    port = _port(token.scheduler_address) if is_scheduler else _free_port(_PORT, taken)
    settings: dict[str, Any] = {
        "listen": f"0.0.0.0:{port}",
        # Unlike gRPC, the page of metrics takes 0.0.0.0 for addresses of IPv4 only.
        "metrics_listen": f"{'[::]' if '[' in reachable else '0.0.0.0'}:{_free_port(_METRICS_PORT, taken)}",
        "state_dir": str(_state_of(box.folder)),
    }
    if identity.role in _COMPUTING:
        # A box computes for itself. Processes that share a machine keep the default of one thread.
        settings["threads"] = psutil.cpu_count(logical=False) or 1
    settings |= {name: before[name] for name in before.keys() - _DECIDED_ANEW}
    if is_scheduler and _port(before.get("listen")) == _port(before.get("advertise")):
        settings["listen"] = f"{settings['listen'].rpartition(':')[0]}:{port}"
    settings |= {"host_id": identity.name, **given}
    # All hosts look for the scheduler at the address of their token.
    settings.setdefault("advertise" if is_scheduler else "scheduler", token.scheduler_address)
    if identity.role in IN_A_CLUSTER:
        settings["cluster_index"] = identity.cluster
    # A router may forward another port than that of `listen`.
    forwarded = "listen" not in given and _port(before.get("advertise"))
    settings.setdefault("advertise", f"{reachable}:{forwarded or _port(settings['listen'])}")
    return settings | {
        f"tls_{name}": str(box.tls / f"{name}.pem") for name in ("ca", "cert", "key")
    }


def _port(address: object) -> str:
    return str(address or "").rpartition(":")[2]


def _free_port(first: int, taken: Collection[str]) -> int:
    """Returns the first free port from `first` on, of all addresses of this machine; `first` if there is none."""
    for port in range(first, first + _MOST_PORTS):
        if str(port) not in taken:
            with suppress(OSError):
                listen_briefly("0.0.0.0", port)
                return port
    return first


def _ports_of_others(folder: Path) -> set[str]:
    """Returns the ports in the settings of the services beside a folder, which may not run now."""
    ports = set()
    for role in _MODULES:
        for file in folder.parent.glob(f"*/{role.value}.toml"):
            if file.parent != folder:
                with suppress(InvalidInputError):
                    settings = read_toml(file, "delete it, and join again")
                    ports |= {_port(settings.get(name)) for name in ("listen", "metrics_listen")}
    return ports


def _state_of(folder: Path) -> Path:
    """Returns where the state of a service is. Root may have installed it, or it belongs to the user of the folder."""
    places = own_places(folder.name)
    return places.state if places.folder == folder else folder / "state"


def _of_systemd(places: Places) -> list[str]:
    """Returns the command with which systemd starts a service; empty if it does not run, or the service has no service file."""
    if not runs_systemd(places) or not (places.units / places.service).exists():
        return []
    # systemd links a service file into such a folder when it is enabled.
    if any(places.units.glob(f"*.wants/{places.service}")):
        return places.systemctl("restart", places.service)
    return places.systemctl("enable", "--now", places.service, "collapipe-renew.timer")


def _say_changes(
    box: BoxFolder, identity: Identity, changed: Mapping[str, Any], *, is_to_run: bool
) -> None:
    if changed:
        words = ", ".join(f"{name} = {value}" for name, value in changed.items())
        restart = "" if is_to_run else "; restart the service"
        say(f"changed in {box.settings_file(identity)}: {words}{restart}")


def _say_following(following: Sequence[str], of_systemd: Places | None, *, is_to_run: bool) -> None:
    """Says which command is next, or runs now.

    Args:
        of_systemd: The service that it starts; `None` if systemd does not run it.
    """
    if of_systemd is not None and not of_systemd.is_of_system:
        say("the service ends when you log out, unless you run `loginctl enable-linger` once")
    is_of_root = of_systemd is not None and of_systemd.is_of_system and "SUDO_USER" in os.environ
    does = "it is started with" if is_to_run else "next"
    say(f"{does}: {'sudo ' * is_of_root}{shlex.join(following)}")


def _say_places(box: BoxFolder, identity: Identity, token: JoinToken) -> None:
    """Says where the service listens, and for a control unit also where its data is to be."""
    settings = box.settings(identity)
    at = settings.get("advertise" if identity.role is Role.SCHEDULER else "scheduler")
    if at != token.scheduler_address:
        say(
            f"warning: the token has the scheduler at {token.scheduler_address}, and the settings at {at}: correct the one that is "
            "wrong, or use a new token with --again"
        )
    say(
        f"settings: {box.settings_file(identity)}; it listens on {settings['listen']}, others reach it at {settings['advertise']}"
    )
    if identity.role is Role.CONTROL_UNIT:
        folder = settings.get("data_root") or Path(settings["state_dir"]) / "data"
        places = own_places(box.folder.name)
        is_of_system = places.is_of_system and places.folder == box.folder
        user = f", as the user {places.user}" if is_of_system else ""
        say(f"data: jobs read files only in {folder}{user}; relative names in jobs begin there")
        if "data_root" in settings and not os.path.isdir(folder):
            say(f"warning: {folder} is no folder on this machine: make it, or correct --data-root")


def _reachable_host(joined: HolderCertificate, observed: str) -> str:
    """Returns the host by which others probably reach this machine. An IPv6 address is in brackets."""
    others = sorted(joined.hosts - {joined.identity.name})
    host = others[0] if others else joined.identity.name
    if observed and (observed in others or not others):
        host = observed
    return f"[{host}]" if ":" in host else host


def _command(identity: Identity, box: BoxFolder) -> list[str]:
    """Returns the command that runs the service, or, where the holder has none, the one that may follow."""
    if identity.role in _MODULES:
        settings = str(box.settings_file(identity))
        # -I keeps out modules of the current folder, which may belong to another user.
        return [sys.executable, "-I", "-m", _MODULES[identity.role], "--config", settings]
    if identity.role is Role.PROMETHEUS:
        return ["collapipe", "renew", "--folder", str(box.tls.parent)]
    return ["collapipe", "status"]


def _use_context(token: JoinToken, box: BoxFolder) -> str:
    """Keeps the deployment as a context, which commands use from now on. Returns its name: the host of the scheduler, with its port if
    another scheduler has that name."""
    address = token.scheduler_address
    name = read_address("the scheduler of the token", address)[0]
    contexts = read_contexts()
    if name in contexts.by_name and contexts.by_name[name].scheduler != address:
        name = address
    files = (box.tls / f"{file}.pem" for file in ("ca", "cert", "key"))
    contexts.by_name[name] = Context(address, False, *files)
    contexts.used = name
    write_contexts(contexts)
    return name
