"""The command `collapipe targets`, which writes the file of hosts that a Prometheus server scrapes."""

import contextlib
import json
import queue
import signal
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
from collapipe_client.reporting import complain, exit_codes, print_json, say
from collapipe_client.workspace import replace_text


@takes_option_groups
def targets(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.json",
            help="A file that file_sd_configs of Prometheus reads, for example deploy/prometheus/boxes/hosts.json.",
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", help="Update the file until interrupted.")
    ] = False,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Time between updates with --follow.")
    ] = 5.0,
    forget_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Leave out hosts that have been silent for longer. Until then, Prometheus reports them as down.",
        ),
    ] = 3600.0,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Write the hosts that the scheduler knows to a file of Prometheus targets.

    The file is replaced atomically, and only if the hosts have changed.
    """
    with exit_codes(as_json):
        endpoint = need_endpoint(endpoint_options)
        forget = timedelta(seconds=forget_after)
        if not follow:
            _update(file, endpoint, forget, as_json)
            return
        # An exception that a signal raises within gRPC could be lost. So the signals are only noted there.
        signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda received, frame: signals.put(received))
        while True:
            try:
                _update(file, endpoint, forget, as_json)
            except InvalidInputError:
                raise
            except CollapipeError as error:  # The hosts may run although the scheduler does not.
                complain(f"{file} is not updated: {error}")
            with contextlib.suppress(queue.Empty):
                signals.get(timeout=every)
                return


def target_groups(
    statuses: list[HostStatus], now: float, forget_after: timedelta
) -> list[dict[str, Any]]:
    """Returns one group of Prometheus targets for each host, sorted by host id.

    A silent host stays for a while, so that Prometheus reports it as down and continues its series later.

    Args:
        now: Unix seconds.
        forget_after: A host that has been silent for longer is left out.
    """
    groups = []
    for status in sorted(statuses, key=lambda one: one.host.host_id):
        host = status.host
        silence = timedelta(seconds=now - status.last_seen.ToMilliseconds() / 1000)
        if host.metrics_address and (status.alive or silence <= forget_after):
            role = enum_word(HostRole.Name(host.role), "HostRole")
            labels = {"service": host.host_id, "host_role": role}
            groups.append({"targets": [host.metrics_address], "labels": labels})
    return groups


def _update(file: Path, endpoint: Endpoint, forget_after: timedelta, as_json: bool) -> None:
    """Asks the scheduler for its hosts, and replaces the file if they have changed."""
    with endpoint.client() as client:
        groups = target_groups(client.hosts(), time.time(), forget_after)
    text = json.dumps(groups, indent=1) + "\n"
    try:
        if file.exists() and file.read_text(encoding="utf-8") == text:
            return
        replace_text(file, text)
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {file} ({error.strerror}): give a file in a folder that exists and that you may write to"
        ) from None
    if as_json:
        print_json({"file": str(file), "hosts": [group["labels"]["service"] for group in groups]})
    else:
        say(f"{len(groups)} hosts in {file}")
