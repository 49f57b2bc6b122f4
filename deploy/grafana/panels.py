"""What the dashboards ask: every panel of dashboards/*.json with its expressions, for checks and pictures."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "dashboards"
EVERYTHING = {"cluster": ".+", "member": ".+"}
"""Values of the variables when All is chosen."""


@dataclass(frozen=True)
class Target:
    """One query of a panel."""

    expression: str
    """PromQL with Grafana's variables."""
    legend: str
    instant: bool


@dataclass(frozen=True)
class Panel:
    """One panel."""

    dashboard: str
    """Its uid."""
    title: str
    kind: str
    """Grafana's type: stat, timeseries, state-timeline."""
    unit: str
    targets: tuple[Target, ...]
    document: Mapping[str, Any]
    """As Grafana reads it."""

    @property
    def name(self) -> str:
        """Tells it from every other panel."""
        return f"{self.dashboard}/{self.title}"


def documents(directory: Path = DIRECTORY) -> dict[str, dict[str, Any]]:
    """The dashboards as Grafana reads them, by file name."""
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(directory.glob("*.json"))
    }


def panels(directory: Path = DIRECTORY) -> Iterator[Panel]:
    """Every panel that asks something, of every dashboard in order."""
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
    expression: str,
    rate_interval: str = "20s",
    variables: Mapping[str, str] = EVERYTHING,
) -> str:
    """What Grafana would ask Prometheus.

    Args:
        expression: Of a panel.
        rate_interval: What $__rate_interval is; at the least step of our panels, Grafana makes it 20 s.
        variables: Regular expressions by name.

    Raises:
        ValueError: A variable has no value.
    """
    text = expression.replace("$__rate_interval", rate_interval)
    for name, value in variables.items():
        text = re.sub(rf"\$\{{?{name}\b\}}?", lambda match, value=value: value, text)
    if "$" in text:
        raise ValueError(f"{expression!r} has a variable without a value: {text!r}")
    return text
