"""Links that change over time: a trace is a list of what a link is like from which second on."""

import csv
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.netem.profiles import LinkValues, _Section, say_mistakes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class TraceStep(LinkValues):
    """What a link is like from a moment on."""

    at_seconds: float = Field(ge=0)
    """After the start of the trace."""


class Trace(_Section):
    """A link over time; the last step stays."""

    description: str = ""
    source: str = ""
    steps: tuple[TraceStep, ...] = Field(min_length=1)

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[TraceStep, ...]) -> tuple[TraceStep, ...]:
        times = [step.at_seconds for step in steps]
        if times[0] or times != sorted(set(times)):
            raise ValueError(
                f"at_seconds of the steps are {', '.join(f'{time:g}' for time in times)}: they begin with 0 and grow"
            )
        return steps

    def at(self, seconds: float) -> TraceStep:
        """The step in force some time after the start; before the start, the first."""
        return max(
            (step for step in self.steps if step.at_seconds <= max(seconds, 0.0)),
            key=lambda step: step.at_seconds,
        )

    def next_step_after(self, seconds: float) -> float | None:
        """When the next step begins, in seconds after the start; `None` after the last one."""
        return next((s.at_seconds for s in self.steps if s.at_seconds > seconds), None)


def trace_names() -> list[str]:
    """Names of the traces that come with the package."""
    files = (resources.files("collapipe.traffic_shaping.netem") / "traces").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


@cache
def named_trace(name: str) -> Trace:
    """A trace that comes with the package; raises `InvalidInputError`."""
    if name not in trace_names():
        raise InvalidInputError(
            f"there is no trace {name!r}: use one of {', '.join(trace_names())}, or a file"
        )
    file = resources.files("collapipe.traffic_shaping.netem") / "traces" / f"{name}.toml"
    return Trace.model_validate(tomllib.loads(file.read_text("utf-8")))


def read_trace(path: Path) -> Trace:
    """Reads a trace from a file: TOML as in traces/, or CSV with a column for each value that it sets.

    Raises:
        InvalidInputError: There is no such file, or it is no trace.
    """
    try:
        text = path.read_text("utf-8")
        document: dict[str, Any] = _from_csv(text) if path.suffix == ".csv" else tomllib.loads(text)
        return Trace.model_validate(document)
    except ValidationError as error:
        reason = "; ".join(say_mistakes(error))
    except (OSError, ValueError) as error:  # TOML's and Unicode's are ValueErrors
        reason = str(error)
    raise InvalidInputError(
        f"{path} is no trace ({reason}): give TOML with `steps`, or CSV with the columns at_seconds and any of "
        f"{', '.join(LinkValues.model_fields)}"
    )


def _from_csv(text: str) -> dict[str, Any]:
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {"steps": [{key: value for key, value in row.items() if value} for row in rows]}
