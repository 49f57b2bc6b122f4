"""`collapipe testbed shape`: changes what the links of a running testbed are like.

Of a testbed of containers it edits links.json, which their shapers follow, and tells what each of them made of it. Of a local
testbed it edits emulation.json, which has rates and delays.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.netem.profiles import (
    LinkConditions,
    network_profile,
    network_profiles,
    say_mistakes,
)
from collapipe.traffic_shaping.netem.shaping import LinkShape
from collapipe.traffic_shaping.netem.status import AppliedLink
from collapipe.traffic_shaping.netem.traces import named_trace, read_trace, trace_names
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
from collapipe_client.reporting import FAILED, exit_codes, print_json, say
from collapipe_client.shaping_files import (
    EmulatedNetwork,
    Network,
    Report,
    ShapedNetwork,
    links_named,
)
from collapipe_client.testbed_processes import SCHEDULER
from collapipe_client.workspace import DEFAULT_ROOT, Workspace

_STATE = Path("deploy/netem/state/links.json")
"""Of the compose testbed, in its checkout."""

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
        help=f"links.json of a testbed of containers. Default: {_STATE} of the checkout that this is.",
    ),
]
Wait = Annotated[
    float, typer.Option("--wait", min=0, help="Seconds to wait for the hosts' shapers.")
]


@testbed_app.command()
def shape(
    link: LinkArgument = None,
    profile: Annotated[
        str | None,
        typer.Argument(
            help=f"One of {', '.join(network_profiles())}, or none.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help=f"A link over time: {', '.join(trace_names())}."),
    ] = None,
    rate: Annotated[str | None, typer.Option(help="For example 10mbit.")] = None,
    delay: Annotated[str | None, typer.Option(help="One way, for example 20ms.")] = None,
    jitter: Annotated[str | None, typer.Option(help="For example 5ms.")] = None,
    loss: Annotated[str | None, typer.Option(help="Of packets, for example 1%.")] = None,
    both: Annotated[bool, typer.Option("--both", help="The other direction too.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Show what there is.")] = False,
    state: StateOption = None,
    wait: Wait = 15.0,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Make a link like a network: a profile, values on top of it, or a trace."""
    with exit_codes(as_json):
        if show:
            _list(state, workspace, as_json)
            return
        if link is None:
            raise InvalidInputError(
                "give a link and a profile, for example: collapipe testbed shape device-0-0 4g"
            )
        said: dict[str, Any] = {
            "profile": None if profile in (None, "none") else profile,
            "rate_bps": None if rate is None else read_rate(rate),
            "delay_seconds": None if delay is None else read_seconds(delay),
            "jitter_seconds": None if jitter is None else read_seconds(jitter),
            "loss_ratio": None if loss is None else read_ratio(loss),
        }
        values = {key: value for key, value in said.items() if value is not None}
        if trace is not None:
            if values or profile:
                raise InvalidInputError(
                    f"--trace {trace} says all of a link: leave out the profile and other values"
                )
            values = {"trace": _trace(trace), "started_at": round(time.time(), 3)}
        elif not values and profile is None:
            raise InvalidInputError(
                f"what is {link} to be like? Give a profile ({', '.join(network_profiles())}), --rate, --delay, "
                "--jitter, --loss or --trace"
            )
        if profile not in (None, "none"):
            network_profile(profile)
        shapes = {
            key: _link_shape({**values, "direction": direction})
            for key, direction in links_named(link, both).items()
        }
        _tell(_network(state, workspace).change(shapes, wait), as_json)


@testbed_app.command()
def unshape(
    link: LinkArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="Every link.")] = False,
    both: Annotated[bool, typer.Option("--both", help="The other direction too.")] = False,
    state: StateOption = None,
    wait: Wait = 15.0,
    workspace: WorkspaceOption = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Leave a link as it is by itself."""
    with exit_codes(as_json):
        if (link is None) != everything:
            raise InvalidInputError("give a link, or --all")
        network = _network(state, workspace)
        keys = list(network.links()) if link is None else list(links_named(link, both))
        _tell(network.change(dict.fromkeys(keys), wait), as_json)


def _trace(name: str) -> Any:
    if name in trace_names():
        return name
    if not Path(name).is_file():
        named_trace(name)  # says which there are
    return read_trace(Path(name)).model_dump(exclude_none=True)


def _link_shape(values: dict[str, Any]) -> LinkShape:
    try:
        return LinkShape.model_validate(values)
    except ValidationError as error:
        raise InvalidInputError("; ".join(say_mistakes(error))) from None


def _network(state: Path | None, workspace: Path) -> Network:
    """The testbed that is meant: the file that is named, the local testbed that is up, or the checkout's containers."""
    if state is not None:
        return ShapedNetwork(state)
    emulation = Workspace(workspace).emulation_file
    record = running_testbed(workspace)
    if record is not None:
        if emulation.exists():
            names = [process.name for process in record.processes if process.name != SCHEDULER]
            return EmulatedNetwork(emulation, names)
        raise InvalidInputError(
            "the testbed that is up here emulates nothing, so its links cannot be shaped: `collapipe down`, then "
            "`collapipe up --emulation FILE`, where FILE may be as little as {}"
        )
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / _STATE).parent.is_dir():
            return ShapedNetwork(folder / _STATE)
    raise InvalidInputError(
        "there is no testbed to shape here: give --state FILE, the links.json of a testbed of containers, or start "
        "a local one with `collapipe up --emulation FILE`"
    )


def _list(state: Path | None, workspace: Path, as_json: bool) -> None:
    """Shows the profiles and traces that there are, and what the testbed's file says, if there is one."""
    try:
        links: dict[str, LinkShape] | None = dict(_network(state, workspace).links())
    except InvalidInputError:
        if state is not None:
            raise
        links = None
    if as_json:
        print_json(
            {
                "profiles": {k: v.model_dump() for k, v in network_profiles().items()},
                "traces": {name: named_trace(name).description for name in trace_names()},
                "links": links
                and {k: v.model_dump(exclude_defaults=True) for k, v in links.items()},
            }
        )
        return
    table = _table("profile", "rate", "delay", "jitter", "loss", "is")
    for name, profile in network_profiles().items():
        unlike = profile.up != profile.down
        table.add_row(name + (" (up)" if unlike else ""), *_row(profile.up), profile.description)
        if unlike:
            table.add_row(f"{name} (down)", *_row(profile.down), "")
    for name in trace_names():
        table.add_row(name, "", "", "", "", f"trace: {named_trace(name).description}")
    Console().print(table)
    if links is not None:
        shaped = _table("link", "is like")
        for key, link in links.items():
            shaped.add_row(key, _say_shape(link))
        Console().print(shaped)


def _tell(report: Report, as_json: bool) -> None:
    if as_json:
        applied = {
            sender: {receiver: link.model_dump() for receiver, link in links.items()}
            for sender, links in report.applied.items()
        }
        print_json(
            {
                "file": str(report.file),
                "applied": applied,
                "problems": report.problems,
                "not_confirmed": report.waiting,
                "not_up": report.asleep,
            }
        )
    else:
        say(f"{report.file} is changed")
        table = _table("from", "to", "rate", "delay", "jitter", "loss")
        for sender, links in report.applied.items():
            for receiver, link in links.items():
                table.add_row(sender, receiver, *_row(link))
        if table.row_count:
            Console().print(table)
        for sender, problems in report.problems.items():
            for problem in problems:
                say(f"{sender}: {problem}" if sender else problem)
        if report.waiting:
            say(
                f"not confirmed in time by {', '.join(report.waiting)}: see the logs of their shapers"
            )
        if report.asleep:
            say(f"no shaper is up of {', '.join(report.asleep)}: theirs follow when they come up")
    if report.failed:
        raise typer.Exit(FAILED)


def _say_shape(link: LinkShape) -> str:
    if link.trace is not None:
        return f"trace {link.trace if isinstance(link.trace, str) else 'of a file'}"
    own = link.model_dump(exclude={"profile", "direction"}, exclude_defaults=True)
    said = [link.profile and f"{link.profile} ({link.direction})", *_row(LinkConditions(**own))]
    return " ".join(part for part in said if part) or "as it is"


def _row(link: LinkConditions | AppliedLink) -> tuple[str, str, str, str]:
    return (
        say_rate(link.rate_bps),
        say_seconds(link.delay_seconds),
        say_seconds(link.jitter_seconds),
        say_ratio(link.loss_ratio),
    )


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="bold")
