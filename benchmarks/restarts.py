"""How many seconds does a job lose when one service is killed in one phase of a round, and started again at once?

    python -m benchmarks.restarts --repeats 3
    python -m benchmarks.restarts --services scheduler --phases plan commit

Every process runs on this machine, over loopback. A job has three rounds, and the process is killed in the second one. The
moment is an event of the job, or a file that a service has stored. A job that is not resumed must end with the bits of the
undisturbed one.

The lost seconds are counted from the last commit before the kill to the last commit of the job. The own time of each round that
was committed for the first time in between is subtracted. So they contain the interrupted attempt, the start of the process, which imports
torch, and repeated rounds. A round that can still be committed after the kill loses nothing, but the next one may.

Prints one JSON object for each service and phase, and then a table in Markdown. The exit status is 1 if a job did not end with
equal bits.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recovery import ROOT, summary

sys.path.insert(0, str(ROOT / "tests"))

from faults.interrupted import (
    MOMENTS,
    PATIENT_SECONDS,
    SERVICES,
    Run,
    judge_interrupted,
    make_interruptible_job,
    mend,
    undisturbed_digests,
)
from killed_processes import kill, restart

from collapipe_client import LocalTestbed

PHASES = {
    "plan": "plan",
    "configure": "configure",
    "evaluate": "evaluate",
    "train": "step",
    "gather": "gather",
    "commit": "commit",
    "copy": "copy",
}
"""The moment of each phase. The optimizer states are copied beside the training."""

_LIMIT_SECONDS = 300.0
_HELD_OUT_ROWS = 1500
"""So many that an evaluation takes longer than the second after which progress is reported."""


def disturb(
    testbed: LocalTestbed, service: str, phase: str, undisturbed: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Runs a job, and kills and restarts one service in one phase. Returns its outcome and the lost seconds."""
    folder.mkdir()
    evaluation: dict[str, Any] = {}
    if phase == "evaluate":
        evaluation = {"training": {"evaluate_every": 1}, "num_held_out": _HELD_OUT_ROWS}
    run = Run(
        make_interruptible_job(folder, PATIENT_SECONDS, **evaluation), testbed.workspace.state
    )
    kills: list[int] = []

    def kill_and_restart(run: Run) -> None:
        kills.append(len(run.commits))
        victim = SERVICES[service](run)
        kill(testbed, victim)
        restart(testbed, victim)

    moment = MOMENTS[PHASES[phase]]
    outcome = judge_interrupted(testbed, run, undisturbed, moment, kill_and_restart, _LIMIT_SECONDS)
    mend(testbed, run)
    if not kills:
        return {"outcome": f"the phase did not come: {outcome}"}
    before, after = run.commits[: kills[0]], run.commits[kills[0] :]
    new: dict[int, float] = {}
    for _, commit in after:
        if commit.num_rounds > before[-1][1].num_rounds:
            new.setdefault(commit.num_rounds, commit.round_seconds)
    seconds = run.commits[-1][0] - before[-1][0] - sum(new.values())
    return {"outcome": outcome, "lost": seconds}


def summarise(service: str, phase: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the line of a service and a phase."""
    good = [result for result in results if result["outcome"] == "equal" and "lost" in result]
    line: dict[str, Any] = {
        "service": service,
        "phase": phase,
        "kills": len(results),
        "equal": len(good),
    }
    if good:
        line |= summary("lost", [result["lost"] for result in good])
    if len(good) < len(results):
        line["outcomes"] = [result["outcome"] for result in results]
    return line


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown: a row for each phase, and a column for each service."""
    services = list(dict.fromkeys(line["service"] for line in lines))
    rows = [["killed in", *services], ["---"] * (len(services) + 1)]
    for phase in dict.fromkeys(line["phase"] for line in lines):
        cells = [_cell(line) for line in lines if line["phase"] == phase]
        rows.append([phase, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(line: dict[str, Any]) -> str:
    if line["equal"] < line["kills"]:
        return f"{line['equal']} of {line['kills']} equal"
    return f"{line['lost_median']:.1f} ({line['lost_worst']:.1f})"


def main() -> None:
    """Kills every service in every phase."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="kills of each service and phase")
    parser.add_argument("--services", nargs="+", choices=SERVICES, default=list(SERVICES))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with LocalTestbed([3, 1], folder / "testbed") as testbed:
            testbed.wait_until_registered()
            undisturbed = undisturbed_digests(testbed, folder)
            for phase in options.phases:
                for service in options.services:
                    results = []
                    for repeat in range(options.repeats):
                        data = folder / f"{service}-{phase}-{repeat}".replace(" ", "-")
                        results.append(disturb(testbed, service, phase, undisturbed, data))
                    lines.append(summarise(service, phase, results))
                    print(json.dumps(lines[-1]), flush=True)
    print("\nSeconds lost, median (worst):\n")
    print(table(lines))
    sys.exit(any(line["equal"] < line["kills"] for line in lines))


if __name__ == "__main__":
    main()
