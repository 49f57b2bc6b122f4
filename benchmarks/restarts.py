"""How many seconds does a job lose when one service is killed in one phase of a round, and started again at once?

    python -m benchmarks.restarts --repeats 3
    python -m benchmarks.restarts --services scheduler --phases plan commit
    python -m benchmarks.restarts --kills 300 --results kills.jsonl   kills at random moments; goes on where an earlier call stopped
    python -m benchmarks.restarts --kills 1 --first-seed 17           repeats the job of one seed

Every process runs on this machine, over loopback. A job has three rounds, and the process is killed in the second one. The
moment is an event of the job, or a file that a service has stored. A job that is not resumed must end with the bits of the
undisturbed one.

The lost seconds are counted from the last commit before the kill to the last commit of the job. The own time of each round that
was committed for the first time in between is subtracted. So they contain the interrupted attempt, the start of the process, which imports
torch, and repeated rounds. A round that can still be committed after the kill loses nothing, but the next one may.

Prints one JSON object for each service and phase, and then a table in Markdown. The exit status is 1 if a job did not end with
equal bits.

With `--kills`, it asks whether jobs end with equal bits that are killed again and again, and measures no time. The seed of a job chooses the
distance of its restore points, the victims and the waits between the kills: in every other job, they are 2 to 5 s. The
exit status then is 1 if any job, old or new, did not end with equal bits.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
_RANDOM_LIMIT_SECONDS = 1200.0
_RANDOM_TRAINING = {"rounds": 16}
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


@dataclass(frozen=True)
class Kills:
    """The kills of one job.

    Args:
        is_frequent: Whether a kill comes every 2 to 5 s.
        kills: The seconds to wait after the kill before, and the victim.
    """

    replicate_every: int
    is_frequent: bool
    kills: Sequence[tuple[float, str]]


def choose_kills(seed: int, names: Sequence[str]) -> Kills:
    """Returns the kills of a seed."""
    draw = random.Random(f"kills {seed}")
    is_frequent = bool(seed % 2)
    shortest, longest, number = (2.0, 5.0, 16) if is_frequent else (0.0, 12.0, 4)
    kills = [(round(draw.uniform(shortest, longest), 2), draw.choice(names)) for _ in range(number)]
    return Kills(draw.choice((1, 10)), is_frequent, kills)


def run_seed(
    testbed: LocalTestbed, seed: int, undisturbed: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Runs a job with the kills of a seed, and returns what happened. A killed process is started again at once."""
    folder.mkdir()
    chosen = choose_kills(seed, sorted(process.name for process in testbed.processes))
    training = {**_RANDOM_TRAINING, "replicate_every": chosen.replicate_every}
    job = make_interruptible_job(folder, PATIENT_SECONDS, name=f"kills-{seed}", training=training)
    run = Run(job, testbed.workspace.state)
    victims: list[str] = []

    def kill_all(run: Run) -> None:
        at = time.monotonic()
        for wait, victim in chosen.kills:
            at = max(at + wait, time.monotonic())
            while time.monotonic() < at and not run.ended:
                time.sleep(0.01)
            if run.ended or run.final_state:
                return
            kill(testbed, victim)
            victims.append(victim)
            restart(testbed, victim)

    started = time.monotonic()
    outcome = judge_interrupted(
        testbed, run, undisturbed, lambda run: True, kill_all, _RANDOM_LIMIT_SECONDS
    )
    seconds = time.monotonic() - started
    mend(testbed, run)
    return {
        "seed": seed,
        "outcome": outcome,
        "replicate_every": chosen.replicate_every,
        "is_frequent": chosen.is_frequent,
        "kills": len(victims),
        "victims": victims,
        "seconds": round(seconds, 1),
        "attempts": len(run.attempts),
        "commits": len(run.commits),
        "incidents": [incident.message for incident in run.incidents],
    }


def kill_at_random(num_kills: int, first_seed: int, results: Path | None) -> int:
    """Runs seeds until there were so many kills, those of the file of results included. Returns an exit status."""
    done = []
    if results and results.exists():
        done = [json.loads(line) for line in results.read_text().splitlines()]
    seed = max([first_seed, *(each["seed"] + 1 for each in done)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with LocalTestbed([3, 1], folder / "testbed") as testbed:
            testbed.wait_until_registered()
            undisturbed = undisturbed_digests(testbed, folder, training=_RANDOM_TRAINING)
            while sum(each["kills"] for each in done) < num_kills:
                done.append(run_seed(testbed, seed, undisturbed, folder / f"seed-{seed}"))
                seed += 1
                shown = {key: value for key, value in done[-1].items() if key != "incidents"}
                print(json.dumps(shown), flush=True)
                if results:
                    with open(results, "a", encoding="utf-8") as file:
                        file.write(f"{json.dumps(done[-1])}\n")
    bad = [each for each in done if each["outcome"] != "equal"]
    frequent = sum(each["kills"] for each in done if each["is_frequent"])
    print(
        f"{sum(each['kills'] for each in done)} kills, {frequent} of them every 2 to 5 s, in {len(done)} jobs; {len(done) - len(bad)} "
        "ended with equal bits"
    )
    for each in bad:
        print(f"seed {each['seed']}: {each['outcome']}")
    return 1 if bad else 0


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
    parser.add_argument("--kills", type=int, help="kill so often at random moments instead")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file of results, one JSON object a line")
    options = parser.parse_args()
    if options.kills:
        sys.exit(kill_at_random(options.kills, options.first_seed, options.results))
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
