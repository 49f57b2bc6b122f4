"""Exports the metrics of a simulated host for test_prometheus.py.

    python metrics_host.py HOST STAGE PREVIOUS_HOST

It prints the addresses of its gRPC server and of its /metrics page. For a line "N PAUSE" on its standard input it counts N
micro-batches, PAUSE seconds apart, and then prints "done". An empty line ends it.
"""

import sys
import time

import grpc

from collapipe.metrics_page import serve_metrics
from collapipe.rpc import Security, serve
from collapipe.telemetry import metrics
from collapipe.telemetry_service import TelemetryServicer
from collapipe.v1 import telemetry_pb2_grpc


def _add_telemetry(server: grpc.Server, address: str) -> None:
    telemetry_pb2_grpc.add_TelemetryServiceServicer_to_server(TelemetryServicer(), server)


def main() -> None:
    host, stage, previous = sys.argv[1:]
    number = int(stage)
    incoming, outgoing = f"{previous}>{host}", f"{host}>{previous}"
    metrics.create_stage_series("0", stage)
    metrics.LINK_RATE_LIMIT_BPS.labels(outgoing).set(5e8)
    server = serve("127.0.0.1:0", Security.insecure(), _add_telemetry)
    print(server.address, serve_metrics("127.0.0.1:0", Security.insecure()), flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        micro_batches, pause = int(line.split()[0]), float(line.split()[1])
        for _ in range(micro_batches):
            # No float holds these values exactly, so another order of additions would change the sums.
            metrics.STAGE_PASS_SECONDS["forward"].labels("0", stage).observe(0.1 * (number + 1))
            metrics.STAGE_PASS_SECONDS["backward"].labels("0", stage).observe(0.2 * (number + 1))
            metrics.STAGE_BLOCK_SAMPLES.labels("0", stage).inc(3 * 8)
            metrics.STAGE_SAMPLES.labels("0", stage).inc(8)
            metrics.STAGE_ACTIVATION_BYTES.labels("0", stage).inc(8 * 4096)
            metrics.LINK_TRANSFER_BYTES.labels(incoming, "fp32").inc(8 * 4100)
            metrics.LINK_TRANSFER_SECONDS.labels(incoming).inc(0.001 * (number + 1))
            metrics.ENERGY_JOULES.labels("rapl").inc(0.7)
            time.sleep(pause)
        metrics.STAGE_UPDATE_SECONDS.labels("0", stage).inc(0.3)
        metrics.STAGE_STEPS.labels("0", stage).inc()
        metrics.LINK_ROUND_TRIP_SECONDS.labels(outgoing).set(0.003 * (number + 1))
        print("done", flush=True)


if __name__ == "__main__":
    main()
