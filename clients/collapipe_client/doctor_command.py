"""The `collapipe doctor` command: examines this machine and says what to do."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.text import Text

from collapipe.errors import CollapipeError, InvalidInputError
from collapipe_client.cli_options import AsJson, takes_option_groups
from collapipe_client.doctor import Check, Role, examine, read_box_settings
from collapipe_client.endpoint import EndpointOptions, find_endpoint
from collapipe_client.reporting import FAILED, exit_codes, plain_table, print_json, print_table, say

_ROLES: tuple[Role, ...] = get_args(Role)
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@takes_option_groups
def doctor(
    role: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE",
            help=f"The service that this machine is to run: {', '.join(_ROLES)}. Default: a testbed or a client.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings of the service, as `collapipe join` writes them. A file that is named after a role "
            "makes --role unnecessary.",
        ),
    ] = None,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Examine this machine and say what to do.

    On a machine that runs a service, run `collapipe doctor --config /etc/collapipe/device-agent/device-agent.toml` as
    the user of the service or as root.
    """
    with exit_codes(as_json):
        known_role = _read_role(role, config)
        settings = read_box_settings(config)
        # Options of the command line override the service's settings.
        options = replace(
            endpoint_options,
            scheduler=endpoint_options.scheduler or settings.scheduler or None,
            insecure=endpoint_options.insecure or settings.insecure,
            tls_ca=endpoint_options.tls_ca or settings.tls_ca,
            tls_cert=endpoint_options.tls_cert or settings.tls_cert,
            tls_key=endpoint_options.tls_key or settings.tls_key,
        )
        tls_files = {name: getattr(options, name) for name in ("tls_ca", "tls_cert", "tls_key")}
        settings = settings.model_copy(update=tls_files)
        endpoint, unusable = None, []
        try:
            # A machine that runs one service has no local testbed.
            if options.scheduler is not None or known_role is None:
                endpoint = find_endpoint(options)
        except CollapipeError as error:
            remedy = "correct this, and run `collapipe doctor` again"
            unusable.append(Check.fail("scheduler", str(error), remedy))
        checks = examine(options.workspace, endpoint, settings, known_role) + unusable
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
        raise InvalidInputError(f"--role {role} is unknown: use one of {', '.join(_ROLES)}")
    if config is not None:
        raise InvalidInputError(
            f"--config {config} is not named after a role: add --role with one of {', '.join(_ROLES)}"
        )
    return None


def _show(checks: list[Check]) -> None:
    """Prints a table of the checks. The remedies follow without line breaks, so that they can be copied."""
    table = plain_table("check", "", "found")
    for check in checks:
        table.add_row(check.name, Text(check.result, _STYLES[check.result]), check.found)
    print_table(table)
    to_do = [check for check in checks if check.remedy]
    if to_do:
        say("\nwhat to do:")
    for check in sorted(to_do, key=lambda check: check.result != "fail"):
        say(f"  {check.name} ({check.result}): {check.remedy}")
