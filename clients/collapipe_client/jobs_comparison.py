"""Compares jobs, by what the scheduler has recorded of them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collapipe_client.reporting import plain_table, print_table, say

_MOST_CHECKPOINTS = 5
"""Rounds at which losses and metrics are compared, at most."""


@dataclass(frozen=True)
class _Point:
    """What a job had reached after a round, in the seconds of its committed rounds so far."""

    round_number: int
    seconds: float
    loss: float | None
    metric: float | None
    """Of the last evaluation until then."""
    other_metrics: Mapping[str, float]
    """Of the same evaluation."""


class _Record:
    """The records of one job.

    Args:
        parts: What `CollaPipeClient.records` yields.
    """

    def __init__(self, parts: Iterable[dict[str, Any]]) -> None:
        self.job, *self.rounds = parts
        self.metric_name = (self.job["evaluation"] or {}).get("metric", "")
        self.points: list[_Point] = []
        seconds, metric, last = 0.0, None, 0
        others: Mapping[str, float] = {}
        for each in self.rounds:
            # The rounds that are left out before it took about as long.
            seconds += (each.get("seconds") or 0.0) * (each["round"] - last)
            last = each["round"]
            if each.get("metrics"):
                metric = each["metrics"].get(self.metric_name, metric)
                others = {k: v for k, v in each["metrics"].items() if k != self.metric_name}
            losses = [loss for loss in each.get("losses", ()) if loss is not None]
            loss = statistics.mean(losses) if losses else None
            self.points.append(_Point(each["round"], seconds, loss, metric, others))

    def document(self) -> dict[str, Any]:
        """Returns the values of the job alone. Times and bytes of a round are medians over its rounds."""
        clusters = [each.get("clusters", ()) for each in self.rounds]
        moved = [r.get("pushed_bytes", 0) + r.get("fetched_bytes", 0) for r in self.rounds]
        return {
            "job_id": self.job["id"],
            "name": self.job["name"],
            "state": self.job["state"],
            "rounds": self.job["committed"],
            "seconds": self.points[-1].seconds if self.points else 0.0,
            "round_seconds": _median(each.get("seconds") for each in self.rounds),
            "round_seconds_without_evaluation": _median(
                each.get("seconds_without_evaluation") for each in self.rounds
            ),
            "predicted_round_seconds": _median(
                each.get("predicted_seconds") for each in self.rounds
            ),
            "samples_per_second": _median(each.get("samples_per_second") for each in self.rounds),
            "weights_bytes_of_a_round": _median(moved),
            "devices": [
                device
                for cluster in (clusters[-1] if clusters else ())
                for device in cluster["devices"]
            ],
            "metric": self.metric_name,
        }

    def after_round(self, number: int) -> _Point | None:
        """Returns what the job had reached after so many rounds."""
        return next((each for each in reversed(self.points) if each.round_number <= number), None)

    def after_seconds(self, seconds: float) -> _Point | None:
        """Returns what the job had reached after so many seconds of training."""
        return next((each for each in reversed(self.points) if each.seconds <= seconds), None)


def compare_jobs(parts_of_jobs: Iterable[Iterable[dict[str, Any]]]) -> dict[str, Any]:
    """Compares jobs, given what `CollaPipeClient.records` yields of each."""
    records = [_Record(parts) for parts in parts_of_jobs]
    settings = [_flat(record.job["settings"]) for record in records]
    for each, record in zip(settings, records, strict=True):
        if isinstance(count := each.get("devices_per_cluster"), int):
            each["devices_per_cluster"] = [count] * record.job["settings"]["clusters"]
    keys = dict.fromkeys(key for each in settings for key in each if key != "name")
    values = {key: [each.get(key) for each in settings] for key in keys}
    most = min(record.job["committed"] for record in records)
    numbers = sorted(
        {-(-most * part // _MOST_CHECKPOINTS) for part in range(1, _MOST_CHECKPOINTS + 1)} - {0}
    )
    seconds = min(record.points[-1].seconds if record.points else 0.0 for record in records)
    return {
        "jobs": [record.document() for record in records],
        "settings": {key: each for key, each in values.items() if each.count(each[0]) < len(each)},
        "at_rounds": [
            {"round": number, **_reached([record.after_round(number) for record in records])}
            for number in numbers
        ],
        "at_seconds": {
            "seconds": seconds,
            **_reached([record.after_seconds(seconds) for record in records]),
        },
    }


def say_comparison(document: dict[str, Any]) -> None:
    """Prints what `compare_jobs` returns."""
    jobs = document["jobs"]
    table = plain_table("", *(job["job_id"] for job in jobs))
    rows = {
        "state": [job["state"] for job in jobs],
        "committed rounds": [job["rounds"] for job in jobs],
        "seconds of all rounds": [_digits(job["seconds"]) for job in jobs],
        "seconds of a round": [_digits(job["round_seconds"]) for job in jobs],
        "seconds without evaluation": [
            _digits(job["round_seconds_without_evaluation"]) for job in jobs
        ],
        "seconds of a round, predicted": [_digits(job["predicted_round_seconds"]) for job in jobs],
        "samples/s": [_digits(job["samples_per_second"]) for job in jobs],
        "MB of weights a round": [
            _digits((job["weights_bytes_of_a_round"] or 0) / 1e6) for job in jobs
        ],
        "devices": [len(job["devices"]) for job in jobs],
    }
    for name, values in rows.items():
        table.add_row(name, *map(str, values))
    metrics = {job["metric"] for job in jobs} - {""}
    if len(metrics) > 1:
        table.add_row("metric", *(job["metric"] for job in jobs))
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    at_time = document["at_seconds"]
    reached = [(f"after round {each['round']}", each) for each in document["at_rounds"]]
    if at_time["seconds"]:
        reached.append((f"after {_digits(at_time['seconds'])} s", at_time))
    for name, key in (("loss", "loss"), (metric, "metric")):
        for moment, each in reached:
            if any(value is not None for value in each[key]):
                table.add_row(f"{name} {moment}", *map(_digits, each[key]))
    for each in document["at_rounds"][-1:]:
        for name, measured in each["other_metrics"].items():
            table.add_row(f"{name} after round {each['round']}", *map(_digits, measured))
    for key, values in document["settings"].items():
        table.add_row(key, *("not set" if value is None else str(value) for value in values))
    print_table(table)
    if not document["settings"]:
        say("no setting differs")


def _reached(points: Sequence[_Point | None]) -> dict[str, Any]:
    names = sorted({name for point in points if point for name in point.other_metrics})
    return {
        "loss": [point.loss if point else None for point in points],
        "other_metrics": {
            name: [point.other_metrics.get(name) if point else None for point in points]
            for name in names
        },
        "metric": [point.metric if point else None for point in points],
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _digits(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
