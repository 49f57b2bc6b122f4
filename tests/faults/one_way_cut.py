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
from collapipe_client import Device
from faults.interrupted import Run, run_interrupted

_DEVICES = {"device-0-0", "device-0-1", "device-0-2"}
_CUT = ("device-0-0", "device-0-1")
_LIMIT_SECONDS = 240.0
_MEMORY_BYTES = 2_400_000
"""Memory of each device. It holds two of the six blocks, so that no plan does without one of the devices."""


def are_neighbours(plan: Plan) -> bool:
    """Returns whether a plan uses the cut link."""
    ids = [stage.host_id for stage in plan.stages]
    return any(set(pair) == set(_CUT) for pair in itertools.pairwise(ids))


def main() -> None:
    isolate("faults.one_way_cut")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = make_job(
            folder,
            num_blocks=6,
            model_config={"hidden_size": 64, "intermediate_size": 256},
            devices_per_cluster=3,
            training={"rounds": 100_000, "local_steps": 10},
            # Plans change often, so that blocks also move over the cut link.
            schedule={"strategy": "dssra", "silence_seconds": 5, "hysteresis": 0.0},
        )
        devices = [Device(memory_bytes=_MEMORY_BYTES)] * 3
        with NamespacedTestbed([devices], folder / "testbed") as testbed:
            testbed.wait_until_registered()

            def cut_until_all_devices_work(run: Run) -> None:
                testbed.cut(*_CUT)
                deadline = time.monotonic() + _LIMIT_SECONDS
                try:
                    while not all_work_around_the_cut(run):
                        assert time.monotonic() < deadline and not run.ended, (
                            run.messages,
                            run.plans,
                        )
                        time.sleep(0.1)
                finally:
                    with testbed.client() as client:
                        client.cancel(run.job_id)

            run = run_interrupted(
                testbed,
                job,
                lambda run: run.round_index >= 2 and are_neighbours(run.plans[0]),
                cut_until_all_devices_work,
                limit_seconds=2 * _LIMIT_SECONDS,
            )
    # With more memory, plans could do without a device.
    assert all(stage.stop_unit - stage.start_unit == 2 for stage in run.plans[0].stages[1:-1])
    assert 2 <= len(run.attempts) <= 4, run.messages
    assert any(host_id in str(run.messages) for host_id in _CUT), run.messages


def all_work_around_the_cut(run: Run) -> bool:
    """Returns whether an attempt has failed, a round is committed since, and all devices work without the cut link.

    A device may count as lost until it is back, or only the link counts as cut. This depends on who notices it first.
    """
    hosts = {stage.host_id for stage in run.plans[0].stages}
    return "RECOVERED" in run.codes() and hosts >= _DEVICES and not are_neighbours(run.plans[0])


if __name__ == "__main__":
    main()
