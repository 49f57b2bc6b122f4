"""Traces: links whose conditions change over time."""

import csv
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from collapipe.emulation.links import LinkValues, describe_mistakes
from collapipe.emulation.network_profiles import StrictModel
from collapipe.errors import InvalidInputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FOLDER = resources.files("collapipe.traffic_shaping.shaper_process") / "traces"


class TraceStep(LinkValues):
    """The conditions of a link from a moment on."""

    at_seconds: float = Field(ge=0)
    """Time since the start of the trace."""


class Trace(StrictModel):
    """The conditions of a link over time. The last step holds for ever."""

    description: str = ""
    source: str = ""
    """The source of its figures."""
    steps: tuple[TraceStep, ...] = Field(min_length=1)

    @field_validator("steps")
    @classmethod
    def _check_order(cls, steps: tuple[TraceStep, ...]) -> tuple[TraceStep, ...]:
        times = [step.at_seconds for step in steps]
        if times[0] or times != sorted(set(times)):
            raise ValueError(
                f"at_seconds of the steps are {', '.join(f'{time:g}' for time in times)}: they must begin with 0 and "
                "grow"
            )
        return steps

    def step_at(self, seconds: float) -> TraceStep:
        """Returns the step in force at a time after the start; before the start, the first step."""
        begun = [step for step in self.steps if step.at_seconds <= seconds]
        return begun[-1] if begun else self.steps[0]

    def next_change(self, seconds: float) -> float | None:
        """Returns when the next step begins, in seconds after the start; `None` after the last step."""
        return next((s.at_seconds for s in self.steps if s.at_seconds > seconds), None)


def trace_names() -> list[str]:
    """Returns the names of the traces in this package."""
    return sorted(
        file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml")
    )


@cache
def named_trace(name: str) -> Trace:
    """Returns a trace of this package.

    Raises:
        InvalidInputError: No trace has this name.
    """
    if name not in trace_names():
        raise InvalidInputError(
            f"there is no trace {name!r}: use one of {', '.join(trace_names())}, or a file"
        )
    return Trace.model_validate(tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8")))


def read_trace(path: Path) -> Trace:
    """Reads a trace from a TOML file like those in traces/, or from a CSV file with a column for each value.

    Raises:
        InvalidInputError: The file cannot be read, or is not a trace.
    """
    try:
        text = path.read_text("utf-8")
        document: dict[str, Any] = _read_csv(text) if path.suffix == ".csv" else tomllib.loads(text)
        return Trace.model_validate(document)
    except ValidationError as error:
        reason = describe_mistakes(error)
    except (OSError, ValueError) as error:  # errors of TOML and of Unicode are ValueErrors
        reason = str(error)
    raise InvalidInputError(
        f"{path} is not a trace ({reason}): give TOML with `steps`, or CSV with the columns at_seconds and any of "
        f"{', '.join(LinkValues.model_fields)}"
    )


def _read_csv(text: str) -> dict[str, Any]:
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {"steps": [{key: value for key, value in row.items() if value} for row in rows]}
