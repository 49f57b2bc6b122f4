"""Writes the pages of docs/ that are made from code and records: settings.md, alerts.md, campaign.md and job-life.md.

    python docs/generate.py

A test fails when a page is not what this program writes.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from collapipe.authority.app import AuthoritySettings
from collapipe.control_unit.app import ControlUnitSettings
from collapipe.device_agent.app import DeviceAgentSettings
from collapipe.edge_server.app import EdgeServerSettings
from collapipe.emulation.emulation_file import Emulation
from collapipe.job import JobConfig
from collapipe.job_life import attempt, attempt_events, job_run
from collapipe.scheduler.app import SchedulerSettings
from collapipe.service_process import ServiceSettings
from collapipe.simulation.scenario import Scenario
from collapipe.stage_host import StageHostSettings

_DOCS = Path(__file__).parent
_ALERTS = _DOCS.parent / "deploy" / "prometheus" / "rules" / "alerts.yml"
_RECORDS = _DOCS / "campaign.json"
_VALUE = re.compile(r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}")
"""A value that Prometheus puts into the text of an alert."""
_ORIGIN = "<!-- Written by docs/generate.py. Edit what it reads, and run it again. -->\n\n"


def settings_page() -> str:
    """Returns the page of all settings, from the schemas that validate them."""
    parts = [
        "# Settings\n",
        "Every setting, from the schemas that validate them. An unknown key is refused.\n",
        "## Jobs\n\nA job is a TOML file. `--set section.key=value` changes one setting on the command line. The error about an unknown key names the "
        "nearest known one.\n",
        *_sections(JobConfig, "Job"),
        "## Services\n\nA service takes flags (`--listen`), then variables of the environment (`COLLAPIPE_LISTEN`), then the "
        "TOML file named by `--config`.\n",
    ]
    services: list[tuple[str, type[BaseModel], type[BaseModel] | None]] = [
        ("Every service", ServiceSettings, None),
        (
            "Every stage host: device agent, control unit, edge server",
            StageHostSettings,
            ServiceSettings,
        ),
        ("Device agent", DeviceAgentSettings, StageHostSettings),
        ("Control unit", ControlUnitSettings, StageHostSettings),
        ("Edge server", EdgeServerSettings, StageHostSettings),
        ("Scheduler", SchedulerSettings, ServiceSettings),
        ("Authority", AuthoritySettings, ServiceSettings),
    ]
    for title, schema, inherited in services:
        known = set(inherited.model_fields) if inherited else set()
        known -= set(inspect.get_annotations(schema))  # It may define a setting anew.
        parts.append(f"### {title}\n\n{_table(schema, known, flags=True)}\n")
    parts += [
        "## Emulation files\n\nA JSON file, given by `--emulation`.\n",
        *_sections(Emulation, "Emulation"),
        "## Scenarios of `collapipe simulate`\n\nA TOML file. Its key `base` names another scenario file in the same folder, without `.toml`. Values of the file "
        "replace those of its base: tables are merged key by key, and lists are replaced. Without a `name`, a scenario has the name of its file.\n",
        *_sections(Scenario, "Scenario"),
    ]
    return _ORIGIN + "\n".join(parts)


def alerts_page() -> str:
    """Returns the page of all alerts, from Prometheus' rules."""
    lines = ["# Alerts\n"]
    for group in yaml.safe_load(_ALERTS.read_text("utf-8"))["groups"]:
        for rule in group["rules"]:
            notes = rule["annotations"]
            lines.append(f"## {rule['alert']}\n")
            lines.append(
                f"Severity: {rule['labels']['severity']}. Fires after: {rule.get('for', '0s')}.\n"
            )
            for key in ("summary", "description", "action"):
                text = _VALUE.sub(r"*\1*", notes[key])
                lines.append(f"- **{key.capitalize()}:** {text}")
            lines.append("")
    return _ORIGIN + "\n".join(lines)


def campaign_page() -> str:
    """Returns the page of the last campaign, from the records that benchmarks/campaign.py has written."""
    lines = [
        "# The last campaign\n",
        "`make campaign` runs the checks that take hours. The table has the last run of each part. A part without a row has not run yet.\n",
        "| part | ended | commit | took | result | command |",
        "|---|---|---|---|---|---|",
    ]
    for name, record in json.loads(_RECORDS.read_text("utf-8")).items():
        result = "passed" if record["exit_status"] == 0 else f"failed ({record['exit_status']})"
        said = "<br>".join(record["closing_lines"]).replace("|", "\\|")
        cells = (
            name,
            record["ended_at"][:10],
            f"`{record['commit'][:8]}`",
            f"{record['seconds']:.0f} s",
            f"{result}: {said}",
            f"`python {record['command']}`",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return _ORIGIN + "\n".join(lines) + "\n"


_JOB_LIFE = """\
# The life of a job

A job runs rounds until all are committed ([Concepts](concepts.md) explains the words). What happens in a round, and what follows when an attempt fails, is decided by functions of plain data. Most are in `services/collapipe/job_life/`. Nothing there uses a clock, a file, a network or a thread.

## Who decides what

| question | answer |
|---|---|
| What does a job do next, and what follows a failed attempt? | `step` in `job_run.py` takes the state, what was observed, and the time. It returns the new state and what is to be done. `tries.py` has the limits |
| What happens in the rounds of an attempt? | `step` in `attempt.py`, in the same way |
| From which commit does an attempt go on, and which results of the attempt before can it use? | `where_to_begin`, `usable` and `can_catch_up` in `commits.py` |
| Which devices take part? | `choose` in `job_devices.py`, with a reason for each one that does not |
| Do the stages of a cluster make progress? | `stage_progress.py`, for the control unit |
| Which failure explains why a cluster failed? | `failure_cause.py`, for the control unit |
| Which clusters are late, or left out? | `round_clusters.py` and `failing_clusters.py` |
| How does a commit follow the one before? | `services/collapipe/edge_server/commits.py` |

`JobRunner` and `RoundRunner` in the scheduler carry out what the two functions `step` decide. A job does one thing after the other, so `JobRunner` is a loop: it does what was decided, and passes on what came of it. Before each round, it also asks `job_devices.py` which devices take part.

In a round, much happens at once. There, the thread of the job takes one event after the other from a queue, and does what was decided. The calls to clusters run in threads of their own. They only add events, and never change the state that `step` reads.

What must survive a loss of power is stored first:

- Before any cluster trains, the scheduler counts the round in the privacy account.
- Before the commit, it stores which clusters are averaged, and how many mini-batches those trained that ended early.

A phase is what a job or an attempt is doing. An event is what was observed, and an action is what is to be done. Each case below has a phase and an event. Any other event in a phase is a bug, and raises an error. Any action can fail. For a job, the lines name only the answer of one that succeeds.
"""

_IMITATED = """
## How this is tested

`tests/disturbed_jobs/` imitates whole jobs in simulated time, with the same functions and those of the edge server. Devices die, restart, lie and get lost. Control units are slow, fail or compute differently. The edge server forgets what was pushed, the disk of the scheduler is full, and the scheduler loses power between any two writes. A seed determines everything that happens. These promises are checked while each job runs:

1. An attempt commits a round once, and each commit follows the one before it.
2. A job ends or commits within the longer of `schedule.wait_for_hosts_seconds` and `schedule.retry_seconds`, and another `schedule.retry_seconds` and 100 s. Late clusters stop within 3 s.
3. After a loss of power, the job goes on, and no result of a round is lost.
4. A repeated round has the same result as before, unless it got another plan, left out a further cluster, or a host computed differently.
5. A result of an earlier attempt is committed only if it was kept. A cluster with a kept result does not run the round again.
6. No cluster trains before the privacy account has counted the round. The keys that remove the masks of a round are revealed for one set of clusters only.
7. The optimizer states of the restore point exist somewhere.
8. What a job remembers of devices stays bounded.

`make test` runs 2,000 such jobs, `.ci/run` 20,000, and the campaign a million. `python -m benchmarks.disturbed_jobs --story SEED` tells what happens in one of them. With `--mutations`, the command puts each fault of `tests/disturbed_jobs/mutations.yaml` into the code, and prints the first seed whose job breaks a promise.
The imitated jobs replace `JobRunner` and `RoundRunner` by code of their own, which may differ from these two classes. So `tests/faults/` also kills real processes. `test_deaths.py` lets each of three services die at two of its writes, and the campaign at each of their writes.
"""


def job_life_page() -> str:
    """Returns the page about the life of a job, with the cases of the machine."""
    lines = [
        "\n## The job\n",
        *_machine(job_run.TRANSITIONS, get_args(job_run.Action)),
        "\n## The rounds of an attempt\n",
        *_machine(attempt.TRANSITIONS, get_args(attempt_events.Action)),
    ]
    return _ORIGIN + _JOB_LIFE + "\n".join(lines) + "\n" + _IMITATED


def _machine(transitions: Mapping[tuple[Any, type], Any], actions: Iterable[type]) -> Iterator[str]:
    """Yields the lines of the tables of a machine: its cases, and what it decides to do."""
    yield "| phase | what is observed | what may follow |\n|---|---|---|"
    for (phase, event), case in transitions.items():
        following = "; ".join(sorted(to.value for to in case.to))
        yield f"| {phase.value} | {_summary(event)} | {following} |"
    yield "\n| action | meaning |\n|---|---|"
    for action in actions:
        yield f"| `{action.__name__}` | {_summary(action)} |"


def _summary(described: type) -> str:
    """Returns the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(described) or "").split("\n\n")[0].split())


def _sections(schema: type[BaseModel], document: str, prefix: str = "") -> Iterator[str]:
    """Yields a table of a schema's own settings, then the tables of the schemas within it."""
    name = f"`[{prefix.removesuffix('.')}]`" if prefix else "top level"
    yield f"### {document}: {name}\n\n{inspect.getdoc(schema)}\n\n{_table(schema)}\n"
    for key, field in schema.model_fields.items():
        is_mapping = get_origin(field.annotation) is dict
        for inner in _schemas_in(field.annotation):
            yield from _sections(inner, document, f"{prefix}{key}.{'NAME.' if is_mapping else ''}")


def _table(schema: type[BaseModel], without: set[str] | None = None, flags: bool = False) -> str:
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    # The settings of the schema itself come first, because those that it inherits are less specific.
    keys = sorted(schema.model_fields, key=lambda key: key not in schema.__annotations__)
    for key in keys:
        field = schema.model_fields[key]
        if key in (without or ()) or _schemas_in(field.annotation):
            continue
        name = f"--{key.replace('_', '-')}" if flags else key
        default = "required" if field.is_required() else f"`{_default(field)}`"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        if values := _values(field.annotation):
            meaning += f" One of {', '.join(f'`{value}`' for value in values)}."
        rows.append(f"| `{name}` | {default} | {meaning.strip()} |")
    return "\n".join(rows)


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return "not set"
    return json.dumps(value, default=str)


def _values(annotation: Any) -> tuple[Any, ...]:
    """Returns the values that a setting may have, if they are listed in its type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    values = tuple(value for part in get_args(annotation) for value in _values(part))
    return ("true", "false", *values) if values and bool in get_args(annotation) else values


def _schemas_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [schema for part in get_args(annotation) for schema in _schemas_in(part)]


PAGES = {
    "settings.md": settings_page,
    "alerts.md": alerts_page,
    "campaign.md": campaign_page,
    "job-life.md": job_life_page,
}
"""The generated pages, by their names in docs/."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        (_DOCS / name).write_text(page(), "utf-8")
