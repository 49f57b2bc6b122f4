"""Reads the panels of dashboards/*.json with their queries, for tests and for picture.py."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "dashboards"
EVERYTHING = {"cluster": ".+", "member": ".+"}
"""The values of the variables when All is chosen, as regular expressions."""


@dataclass(frozen=True)
class Target:
    """One query of a panel."""

    expression: str
    """PromQL with variables of Grafana."""
    legend: str
    instant: bool


@dataclass(frozen=True)
class Panel:
    """One panel of a dashboard."""

    dashboard: str
    """Uid of the dashboard."""
    title: str
    kind: str
    """The type in Grafana: stat, timeseries or state-timeline."""
    unit: str
    targets: tuple[Target, ...]
    document: Mapping[str, Any]
    """The JSON that Grafana reads."""

    @property
    def name(self) -> str:
        """A name that no other panel has."""
        return f"{self.dashboard}/{self.title}"


def documents(directory: Path = DIRECTORY) -> dict[str, dict[str, Any]]:
    """Returns the JSON of all dashboards by file name."""
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(directory.glob("*.json"))
    }


def panels(directory: Path = DIRECTORY) -> Iterator[Panel]:
    """Yields every panel that has queries."""
    for document in documents(directory).values():
        for panel in document["panels"]:
            if panel["type"] != "row":
                yield Panel(
                    dashboard=document["uid"],
                    title=panel["title"],
                    kind=panel["type"],
                    unit=panel["fieldConfig"]["defaults"].get("unit", ""),
                    targets=tuple(
                        Target(one["expr"], one["legendFormat"], bool(one.get("instant")))
                        for one in panel["targets"]
                    ),
                    document=panel,
                )


def to_promql(
    expression: str, rate_interval: str = "20s", variables: Mapping[str, str] = EVERYTHING
) -> str:
    """Returns the query that Grafana would send to Prometheus.

    Args:
        expression: PromQL with variables of Grafana.
        rate_interval: Value of $__rate_interval. Grafana uses 20 s for the shortest step of our panels.
        variables: Regular expressions by the name of the variable.

    Raises:
        ValueError: A variable has no value.
    """
    text = expression.replace("$__rate_interval", rate_interval)
    for name, value in variables.items():
        text = re.sub(rf"\$\{{?{name}\b\}}?", lambda match, value=value: value, text)
    if "$" in text:
        raise ValueError(f"{expression!r} has a variable without a value: {text!r}")
    return text
