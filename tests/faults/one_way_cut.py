"""Runs a job while one device cannot send to one other device, and checks how the job goes on.

Needs root: every service has a network namespace of its own. The exit status is 0 if all is as expected.
"""

import itertools
import tempfile
import time
from pathlib import Path

from benchmarks.namespaced_testbed import NamespacedTestbed, isolate
from reference.tiny_jobs import make_job

from collapipe.v1.plan_pb2 import Plan
from faults.interrupted import Run, run_interrupted

_CUT = ("device-0-0", "device-0-1")
_LIMIT_SECONDS = 240.0


def neighbours(plan: Plan) -> set[tuple[str, str]]:
    """Returns the pairs of hosts of neighbouring stages, in the order of the pipeline."""
    ids = [stage.host_id for stage in plan.stages]
    return set(itertools.pairwise(ids))


def main() -> None:
    isolate("faults.one_way_cut")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = make_job(
            folder,
            num_blocks=6,
            devices_per_cluster=3,
            training={"rounds": 100_000, "local_steps": 10},
            schedule={"strategy": "dssra", "silence_seconds": 5, "hysteresis": 1.0},
        )
        with NamespacedTestbed([3], folder / "testbed") as testbed:
            testbed.wait_until_registered()
            plans: list[Plan] = []

            def cut(run: Run) -> None:
                testbed.cut(*_CUT)
                deadline = time.monotonic() + _LIMIT_SECONDS
                while time.monotonic() < deadline and not run.ended:
                    time.sleep(0.2)
                    if len(run.attempts) < 2:
                        continue
                    plan = run.plans[0]
                    if not plans or plan != plans[-1]:
                        plans.append(plan)
                        print([stage.host_id for stage in plan.stages], flush=True)
                with testbed.client() as client:
                    client.cancel(run.job_id)

            run = run_interrupted(
                testbed, job, lambda run: run.round_index == 2, cut, limit_seconds=300
            )
            print(run.message, run.codes(), run.messages)


if __name__ == "__main__":
    main()
