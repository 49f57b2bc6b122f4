"""Traces: links whose conditions change over time."""

import csv
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from collapipe.emulation.links import LinkValues, describe_mistakes
from collapipe.emulation.named_tables import StrictModel, find_table, read_toml
from collapipe.errors import InvalidInputError


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


TRACES = {
    file.stem: Trace.model_validate(read_toml(file))
    for file in sorted(Path(__file__).with_name("traces").glob("*.toml"))
}
"""The traces of this package, by name."""


def named_trace(name: str) -> Trace:
    """Returns the trace of this package with a name; raises `InvalidInputError`."""
    return find_table("trace", name, TRACES)


def read_trace(path: Path) -> Trace:
    """Reads a trace from a TOML file like those in traces/, or from a CSV file with a column for each value.

    Raises:
        InvalidInputError: The file cannot be read, or is not a trace.
    """
    try:
        return Trace.model_validate(_read_csv(path) if path.suffix == ".csv" else read_toml(path))
    except ValidationError as error:
        reason = describe_mistakes(error)
    except (OSError, ValueError) as error:  # Errors of TOML and of Unicode are ValueErrors.
        reason = str(error)
    raise InvalidInputError(
        f"{path} is not a trace ({reason}): give TOML with `steps`, or CSV with the columns at_seconds and any of "
        f"{', '.join(LinkValues.model_fields)}"
    )


def _read_csv(path: Path) -> dict[str, Any]:
    lines = path.read_text("utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {"steps": [{key: value for key, value in row.items() if value} for row in rows]}
