"""Values as the page gets them: short, and numbers that JSON has."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from collapipe.codec_numbers import CODEC_NAMES
from collapipe.printable import printable
from collapipe.scheduler.job_documents import RoundDocument
from collapipe.unit_names import unit_words
from collapipe.v1 import job_pb2, plan_pb2

Value = dict[str, object]

_MOST_CHARACTERS = 400


def number(value: float | None, digits: int = 4) -> float | None:
    """Rounds a number to significant digits; `None` if it is not finite, which JSON does not have."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def text(words: str) -> str:
    """Shortens words of a host or of a person, and escapes what would change the order or the lines of other words."""
    cut = words if len(words) <= _MOST_CHARACTERS else f"{words[: _MOST_CHARACTERS - 1]}…"
    return printable(cut, keep="\n")


def mean(values: Iterable[float]) -> float | None:
    """Returns the mean of finite values; `None` without any."""
    finite = [value for value in values if math.isfinite(value)]
    return number(sum(finite) / len(finite)) if finite else None


def metrics_of(evaluation: job_pb2.Evaluation) -> dict[str, float | None]:
    """Returns the values of all metrics, the main one first."""
    metrics = [(evaluation.metric, evaluation.value), *sorted(evaluation.other_metrics.items())]
    return {name: number(value) for name, value in metrics}


def decision_of(document: RoundDocument | None) -> Mapping[str, Any]:
    """Returns the recorded decision of a round. It is empty without one."""
    return document.decision if document else {}


def stages(listed: Sequence[plan_pb2.Stage]) -> list[Value]:
    """Describes the stages of a pipeline, in its order."""
    num_units = max((stage.stop_unit for stage in listed), default=0)
    return [
        {
            "id": stage.host_id,
            "units": unit_words(stage.start_unit, stage.stop_unit, num_units),
        }
        for stage in listed
    ]


def links(plan: plan_pb2.Plan) -> list[Value]:
    """Describes the links of a plan. Link i leads from stage i to stage i + 1."""
    return [
        {
            "from": plan.stages[i].host_id,
            "to": plan.stages[i + 1].host_id,
            "limit_bps": link.rate_limit_bps or None,
            "bandwidth_hz": link.bandwidth_hz or None,
            "codec": CODEC_NAMES.get(link.codec, ""),
        }
        for i, link in enumerate(plan.links)
    ]
