"""Every metric of the system, and the only functions that change one.

Names have the prefix `collapipe_` and base units; labels are bounded: cluster, stage, direction, way, action,
outcome, and the established labels of gRPC. Metrics of a service that has no use for them stay at no samples.
"""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

# from the microseconds of a tiny block to the tens of seconds of a loaded Raspberry Pi
_COMPUTE_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_ROUND_BUCKETS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
_CALL_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

_STAGE = ("cluster", "stage")

_action_seconds = {
    action: Histogram(
        f"collapipe_stage_{action}_seconds",
        f"Time that one stage computed the {action} pass of one micro-batch.",
        _STAGE,
        buckets=_COMPUTE_BUCKETS,
    )
    for action in ("forward", "backward")
}
_waiting_seconds = Counter(
    "collapipe_stage_waiting_seconds_total",
    "Time that a stage waited for a micro-batch or a gradient.",
    _STAGE,
)
_steps = Counter(
    "collapipe_stage_steps_total", "Mini-batches that a stage ran forward and backward.", _STAGE
)
_link_bytes = Counter(
    "collapipe_link_bytes_total",
    "Bytes of activations and gradients exchanged with neighbouring stages.",
    (*_STAGE, "direction", "way"),
)
_blob_bytes = Counter(
    "collapipe_blob_bytes_total",
    "Bytes of weights, optimizer state and vocabularies exchanged.",
    ("way",),
)
_samples = Counter("collapipe_trained_samples_total", "Rows trained.", ("cluster",))
_loss = Gauge("collapipe_training_loss", "Loss of the last mini-batch.", ("cluster",))
_metric = Gauge(
    "collapipe_evaluation_metric", "Last measurement on the held-out data.", ("cluster", "metric")
)
_round_seconds = Histogram(
    "collapipe_round_seconds",
    "Time from a round's plan to its end.",
    ("outcome",),
    buckets=_ROUND_BUCKETS,
)
_aggregation_seconds = Histogram(
    "collapipe_aggregation_seconds",
    "Time to collect the clusters' weights, average and commit them.",
    buckets=_ROUND_BUCKETS,
)
_hosts = Gauge("collapipe_hosts", "Hosts that are registered and alive.", ("role",))
_calls_started = Counter(
    "grpc_server_started",
    "Calls started on the server.",
    ("grpc_type", "grpc_service", "grpc_method"),
)
_calls_handled = Counter(
    "grpc_server_handled",
    "Calls completed on the server, whatever their status.",
    ("grpc_type", "grpc_service", "grpc_method", "grpc_code"),
)
_call_seconds = Histogram(
    "grpc_server_handling_seconds",
    "Time from the start of a call to its status.",
    ("grpc_type", "grpc_service", "grpc_method"),
    buckets=_CALL_BUCKETS,
)
_peak_memory = Gauge(
    "collapipe_process_peak_resident_memory_bytes", "Largest resident memory of this process."
)


def peak_resident_bytes() -> int:
    """The largest resident memory of this process so far, in bytes."""
    # on Linux, getrusage starts a process with the peak of the one that started it
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_peak_memory.set_function(peak_resident_bytes)
for _way in ("sent", "received"):
    _blob_bytes.labels(_way)
for _outcome in ("committed", "aborted"):
    _round_seconds.labels(_outcome)


def stage_opened(cluster: str, stage: str) -> None:
    """Makes the series of a stage appear, at 0 where nothing happened yet."""
    for action, histogram in _action_seconds.items():
        histogram.labels(cluster, stage)
        for way in ("sent", "received"):
            _link_bytes.labels(cluster, stage, action, way)
    _waiting_seconds.labels(cluster, stage)
    _steps.labels(cluster, stage)


def stage_action(cluster: str, stage: str, action: str, seconds: float) -> None:
    """A stage computed `action` ("forward" or "backward") for one micro-batch."""
    _action_seconds[action].labels(cluster, stage).observe(seconds)


def stage_step(cluster: str, stage: str, waiting_seconds: float) -> None:
    """A stage ran a mini-batch, and waited some of the time."""
    _steps.labels(cluster, stage).inc()
    _waiting_seconds.labels(cluster, stage).inc(waiting_seconds)


def link_bytes(cluster: str, stage: str, direction: str, way: str, count: int) -> None:
    """A stage exchanged activations ("forward") or gradients ("backward"), "sent" or "received"."""
    _link_bytes.labels(cluster, stage, direction, way).inc(count)


def blob_bytes(way: str, count: int) -> None:
    """Bytes of a blob were "sent" or "received"."""
    _blob_bytes.labels(way).inc(count)


def trained(cluster: str, num_samples: int, loss: float) -> None:
    """A cluster trained a mini-batch."""
    _samples.labels(cluster).inc(num_samples)
    _loss.labels(cluster).set(loss)


def evaluated(cluster: str, metric: str, value: float) -> None:
    """A cluster measured the model."""
    _metric.labels(cluster, metric).set(value)


def round_ended(outcome: str, seconds: float) -> None:
    """A round was "committed" or "aborted"."""
    _round_seconds.labels(outcome).observe(seconds)


@contextmanager
def aggregation_timer() -> Iterator[None]:
    """Times one aggregation."""
    started = time.perf_counter()
    yield
    _aggregation_seconds.observe(time.perf_counter() - started)


def hosts_alive(role: str, count: int) -> None:
    """How many hosts of a role are alive."""
    _hosts.labels(role).set(count)


def call_started(grpc_type: str, service: str, method: str) -> None:
    """A call began."""
    _calls_started.labels(grpc_type, service, method).inc()


def call_handled(grpc_type: str, service: str, method: str, code: str, seconds: float) -> None:
    """A call ended."""
    _calls_handled.labels(grpc_type, service, method, code).inc()
    _call_seconds.labels(grpc_type, service, method).observe(seconds)
