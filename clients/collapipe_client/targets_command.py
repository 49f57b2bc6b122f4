"""`collapipe targets`: tells a Prometheus which hosts there are, by a file that it reads again when it changes."""

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from collapipe.errors import CollapipeError, InvalidInputError
from collapipe.v1.scheduler_pb2 import HostRole, HostStatus
from collapipe_client.cli_options import AsJson, takes_option_groups
from collapipe_client.endpoint import Endpoint, EndpointOptions, need_endpoint
from collapipe_client.message_json import enum_word
from collapipe_client.reporting import (
    complain,
    exit_codes,
    print_json,
    say,
    termination_as_interrupt,
)
from collapipe_client.workspace import replace_text

DEFAULT_FORGET_SECONDS = 3600.0


@takes_option_groups
def targets(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.json",
            help="What Prometheus's file_sd_configs reads, for example deploy/prometheus/boxes/hosts.json.",
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until interrupted, as hosts come and go.")
    ] = False,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Between two looks with --follow.")
    ] = 5.0,
    forget_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="A host that has been silent for longer is left out. Until then Prometheus sees it down, and tells.",
        ),
    ] = DEFAULT_FORGET_SECONDS,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Write the hosts that the scheduler knows to a file of Prometheus targets.

    The file is replaced atomically, and only when something has changed.
    """
    with exit_codes(as_json), termination_as_interrupt():
        endpoint = need_endpoint(endpoint_options)
        writer = _Writer(file, timedelta(seconds=forget_after), as_json)
        if not follow:
            writer.write(endpoint)
            return
        try:
            while True:
                try:
                    writer.write(endpoint)
                except InvalidInputError:
                    raise
                except CollapipeError as error:  # the last list stays: hosts outlive a scheduler
                    complain(f"{file} stays as it is: {error}")
                time.sleep(every)
        except KeyboardInterrupt:  # the ordinary end
            return


def target_groups(
    statuses: list[HostStatus], now: float, forget_after: timedelta
) -> list[dict[str, Any]]:
    """The targets of Prometheus, one group a host, in an order that depends on nothing else.

    A silent host stays for a while under the same labels, so that its absence is seen (`up` is 0) and its series go on
    when it returns.

    Args:
        statuses: From the scheduler.
        now: Unix seconds.
        forget_after: A host that has not been heard of for longer is left out.
    """
    groups = []
    for status in sorted(statuses, key=lambda one: one.host.host_id):
        host = status.host
        silence = timedelta(seconds=now - status.last_seen.ToMilliseconds() / 1000)
        if host.metrics_address and (status.alive or silence <= forget_after):
            role = enum_word(HostRole.Name(host.role), "HostRole")
            groups.append(
                {
                    "targets": [host.metrics_address],
                    "labels": {"service": host.host_id, "host_role": role},
                }
            )
    return groups


class _Writer:
    """Keeps a file of targets current.

    Args:
        file: The file.
        forget_after: As for `target_groups`.
        as_json: Whether changes are told as JSON.
    """

    def __init__(self, file: Path, forget_after: timedelta, as_json: bool) -> None:
        self._file = file
        self._forget_after = forget_after
        self._as_json = as_json

    def write(self, endpoint: Endpoint) -> None:
        """Asks the scheduler, and replaces the file when it says something else.

        Raises:
            InvalidInputError: The file cannot be written.
            CollapipeError: The scheduler cannot be asked.
        """
        with endpoint.client() as client:
            groups = target_groups(client.hosts(), time.time(), self._forget_after)
        text = json.dumps(groups, indent=1) + "\n"
        try:
            if self._file.exists() and self._file.read_text(encoding="utf-8") == text:
                return
            replace_text(self._file, text)
        except OSError as error:
            raise InvalidInputError(
                f"cannot write {self._file} ({error.strerror}): give a file in a folder that exists and may be "
                "written to"
            ) from None
        if self._as_json:
            print_json({"file": str(self._file), "hosts": [g["labels"]["service"] for g in groups]})
        else:
            say(f"{len(groups)} hosts in {self._file}")
