"""The command `collapipe trace`, which writes what every host did in a round to a file for Perfetto."""

from pathlib import Path
from typing import Annotated

import typer

from collapipe.errors import NotFoundError
from collapipe.printable import indented
from collapipe_client.cli_options import AsJson, takes_option_groups
from collapipe_client.endpoint import EndpointOptions, need_endpoint
from collapipe_client.plan_commands import JobOption, RoundNumber, choose_round
from collapipe_client.reporting import (
    complain,
    exit_codes,
    print_json,
    say,
    termination_as_interrupt,
)
from collapipe_client.trace_viewer import show_in_browser
from collapipe_client.workspace import Workspace


@takes_option_groups
def trace(
    round_number: RoundNumber = None,
    job: JobOption = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: traces/JOB-round-N.pftrace in the workspace."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--open", help="Show the file in the browser, at ui.perfetto.dev.")
    ] = False,
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Write what every host did in a round, and when, to a file for Perfetto.

    The hosts keep this in memory only. So they must still run: start them with `collapipe up`, then train.
    """
    # The import takes 0.2 s, and no other command needs it.
    from collapipe_client.trace_file import read_hosts, write_trace

    with exit_codes(as_json), termination_as_interrupt():
        with need_endpoint(endpoint_options).client() as client:
            job_id, number = choose_round(client, job, round_number)
            hosts = read_hosts(client.trace(job_id, number - 1))
        recorded = [host for host in hosts if host.spans]
        missing = {host.host_id: host.missing for host in hosts if host.missing}
        if not recorded:
            raise NotFoundError(
                f"no host has spans of job {job_id}, round {number}, because hosts keep only the last spans, and only "
                f"while they run: trace a newer round ({'; '.join(missing.values())})"
            )
        file = output or _default_file(endpoint_options.workspace, f"{job_id}-round-{number}")
        num_spans = write_trace(file, f"{job_id}, round {number}", hosts)
        uncertainty = max(host.clock_uncertainty_seconds for host in recorded)
        if as_json:
            print_json(
                {
                    "file": str(file),
                    "job_id": job_id,
                    "round": number,
                    "spans": num_spans,
                    "hosts": [host.host_id for host in recorded],
                    "missing": missing,
                    "clock_uncertainty_seconds": uncertainty,
                }
            )
        else:
            say(f"{file} has {num_spans} spans of {len(recorded)} hosts")
            say(
                f"the clock of each host agrees with that of the scheduler within {1000 * uncertainty:.3g} ms"
            )
            for reason in missing.values():
                complain(f"not in the file: {indented(reason)}")
        if show:
            show_in_browser(file, complain)


def _default_file(workspace: Path, name: str) -> Path:
    """Returns the file of a trace in the workspace, which git ignores, and makes its folder."""
    folder = Workspace(workspace)
    folder.create()
    folder.traces.mkdir(exist_ok=True)
    return workspace / folder.traces.name / f"{name}.pftrace"
