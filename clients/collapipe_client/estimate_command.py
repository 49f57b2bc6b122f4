"""The `collapipe plan estimate` command: whether a model fits on some boxes, and how long a round takes there."""

from typing import Annotated, Any

import typer

from collapipe.byte_sizes import say_bytes
from collapipe.emulation.boxes import Box
from collapipe.emulation.device_profiles import DEVICE_PROFILES
from collapipe.emulation.network_profiles import NETWORK_PROFILES
from collapipe.errors import CollapipeError, InvalidInputError
from collapipe_client.box_options import BOX_FORM, read_boxes
from collapipe_client.cli_options import AsJson, JobFile, Preset, Settings
from collapipe_client.job_files import read_job
from collapipe_client.reporting import FAILED, exit_codes, plain_table, print_json, print_table, say

_SHORT_NAMES = ", ".join(profile.short_name for profile in DEVICE_PROFILES.values())


def estimate(
    devices: Annotated[
        str,
        typer.Option(
            metavar=f"{BOX_FORM},...",
            show_default=False,
            help=f"The devices of a cluster, for example 2xpi4,jetson:4GB@20mbit. Profiles: {_SHORT_NAMES}. MEMORY is what "
            "training may use, without the process. LINK is a rate or a network profile: "
            f"{', '.join(NETWORK_PROFILES)}.",
        ),
    ],
    job_file: JobFile = None,
    preset: Preset = None,
    settings: Settings = None,
    control_unit: Annotated[
        str | None,
        typer.Option(metavar="BOX", help="Default: a laptop that gives no memory to blocks."),
    ] = None,
    edge_server: Annotated[
        str | None,
        typer.Option(metavar="BOX", help="Default: a laptop that gives no memory to blocks."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a model fits on some boxes, how much memory each needs, and how long a round takes. Nothing is trained.

    No service needs to run. The exit code is 0 if the model fits, and 1 if it does not.
    """
    with exit_codes(as_json):
        job = read_job(job_file, preset, settings or [], is_local=True)
        request = {
            "job": job.model_dump(mode="json", exclude_unset=True),
            "devices": [_document(box) for box in read_boxes(devices, "--devices")],
            "control_unit": _read_box(control_unit, "--control-unit"),
            "edge_server": _read_box(edge_server, "--edge-server"),
        }
        answer = ask(request)
        if as_json:
            print_json(answer)
        else:
            say_estimate(answer)
        if not answer["fits"]:
            raise typer.Exit(FAILED)


def _document(box: Box) -> dict[str, Any]:
    return box.model_dump(mode="json")


def _read_box(text: str | None, option: str) -> dict[str, Any] | None:
    if text is None:
        return None
    boxes = read_boxes(text, option)
    if len(boxes) != 1:
        raise InvalidInputError(f"{option} {text}: give one box, because there is one such host")
    return _document(boxes[0])


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the estimate for a request, both as JSON objects."""
    try:
        from collapipe.planning.estimate import estimate  # Only this command needs its packages.
    except ModuleNotFoundError as error:
        raise CollapipeError(
            f"the estimate needs the package {error.name}: install 'collapipe[control,scheduler]'"
        ) from error
    return estimate(request).model_dump(mode="json")


def say_estimate(answer: dict[str, Any]) -> None:
    """Prints the answer to a request: the verdict first, and no times for a job that does not fit."""
    if answer["fits"]:
        say("it fits")
    else:
        say_missing(answer)
    say_details(answer)
    say_notes(answer)


def say_missing(answer: dict[str, Any], where: str = "") -> None:
    """Prints why a job does not fit, and what would help.

    Args:
        where: The clusters of which that is true.
    """
    say(f"it does not fit{where}: {'; '.join(answer['missing'])}")
    if answer["changes"]:
        alone = len(answer["changes"]) == 1
        say(f"{'this change' if alone else 'each of these changes'} would make it fit:")
    else:
        say("no single change was found that would make it fit")
    for change in answer["changes"]:
        settings = " ".join(f"--set {setting}" for setting in change["settings"])
        say(f"  {settings or change['boxes']}")


def say_details(answer: dict[str, Any]) -> None:
    """Prints hosts, and links and times if the job fits."""
    for index, cluster in enumerate(answer["clusters"]):
        slices = cluster["num_slices"]
        cut = f" of {slices} slices" if slices > 1 else ""
        say(
            f"cluster {index}, {answer['strategy']}, {cluster['num_micro_batches']} micro-batches{cut}"
        )
        _say_hosts(cluster)
        if answer["fits"]:
            _say_links(cluster)
            _say_round(cluster)


def say_notes(answer: dict[str, Any]) -> None:
    """Prints warnings and notes."""
    for warning in answer["warnings"]:
        say(f"warning: {warning}")
    for note in answer["notes"]:
        say(f"note: {note}")


def _say_hosts(cluster: dict[str, Any]) -> None:
    table = plain_table(
        "host",
        "box",
        "blocks",
        "needs",
        "of",
        "weights",
        "frozen",
        "optimizer",
        "activations",
        "process",
        "pushed",
        "fetched",
        "first fetch",
    )
    for host in cluster["hosts"]:
        given = host["given_bytes"]
        table.add_row(
            host["host_id"],
            host["profile"],
            f"{host['num_blocks']}{' (recomputes)' if host['recompute'] else ''}",
            say_bytes(host["needed_bytes"]),
            "" if given is None else say_bytes(given),
            *(
                say_bytes(host[f"{part}_bytes"])
                for part in (
                    "weights",
                    "frozen",
                    "optimizer",
                    "activation",
                    "process",
                    "pushed",
                    "fetched",
                    "first_fetched",
                )
            ),
        )
    print_table(table, width=160)


def _say_links(cluster: dict[str, Any]) -> None:
    one = "slice" if cluster["num_slices"] > 1 else "micro-batch"
    table = plain_table("link", "codec", "bytes of a step", "back", f"s of a {one}", "back")
    for link in cluster["links"]:
        table.add_row(
            f"{link['sender']} > {link['receiver']}",
            link["codec"],
            say_bytes(link["forward_bytes"]),
            say_bytes(link["backward_bytes"]),
            f"{link['forward_seconds']:.3g}",
            f"{link['backward_seconds']:.3g}",
        )
    print_table(table, width=160)


def _say_round(cluster: dict[str, Any]) -> None:
    parts = [f"{cluster['num_steps']} steps of {cluster['step_seconds']:.3g} s"]
    parts += [f"{cluster[f'{name}_seconds']:.3g} s to {name}" for name in ("push", "fetch")]
    say(
        f"round: {' + '.join(parts)} = {cluster['round_seconds']:.3g} s; the bottleneck of a step is {cluster['limit']}"
    )
    say(
        f"before the first round: {cluster['first_fetch_seconds']:.3g} s to fetch the initial weights"
    )
