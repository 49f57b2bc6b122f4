"""Options that several commands share, and a decorator for groups of options."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from collapipe_client.job_files import preset_names

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
WorkspaceOption = Annotated[
    Path, typer.Option("--workspace", metavar="DIR", help="Folder of the local testbed.")
]
JobFile = Annotated[Path | None, typer.Argument(metavar="JOB.toml", show_default=False)]
Preset = Annotated[
    str | None,
    typer.Option(
        help=f"A preset instead of a file: {', '.join(preset_names())}.",
        autocompletion=lambda incomplete: [n for n in preset_names() if n.startswith(incomplete)],
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, for example training.rounds=5."),
]


def takes_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Lets a command take a dataclass of options as one parameter.

    Typer makes one option of each parameter of a function. So the returned function has one parameter for
    each field of the dataclass, and calls the command with an instance of it.
    """
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += inspect.signature(parameter.annotation).parameters.values()
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def command_of_single_options(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    command_of_single_options.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return command_of_single_options
