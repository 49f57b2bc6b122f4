"""Measures the seconds from `collapipe train` to the end of the first step of the demo, by part.

    python -m benchmarks.start [--repeats 3] [--before FOLDER]

`--before` names a checkout of another version, which is measured alternately with this one. Both use this environment. Prints the
median of each part as JSON. "processor" counts the seconds of all processes until they have ended.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

_ENDS = {
    "testbed": '"event": "job"',
    "data": '"message": "making the model"',
    "model": '"event": "round_started"',
    "first step": '"steps_done": 1,',
}
"""What the output says when a part has ended."""


def main() -> None:
    """Measures one or two versions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    versions = {"now": Path(__file__).parents[1]}
    if options.before is not None:
        versions = {"before": options.before.absolute(), **versions}
    starts: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    for _ in range(options.repeats):
        for name, folder in versions.items():
            starts[name].append(_start(folder))
    medians = {
        name: {
            part: round(median(start[part] for start in all_starts), 1) for part in all_starts[0]
        }
        for name, all_starts in starts.items()
    }
    print(json.dumps(medians, indent=2))


def _start(checkout: Path) -> dict[str, float]:
    """Returns the seconds until each part has ended."""
    path = os.pathsep.join(str(checkout / part) for part in ("services", "clients"))
    command = [sys.executable, "-m", "collapipe_client", "train", "--preset", "demo", "--json"]
    used = os.times()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            for part, end in _ENDS.items():
                if end in line:
                    seconds.setdefault(part, time.monotonic() - began)
            if len(seconds) == len(_ENDS):
                process.terminate()
                break
        process.communicate()
    if len(seconds) < len(_ENDS):
        raise SystemExit(f"the job ended after {list(seconds)}, before its first step")
    ended = os.times()
    seconds["processor"] = sum(ended[2:4]) - sum(used[2:4])
    return seconds


if __name__ == "__main__":
    main()
