"""Tells the scheduler what this host has measured."""

import time

import grpc
from prometheus_client import REGISTRY

from collapipe.telemetry.sources.samples import kept_labels
from collapipe.v1 import telemetry_pb2, telemetry_pb2_grpc


class TelemetryServicer(telemetry_pb2_grpc.TelemetryServiceServicer):
    """Serves the metrics of this process, the same as its page of /metrics."""

    def GetMetrics(
        self, request: telemetry_pb2.GetMetricsRequest, context: grpc.ServicerContext
    ) -> telemetry_pb2.GetMetricsResponse:
        started = time.perf_counter()
        samples = [
            telemetry_pb2.MetricSample(
                name=sample.name, labels=dict(kept_labels(sample.labels)), value=sample.value
            )
            for metric in REGISTRY.restricted_registry(request.names).collect()
            for sample in metric.samples
        ]
        return telemetry_pb2.GetMetricsResponse(
            samples=samples, seconds=time.perf_counter() - started
        )
