"""The commands `collapipe testbed shape` and `unshape`, which change the links of a running testbed.

For a testbed of containers, they edit links.json and report what the shaper processes did. For a local
testbed, they edit emulation.json.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from collapipe.emulation.links import LinkDescription, describe_mistakes
from collapipe.emulation.network_profiles import NETWORK_PROFILES, LinkConditions, network_profile
from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.shaper_process.links_file import LinkEntry
from collapipe.traffic_shaping.shaper_process.traces import TRACES, named_trace, read_trace
from collapipe_client.cli_options import AsJson, WorkspaceOption
from collapipe_client.endpoint import running_testbed
from collapipe_client.quantities import (
    read_rate,
    read_ratio,
    read_seconds,
    say_rate,
    say_ratio,
    say_seconds,
)
from collapipe_client.reporting import FAILED, exit_codes, plain_table, print_json, print_table, say
from collapipe_client.shaping_files import (
    EmulatedLinks,
    Report,
    ShaperProcessLinks,
    links_named,
)
from collapipe_client.testbed_processes import SCHEDULER
from collapipe_client.workspace import DEFAULT_ROOT, Workspace

_STATE = Path("deploy/netem/state/links.json")
"""Path of links.json in a checkout, for the compose testbed."""
_NO_PROFILE = "none"

testbed_app = typer.Typer(no_args_is_help=True, help="The network of a testbed.")

LinkArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="LINK",
        help="A host, for its links in both directions; or 'sender>receiver', where * is any host.",
        show_default=False,
    ),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="FILE",
        envvar="COLLAPIPE_SHAPING_STATE",
        help=f"links.json of a testbed of containers. Default: {_STATE} of the checkout around this folder.",
    ),
]
Wait = Annotated[
    float, typer.Option("--wait", min=0, help="Seconds to wait for the shaper processes.")
]


@testbed_app.command()
def shape(
    link: LinkArgument = None,
    profile: Annotated[
        str | None,
        typer.Argument(
            help=f"One of {', '.join(NETWORK_PROFILES)}, or {_NO_PROFILE}.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Conditions that change over time: {', '.join(TRACES)}, or a file.",
        ),
    ] = None,
    rate: Annotated[str | None, typer.Option(help="For example 10mbit.")] = None,
    delay: Annotated[str | None, typer.Option(help="One-way delay, for example 20ms.")] = None,
    jitter: Annotated[
        str | None, typer.Option(help="Largest deviation of the delay, for example 5ms.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="Share of packets, for example 1%.")] = None,
    both: Annotated[bool, typer.Option("--both", help="Also the opposite direction.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Show profiles, traces and links.")] = False,
    state: StateOption = None,
    wait: Wait = 15.0,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Give a link the conditions of a network profile, of single values, of both, or of a trace."""
    with exit_codes(as_json):
        if show:
            _list(state, workspace, as_json)
            return
        if link is None:
            raise InvalidInputError(
                "give a link and a profile, for example: collapipe testbed shape device-0-0 4g"
            )
        options: dict[str, Any] = {
            "profile": None if profile == _NO_PROFILE else profile,
            "rate_bps": None if rate is None else read_rate(rate),
            "delay_seconds": None if delay is None else read_seconds(delay),
            "jitter_seconds": None if jitter is None else read_seconds(jitter),
            "loss_ratio": None if loss is None else read_ratio(loss),
        }
        values = {key: value for key, value in options.items() if value is not None}
        if trace is not None:
            if values or profile:
                raise InvalidInputError(
                    f"--trace {trace} sets all conditions of a link: leave out the profile and the other values"
                )
            values = {"trace": _read_trace(trace), "started_at": round(time.time(), 3)}
        elif not values and profile is None:
            raise InvalidInputError(
                f"no conditions for {link}: give a profile ({', '.join(NETWORK_PROFILES)}), --rate, --delay, "
                "--jitter, --loss or --trace"
            )
        if "profile" in values:
            network_profile(values["profile"])
        entries = {
            key: _make_entry({**values, "direction": direction})
            for key, direction in links_named(link, both).items()
        }
        _print_report(_find_links(state, workspace).change(entries, wait), as_json)


@testbed_app.command()
def unshape(
    link: LinkArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="Every link.")] = False,
    both: Annotated[bool, typer.Option("--both", help="Also the opposite direction.")] = False,
    state: StateOption = None,
    wait: Wait = 15.0,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Remove the shaping of a link."""
    with exit_codes(as_json):
        if (link is None) != everything:
            raise InvalidInputError("give a link, or --all")
        links = _find_links(state, workspace)
        keys = list(links.links()) if link is None else list(links_named(link, both))
        _print_report(links.change(dict.fromkeys(keys), wait), as_json)


def _read_trace(name: str) -> Any:
    """Returns the name of a trace of the package, or the content of a trace file."""
    if name not in TRACES and Path(name).is_file():
        return read_trace(Path(name)).model_dump(exclude_none=True)
    named_trace(name)
    return name


def _make_entry(values: dict[str, Any]) -> LinkEntry:
    try:
        return LinkEntry.model_validate(values)
    except ValidationError as error:
        raise InvalidInputError(describe_mistakes(error)) from None


def _find_links(state: Path | None, workspace: Path) -> ShaperProcessLinks | EmulatedLinks:
    """Finds the links of the given file, else of a running local testbed, else of the compose testbed."""
    if state is not None:
        return ShaperProcessLinks(state)
    emulation = Workspace(workspace).emulation_file
    record = running_testbed(workspace)
    if record is not None:
        if emulation.exists():
            names = [process.name for process in record.processes if process.name != SCHEDULER]
            return EmulatedLinks(emulation, names)
        raise InvalidInputError(
            "the running testbed emulates nothing, so its links cannot be shaped: run `collapipe down`, then "
            "`collapipe up --emulation FILE`, where FILE may contain only {}"
        )
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / _STATE).parent.is_dir():
            return ShaperProcessLinks(folder / _STATE)
    raise InvalidInputError(
        "there is no testbed here whose links can be shaped: give --state FILE, the links.json of a testbed of "
        "containers, or start a local testbed with `collapipe up --emulation FILE`"
    )


def _list(state: Path | None, workspace: Path, as_json: bool) -> None:
    """Prints the network profiles, the traces, and the links of the testbed, if there is one."""
    links: Mapping[str, LinkDescription] | None = None
    try:
        links = _find_links(state, workspace).links()
    except InvalidInputError:
        if state is not None:
            raise
    if as_json:
        print_json(
            {
                "profiles": {k: v.model_dump() for k, v in NETWORK_PROFILES.items()},
                "traces": {name: trace.description for name, trace in TRACES.items()},
                "links": links
                and {k: v.model_dump(exclude_defaults=True) for k, v in links.items()},
            }
        )
        return
    table = plain_table("profile", "rate", "delay", "jitter", "loss", "description")
    for name, profile in NETWORK_PROFILES.items():
        differs = profile.up != profile.down
        table.add_row(name + (" (up)" if differs else ""), *_row(profile.up), profile.description)
        if differs:
            table.add_row(f"{name} (down)", *_row(profile.down), "")
    for name, trace in TRACES.items():
        table.add_row(name, "", "", "", "", f"trace: {trace.description}")
    print_table(table)
    if links is not None:
        shaped = plain_table("link", "conditions")
        for key, link in links.items():
            shaped.add_row(key, _describe(link))
        print_table(shaped)


def _print_report(report: Report, as_json: bool) -> None:
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        say(f"{report.file} is changed")
        table = plain_table("from", "to", "rate", "delay", "jitter", "loss")
        for sender, links in report.applied.items():
            for receiver, link in links.items():
                table.add_row(sender, receiver, *_row(link))
        if table.row_count:
            print_table(table)
        for sender, problems in report.problems.items():
            for problem in problems:
                say(f"{sender}: {problem}" if sender else problem)
        if report.not_confirmed:
            names = ", ".join(report.not_confirmed)
            say(f"not confirmed in time by {names}: see the logs of their shaper processes")
        if report.not_up:
            names = ", ".join(report.not_up)
            say(f"no shaper process runs for {names}: their links change when it starts")
    if report.not_confirmed:
        raise typer.Exit(FAILED)


def _describe(link: LinkDescription) -> str:
    if isinstance(link, LinkEntry) and link.trace is not None:
        return f"trace {link.trace}" if isinstance(link.trace, str) else "trace from a file"
    profile = f"{link.profile} ({link.direction})" if link.profile else ""
    return " ".join(part for part in (profile, *_row(link.conditions)) if part) or "ideal"


def _row(link: LinkConditions) -> tuple[str, str, str, str]:
    return (
        say_rate(link.rate_bps),
        say_seconds(link.delay_seconds),
        say_seconds(link.jitter_seconds),
        say_ratio(link.loss_ratio),
    )
