"""Runs the checks that take hours. Records the last run of each part, its commit, and whether it passed.

    make campaign                                        every part
    make campaign PARTS="chaos exactness"                some parts
    python -m benchmarks.campaign --check                refuses old and failed records, as `.ci/run` does

A part is a command. Its record has the commit, the time, the exit status and the last lines of the output. The records are in
docs/campaign.json and, to be read, in docs/campaign.md. A record is too old if what the part covers was changed
more than 30 days after it.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "campaign.json"
CODE = ("benchmarks", "clients", "protos", "services", "tests")
MOST_DAYS = 30
NUM_CLOSING_LINES = 3


@dataclass(frozen=True)
class Part:
    """A part of the campaign.

    Args:
        command: Arguments of Python.
        covers: Files and folders whose change makes a record old.
    """

    command: str
    covers: tuple[str, ...] = ("services/collapipe",)


@dataclass(frozen=True)
class Record:
    """The last run of a part."""

    commit: str
    ended_at: str
    """Time in UTC, as in ISO 8601."""
    seconds: float
    command: str
    exit_status: int
    closing_lines: list[str]


DECISIONS = (
    *("services/collapipe/job_life", "services/collapipe/edge_server/commits.py"),
    *("services/collapipe/scheduler/attempt_facts.py", "tests/disturbed_jobs"),
)
"""What imitated jobs run through."""
_PYTEST = "-m pytest --quiet --no-skips"
PARTS: Mapping[str, Part] = {
    "exactness": Part(f"{_PYTEST} --capture=no tests/campaign/test_exactness.py"),
    "examples": Part(
        f"{_PYTEST} --timeout 3600 -m hypothesis --hypothesis-profile campaign tests/unit"
    ),
    "disturbed jobs": Part("-m benchmarks.disturbed_jobs --seeds 1000000", DECISIONS),
    "mutations": Part("-m benchmarks.disturbed_jobs --mutations", DECISIONS),
    "chaos": Part("-m benchmarks.chaos --runs 200"),
    "kills": Part("-m benchmarks.restarts --kills 300"),
    "deaths": Part(f"{_PYTEST} --capture=no tests/campaign/test_deaths.py"),
    "fuzz": Part("-m benchmarks.fuzz --messages 1000000 --seconds 500"),
    "attacker": Part("-m benchmarks.attacker --rounds 1300"),
    "soak": Part("-m benchmarks.soak --rounds 2000 --jobs 50"),
    "load": Part(
        "-m benchmarks.load --hosts 1000 --seconds 1800", ("services/collapipe/scheduler",)
    ),
    "growth": Part(f"{_PYTEST} tests/campaign/test_growth.py"),
    "exports": Part(f"{_PYTEST} tests/campaign/test_exports.py"),
    "rates": Part(
        f"{_PYTEST} tests/campaign --ignore tests/campaign/test_exactness.py "
        "--ignore tests/campaign/test_growth.py --ignore tests/campaign/test_exports.py "
        "--ignore tests/campaign/test_deaths.py"
    ),
    "mutants": Part("-m benchmarks.mutants", ("services/collapipe", "clients", "tests")),
}
"""As root, with the packages of `.ci/run`: a test that is skipped fails."""


def read_records() -> dict[str, Record]:
    """Reads the last record of each part."""
    if not RECORDS.exists():
        return {}
    return {name: Record(**fields) for name, fields in json.loads(RECORDS.read_text()).items()}


def run_part(part: Part) -> Record:
    """Runs a part, and shows its output."""
    commit, began_at = git("rev-parse", "HEAD"), time.monotonic()
    closing: deque[str] = deque(maxlen=NUM_CLOSING_LINES)
    line = [sys.executable, *part.command.split()]
    with subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(text, end="", flush=True)
            if text.strip():
                closing.append(text.strip())
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    seconds = round(time.monotonic() - began_at)
    return Record(commit, now, seconds, part.command, process.returncode, list(closing))


def git(*arguments: str) -> str:
    """Runs git in the checkout, and returns what it prints."""
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def mistake(
    name: str, record: Record | None, changed_at: datetime, added_at: datetime
) -> str | None:
    """Returns why the record of a part is refused, or `None`.

    Args:
        record: The last record; `None` if the part has never run.
        changed_at: Time of the last commit that changed what the part covers.
        added_at: Time since which there is a campaign. A part that has never run counts from then on.
    """
    remedy = (
        f'run `make campaign PARTS="{name}"` and commit docs/campaign.json and docs/campaign.md'
    )
    if record is not None and record.exit_status:
        return f"part {name!r} ended with exit status {record.exit_status}: mend it, then {remedy}"
    if record is not None and record.command != PARTS[name].command:
        return f"the record of part {name!r} is of another command, {record.command!r}: {remedy}"
    ran_at = added_at if record is None else datetime.fromisoformat(record.ended_at)
    age = changed_at - ran_at
    if age > timedelta(days=MOST_DAYS):
        ran = "it last ran" if record else "the campaign was added, and it has never run"
        return (
            f"the files that part {name!r} covers were changed {age.days} days after {ran} "
            f"(limit: {MOST_DAYS} days): {remedy}"
        )
    return None


def check() -> int:
    """Prints each record that is refused, and returns an exit status."""
    if git("rev-parse", "--is-shallow-repository") == "true":
        print("the checkout is shallow, so the age of records is unknown: clone it without --depth")
        return 1
    records = read_records()
    added_at = _time_of(git("log", "--format=%ct", "--", "benchmarks/campaign.py").split()[-1])
    refused = []
    for name, part in PARTS.items():
        changed_at = _time_of(git("log", "-1", "--format=%ct", "--", *part.covers))
        if why := mistake(name, records.get(name), changed_at, added_at):
            refused.append(why)
        elif name not in records:
            print(f"part {name!r} has not run yet")
    print("\n".join(refused or [f"none of {len(PARTS)} parts has a record that is too old"]))
    return 1 if refused else 0


def _time_of(unix_seconds: str) -> datetime:
    return datetime.fromtimestamp(int(unix_seconds), timezone.utc)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="by default all")
    parser.add_argument("--check", action="store_true", help="only refuse old and failed records")
    options = parser.parse_args()
    if options.check:
        return check()
    if changed := git("status", "--porcelain", "--", *CODE):
        print(f"a record names a commit, but these files differ from it: commit them\n{changed}")
        return 1
    failed = []
    for name in options.parts or PARTS:
        print(f"=== {name}", flush=True)
        record = run_part(PARTS[name])
        records = read_records() | {name: record}
        text = json.dumps(
            {part: asdict(records[part]) for part in PARTS if part in records}, indent=2
        )
        RECORDS.write_text(text + "\n", encoding="utf-8")
        subprocess.run([sys.executable, "docs/generate.py"], cwd=ROOT, check=True)
        if record.exit_status:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
