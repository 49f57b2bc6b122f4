"""How much time a job loses when a device is killed: from the kill to the next commit, less that round's own time.

    python -m benchmarks.recovery --devices 3 --clusters 1 --kills 20

Every process runs on this machine, over loopback. A device of cluster 0 is killed in the middle of a round, and started again after the
next commit. Detection is the time from the kill to the first status message that names the device. If rounds are repeated,
the next commit is that of the first repeated round.

Prints one JSON object: medians and worst values, in seconds.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from killed_processes import kill, restart  # noqa: E402
from reference.tiny_jobs import make_job  # noqa: E402

from collapipe_client import LocalTestbed  # noqa: E402

_ROUNDS_BETWEEN = 3
"""Commits between the return of a device and the next kill."""


@dataclass
class Kill:
    """One kill and what followed. Times are those of this process, in seconds."""

    at: float
    noticed_at: float = 0.0
    detection_seconds: float = 0.0
    recovery_seconds: float = 0.0


def main() -> None:
    """Kills devices of one job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=3, help="devices of each cluster")
    parser.add_argument("--clusters", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    draw = random.Random(0)
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = [options.devices] * options.clusters
        with LocalTestbed(shape, folder / "testbed") as testbed, testbed.client() as client:
            testbed.wait_until_registered()
            job = make_job(
                folder,
                num_blocks=options.devices,
                num_rows=[64] * options.clusters,
                devices_per_cluster=options.devices,
                model_config={"hidden_size": 64, "intermediate_size": 256},
                training={
                    "rounds": 100000,
                    "local_steps": 8,
                    "replicate_every": 1,
                    "evaluate_every": 0,
                },
            )
            job_id = client.submit(job)
            victim, num_since, restarting = "", 0, threading.Thread()
            for event in client.watch(job_id):
                now = time.monotonic()
                kind = event.WhichOneof("event")
                if kind == "status" and victim and victim in event.status.message:
                    kills[-1].noticed_at = kills[-1].noticed_at or now
                if kind == "round_started" and not victim and not restarting.is_alive():
                    num_since += 1
                    if num_since > _ROUNDS_BETWEEN:
                        stage = draw.choice(event.round_started.plans[0].stages[1:-1])
                        time.sleep(draw.uniform(0.1, 0.6))
                        victim, num_since = stage.host_id, 0
                        kills.append(Kill(time.monotonic()))
                        kill(testbed, victim)
                if kind == "round_committed" and victim and kills[-1].noticed_at:
                    last = kills[-1]
                    last.detection_seconds = last.noticed_at - last.at
                    last.recovery_seconds = now - last.at - event.round_committed.round_seconds
                    if len(kills) == options.kills:
                        client.cancel(job_id)
                        continue
                    restarting = threading.Thread(target=restart, args=(testbed, victim))
                    restarting.start()
                    victim = ""
    print(
        json.dumps(
            {
                "clusters": options.clusters,
                "devices": options.devices,
                "kills": len(kills),
                **summary("detection", [k.detection_seconds for k in kills]),
                **summary("recovery", [k.recovery_seconds for k in kills]),
                **summary(
                    "beyond_detection", [k.recovery_seconds - k.detection_seconds for k in kills]
                ),
            }
        )
    )


def summary(name: str, seconds: list[float]) -> dict[str, float]:
    """Returns the median and the worst value under keys that begin with a name."""
    return {
        f"{name}_median": round(statistics.median(seconds), 2),
        f"{name}_worst": round(max(seconds), 2),
    }


if __name__ == "__main__":
    main()
