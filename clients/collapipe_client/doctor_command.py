"""The `collapipe doctor` command: what the examination found, and what to do."""

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collapipe.errors import CollapipeError, InvalidInputError
from collapipe_client.cli_options import (
    AsJson,
    Insecure,
    SchedulerOption,
    TlsCa,
    TlsCert,
    TlsKey,
    WorkspaceOption,
    find_endpoint,
)
from collapipe_client.doctor import (
    BoxSettings,
    Check,
    Role,
    SchedulerToReach,
    examine,
    read_box_settings,
)
from collapipe_client.reporting import FAILED, exit_codes, print_json, say
from collapipe_client.workspace import DEFAULT_ROOT

_ROLES: tuple[Role, ...] = get_args(Role)
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    role: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE",
            help=f"What this machine is to be: {', '.join(_ROLES)}. Without: it runs testbeds and clients.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings of its service, as `collapipe join` writes them; a file named after a role says the role.",
        ),
    ] = None,
    scheduler: SchedulerOption = None,
    insecure: Insecure = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Examine this machine, and say what to do.

    On a box: `collapipe doctor --config /etc/collapipe/device-agent.toml`, as the user of its service or as root.
    """
    with exit_codes(as_json):
        known_role = _read_role(role, config)
        given = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
        settings = read_box_settings(config).model_copy(
            update={name: path for name, path in given.items() if path is not None}
        )
        unusable = []
        try:
            to_reach = _find_scheduler(scheduler, insecure, settings, known_role, workspace)
        except CollapipeError as error:
            unusable = [Check("scheduler", "fail", str(error), "mend that, and run this again")]
            to_reach = None
        checks = examine(workspace, to_reach, settings, known_role) + unusable
        failed = any(check.result == "fail" for check in checks)
        if as_json:
            print_json({"ok": not failed, "checks": [vars(check) for check in checks]})
        else:
            _show(checks)
        if failed:
            raise typer.Exit(FAILED)


def _read_role(role: str | None, config: Path | None) -> Role | None:
    named = role or (config.stem if config else None)
    for known in _ROLES:
        if named == known:
            return known
    if role is not None:
        raise InvalidInputError(f"--role {role}: there are {', '.join(_ROLES)}")
    if config is not None:
        raise InvalidInputError(
            f"--config {config} is not named after a role: add --role with one of {', '.join(_ROLES)}"
        )
    return None


def _find_scheduler(
    scheduler: str | None,
    insecure: bool,
    settings: BoxSettings,
    role: Role | None,
    workspace: Path,
) -> SchedulerToReach | None:
    address = scheduler or settings.scheduler or None
    if address is None and role is not None:
        return None  # a box has no local testbed
    endpoint = find_endpoint(
        address,
        insecure or settings.insecure,
        settings.tls_ca,
        settings.tls_cert,
        settings.tls_key,
        workspace,
    )
    return SchedulerToReach(endpoint.address, endpoint.security) if endpoint else None


def _show(checks: list[Check]) -> None:
    """What to do comes below the table, unbroken: it is to be copied."""
    table = Table("check", "", "found", box=None, pad_edge=False, header_style="bold")
    for check in checks:
        # what peers say is no markup
        table.add_row(
            Text(check.name), Text(check.result, _STYLES[check.result]), Text(check.found)
        )
    Console().print(table)
    to_do = [check for check in checks if check.remedy]
    if to_do:
        say("\nwhat to do:")
    for check in sorted(to_do, key=lambda check: check.result != "fail"):
        say(f"  {check.name} ({check.result}): {check.remedy}")
