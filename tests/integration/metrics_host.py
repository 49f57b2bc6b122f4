"""A process that serves the metrics of a host and works when it is told to; see test_prometheus.py.

    python metrics_host.py HOST STAGE PREVIOUS_HOST

It writes where it serves. A line "N PAUSE" on its standard input lets it work N micro-batches with so many seconds
between them; then it writes "done". A line "" ends it.
"""

import sys
import time

from collapipe.telemetry import metrics
from collapipe.telemetry.exporter import serve_metrics


def main() -> None:
    host, stage, previous = sys.argv[1:]
    number = int(stage)
    metrics.stage_opened("0", stage)
    metrics.link_limited(f"{host}>{previous}", 5e8)
    print(serve_metrics("127.0.0.1:0"), flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        micro_batches, pause = int(line.split()[0]), float(line.split()[1])
        for _ in range(micro_batches):
            # figures that no float holds exactly: a different order or number of sums would show
            metrics.stage_action("0", stage, "forward", 0.1 * (number + 1))
            metrics.stage_action("0", stage, "backward", 0.2 * (number + 1))
            metrics.stage_worked("0", stage, num_units=3, num_samples=8, activation_bytes=8 * 4096)
            metrics.link_transfer(f"{previous}>{host}", "fp32", 8 * 4100, 0.001 * (number + 1))
            metrics.energy_used("rapl", 0.7)
            time.sleep(pause)
        metrics.stage_updated("0", stage, 0.3)
        metrics.stage_step("0", stage)
        metrics.link_round_trip(f"{host}>{previous}", 0.003 * (number + 1))
        print("done", flush=True)


if __name__ == "__main__":
    main()
