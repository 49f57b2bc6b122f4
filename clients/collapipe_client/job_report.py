"""The records of a job as tables, and the page that has them with their plots."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collapipe_client import report_page as page
from collapipe_client.quantities import say_duration, say_mbit

if TYPE_CHECKING:  # It needs matplotlib, which may be missing.
    from collapipe_client.plot_files import Plot

PARTS = {
    "configure": "fetch weights",
    "evaluation": "evaluate",
    "training": "train",
    "gather": "push weights",
}
"""The measured parts of a round in a cluster, in order, with their words."""
_MOST_ROWS = 100
"""Rounds of a table that is not folded."""


@dataclass(frozen=True)
class JobRecords:
    """What `CollaPipeClient.records` yields.

    Args:
        job: The first part.
        rounds: The others.
    """

    job: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]

    @property
    def every(self) -> int:
        """Of so many rounds, the records have one."""
        return int(self.rounds[0]["every"]) if self.rounds else 1

    @property
    def subtitle(self) -> str:
        """Names the job for a plot."""
        return f"job {self.job['id']}, {self.job['committed']} of {self.job['rounds']} rounds"

    @cached_property
    def metrics(self) -> list[str]:
        """Names of all metrics, the main one first."""
        main = [self.job["evaluation"]["metric"]] if self.job["evaluation"] else []
        measured = [name for r in self.rounds for name in r.get("metrics", ())]
        return [name for name in dict.fromkeys([*main, *measured]) if name in measured]

    @property
    def definitions(self) -> Mapping[str, str]:
        """What each metric of the last evaluation is, by its name."""
        return self.job["evaluation"]["definitions"] if self.job["evaluation"] else {}

    @cached_property
    def losses(self) -> list[tuple[float, float]]:
        """Each loss, with its place counted in rounds."""
        return [
            (r["round"] - 1 + (index + 1) / len(losses), loss)
            for r in self.rounds
            if (losses := r.get("losses"))
            for index, loss in enumerate(losses)
            if loss is not None
        ]

    def curve(self, key: str, inner: str = "") -> tuple[list[float], list[float]]:
        """Returns the numbers of the rounds that have a value, and the values.

        Args:
            key: Of a round.
            inner: Of what the round has under `key`, if that is no number.
        """
        values = {
            each["round"]: (each.get(key) or {}).get(inner) if inner else each.get(key)
            for each in self.rounds
        }
        known = {number: value for number, value in values.items() if value is not None}
        return list(known), list(known.values())


def parts_of(round_: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of each part of a round in the cluster that took longest, and of what else it took.

    It is empty if nothing was measured.
    """
    measured = [cluster["phases"] for cluster in round_.get("clusters", ()) if "phases" in cluster]
    if not measured or round_.get("seconds") is None:
        return {}
    slowest = max(measured, key=lambda phases: sum(phases.values()))
    parts = {words: slowest[name] for name, words in PARTS.items()}
    return {**parts, "other": max(0.0, round_["seconds"] - sum(parts.values()))}


def write_job_report(
    path: Path, records: JobRecords, plots: Sequence["Plot"], command: str
) -> None:
    """Writes the page.

    Args:
        command: What writes it again.

    Raises:
        InvalidInputError: The file cannot be written.
    """
    job, rounds = records.job, records.rounds
    missing = page.tag("p", "No round is committed yet.", kind="quiet")
    sampled = ""
    if records.every > 1:
        sampled = f"The job is long, so the report has one of {records.every} rounds."
    page.write_page(
        path,
        f"Job {job['name']}",
        page.tag("p", _lead(records)),
        page.section("Summary", _facts(records, command)),
        page.section("Trouble", page.items(job["trouble"])) if job["trouble"] else "",
        page.section("Curves", page.tag("div", *(plot.html() for plot in plots), kind="plots"))
        if plots
        else "",
        page.section("Rounds", *(_rounds(records, sampled) if rounds else [missing])),
        page.section("Devices and plan", *_plan(rounds)) if rounds else "",
        page.section("History of plans", *_history(rounds)) if rounds else "",
        page.section("Costs", *_costs(records, sampled)) if rounds else "",
        page.section("Events", _events(job)),
        page.section(
            "Settings", page.folded("The whole job file, with its defaults", _settings(job))
        ),
    )


def _lead(records: JobRecords) -> page.Html:
    job = records.job
    evaluation = job["evaluation"]
    said = [
        page.tag("b", job["state"].capitalize()),
        f": {job['committed']} of {job['rounds']} rounds",
    ]
    if job["submitted"] and job["ended"]:
        said.append(f", {say_duration(job['ended'] - job['submitted'])} in all")
    if evaluation:
        value = page.tag("b", f"{evaluation['value']:.4g}")
        said += [
            f". Its {evaluation['metric']} is ",
            value,
            f" on {evaluation['rows']} held-out rows",
        ]
    return page.join(*said, ".", f" {job['message']}" if job["message"] else "")


def _facts(records: JobRecords, command: str) -> page.Html:
    job, settings = records.job, records.job["settings"]
    training, data, model = settings["training"], settings["data"], settings["model"]
    evaluation = job["evaluation"]
    measured = ""
    if evaluation:
        rows = f" on {evaluation['rows']} held-out rows, after round {evaluation['round']}"
        values = [
            page.join(", " * (index > 0), f"{name} ", page.amount(value, digits=4))
            for index, (name, value) in enumerate(evaluation["metrics"].items())
        ]
        measured = page.join(*values, rows)
    files = [str(data[key]) for key in ("train", "held_out") if data.get(key)]
    pretrained = model.get("pretrained")
    num_clusters = max((r.get("num_clusters", 0) for r in records.rounds), default=0)
    return page.facts(
        [
            ("job", job["id"]),
            ("owner", job["owner"]),
            ("submitted", _moment(job["submitted"])),
            ("ended", _moment(job["ended"])),
            ("written", _moment(job["written"])),
            ("result", measured),
            *records.definitions.items(),
            ("task", settings["task"]["kind"]),
            ("data", ", held out: ".join(files) or str(data.get("source", ""))),
            ("model", f"{model['family']}, {pretrained or 'from random weights'}"),
            (
                "a round",
                f"{training['local_steps']} steps of {training['mini_batch']} rows in each cluster",
            ),
            ("clusters", num_clusters or ""),
            ("strategy", job["strategy"]),
            ("seed", settings["seed"]),
            ("command", page.tag("code", command)),
            ("CollaPipe", version("collapipe")),
        ]
    )


def _rounds(records: JobRecords, sampled: str) -> Iterator[page.Html]:
    titles = ["round", "took, s", "without evaluation, s", "predicted, s"]
    titles += [f"{part}, s" for part in PARTS.values()]
    titles += ["other, s", "last loss", *records.metrics, "samples/s", "pushed, MB", "fetched, MB"]
    rows = []
    for each in records.rounds:
        parts = parts_of(each) or {}
        attempt = each.get("attempt", 0)
        late = each.get("late")
        notes = f" (attempt {attempt + 1})" * bool(attempt)
        notes += f" (without clusters {', '.join(map(str, late))})" if late else ""
        losses = [loss for loss in each.get("losses", ()) if loss is not None]
        seconds = "seconds", "seconds_without_evaluation", "predicted_seconds"
        values = [each.get(name) for name in seconds]
        values += [parts.get(name) for name in (*PARTS.values(), "other")]
        cells = [page.amount(value) for value in values]
        cells.append(page.amount(losses[-1] if losses else None, digits=4))
        cells += [page.amount(each.get("metrics", {}).get(m), digits=4) for m in records.metrics]
        cells.append(page.amount(each.get("samples_per_second")))
        cells += [page.amount(each.get(f"{way}_bytes"), 1e-6) for way in ("pushed", "fetched")]
        rows.append([f"{each['round']}{notes}", *cells])
    caption = f"Parts are those of the cluster that took longest{_of_first(records)}. {sampled}"
    whole = page.table(titles, rows, caption)
    yield whole if len(rows) <= _MOST_ROWS else page.folded(f"All {len(rows)} rounds", whole)


def _of_first(records: JobRecords) -> str:
    """Says that records tell of some clusters only; "" if they tell of all."""
    told = max(records.rounds, key=lambda each: each.get("num_clusters", 0), default={})
    num_told = len(told.get("clusters", ()))
    return f", of the first {num_told} clusters" if num_told < told.get("num_clusters", 0) else ""


def _plan(rounds: Sequence[Mapping[str, Any]]) -> Iterator[page.Html]:
    """Tells who held what in the last round."""
    last = rounds[-1]
    rows = []
    for cluster in last.get("clusters", ()):
        links = {link["from"]: link for link in cluster["links"]}
        for host in cluster["pipeline"]:
            name = host["id"]
            link = links.get(name)
            words = ""
            if link:
                limit = link["limit_bps"]
                words = f"{link['codec']} to {link['to']}"
                words += f", at most {say_mbit(limit)} Mbit/s" if limit else ""
            busy = cluster.get("busy", {}).get(name)
            rows.append(
                [
                    name,
                    page.amount(cluster["cluster"]),
                    host["units"],
                    page.amount(busy, 100),
                    page.amount(cluster["needs_bytes"].get(name), 1e-6),
                    words,
                ]
            )
    titles = ["host", "cluster", "holds", "busy, %", "memory, MB", "sends activations"]
    caption = (
        f"Round {last['round']}. Busy is the share of the training in which the host computed. Memory is what the plan "
        "expects for its units."
    )
    yield page.table(titles, rows, caption)
    hidden = last.get("num_clusters", 0) - len(last.get("clusters", ()))
    if hidden > 0:
        yield page.tag("p", f"{hidden} more clusters are left out.", kind="quiet")
    if last.get("why"):
        yield page.folded("Why the scheduler decided so", page.items(last["why"]))


def _history(rounds: Sequence[Mapping[str, Any]]) -> Iterator[page.Html]:
    """Tells which rounds had new plans, and why."""
    rows, before = [], dict[str, str]()
    for each in rounds:
        if "holders" not in each:
            continue  # Its plan is not recorded.
        holders = {host: units for plan in each.get("holders", ()) for host, units in plan}
        changed = [
            f"{host}: {before.get(host, 'nothing')} → {holders.get(host, 'nothing')}"
            for host in dict.fromkeys([*before, *holders])
            if before.get(host) != holders.get(host)
        ]
        if not before:
            changed = [f"{host}: {units}" for host, units in holders.items()]
        if changed:
            reasons = each.get("why", ())
            why = page.folded("Why", page.items(reasons)) if reasons else page.Html()
            rows.append((each["round"], page.items(changed), why))
        before = holders or before
    for number, changed_items, why in rows:
        yield page.join(page.tag("h3", f"Round {number}"), changed_items, why)
    kept = len(rounds) - len(rows)
    if kept:
        yield page.tag("p", f"The other {kept} rounds kept the plan.", kind="quiet")


def _costs(records: JobRecords, sampled: str) -> Iterator[page.Html]:
    job, rounds, every = records.job, records.rounds, records.every
    computing: dict[str, float] = defaultdict(float)
    for each in rounds:
        for cluster in each.get("clusters", ()):
            for host, seconds in cluster.get("computing_seconds", {}).items():
                computing[host] += every * (seconds or 0.0)
    took = every * sum(each.get("seconds") or 0.0 for each in rounds)
    joules = every * sum(each.get("energy_joules") or 0.0 for each in rounds)
    pushed, fetched = (
        every * sum(each.get(f"{way}_bytes") or 0 for each in rounds)
        for way in ("pushed", "fetched")
    )

    def say(value: float, scale: float, unit: str) -> page.Html:
        return page.join("about " if every > 1 else "", page.amount(value, scale, unit=unit))

    yield page.facts(
        [
            # What was trained in vain is not recorded.
            ("time of all rounds, repeated ones once", say(took, 1.0, "s")),
            ("weights pushed", say(pushed, 1e-6, "MB")),
            ("weights fetched", say(fetched, 1e-6, "MB")),
            ("predicted energy", say(joules, 1.0, "J") if joules else ""),
            (
                "disk of the edge server",
                page.amount(job["stored_bytes"], 1e-6, unit="MB") if job["stored_bytes"] else "",
            ),
        ]
    )
    caption = f"Forward and backward passes of all rounds{_of_first(records)}, beside the time of all rounds. {sampled}"
    caption += " The sums over all rounds are estimated from these." if sampled else ""
    rows = [
        [host, page.amount(seconds), page.amount(seconds / took if took else None, 100)]
        for host, seconds in computing.items()
    ]
    yield page.table(["host", "computed, s", "of all rounds, %"], rows, caption)


def _events(job: Mapping[str, Any]) -> page.Html:
    if job["events"] is None:
        words = "No events are stored: an older version ran this job, or its scheduler was killed."
        return page.tag("p", words, kind="quiet")
    rows = [[_moment(each["at"]), each["text"]] for each in job["events"]]
    words = "The last events. Of ordinary rounds and evaluations, only the last ones are kept."
    return page.table(["time", "event"], rows, words)


def _settings(job: Mapping[str, Any]) -> page.Html:
    return page.tag("pre", json.dumps(job["settings"], indent=2, ensure_ascii=False))


def _moment(unix_seconds: float | None) -> str:
    """Writes a moment in the time of this machine; "" for none."""
    if not unix_seconds:
        return ""
    return datetime.fromtimestamp(unix_seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
