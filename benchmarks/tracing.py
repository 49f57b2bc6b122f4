"""Measures which share of a step the recording of spans takes: the cost of one, times the spans of a step.

python -m benchmarks.tracing
"""

import tempfile
import time
import timeit
from pathlib import Path

from benchmarks.memory import make_job
from collapipe.telemetry.spans import SpanLog
from collapipe_client import LocalTestbed
from collapipe_client.trace_file import read_hosts

CALLS = 20_000


def main() -> None:
    """Trains one round with three devices, and prints the cost of one span and its share in each host."""
    log = SpanLog()

    def record() -> None:
        started = time.perf_counter()
        log.record("compute for cluster 0", "forward", started, step=1, micro_batch=2)

    seconds = min(timeit.repeat(record, number=CALLS, repeat=5)) / CALLS
    print(f"one span: {1e6 * seconds:.2f} us")
    with tempfile.TemporaryDirectory() as name:
        job = make_job(Path(name), small=False)
        with (
            LocalTestbed([3], Path(name) / "testbed") as testbed,
            testbed.client() as client,
        ):
            job_id = client.submit(job)
            for event in client.watch(job_id):
                if event.HasField("round_committed"):
                    training = event.round_committed.summaries[0].training_seconds
            hosts = read_hosts(client.trace(job_id, job.training.rounds - 1))
    steps = job.training.local_steps
    for host in hosts:
        num_spans = len(host.spans) / steps
        share = num_spans * seconds / (training / steps)
        print(f"{host.host_id}: {num_spans:.0f} spans a step, {100 * share:.4f} % of its time")


if __name__ == "__main__":
    main()
