"""Every metric of the system, and the only functions that change one.

Names have the prefix `collapipe_` and base units; labels are bounded: cluster, stage, direction, way, action, phase,
outcome, link ("sender>receiver", host ids), codec, host, and the established labels of gRPC. Metrics of a service that has no use for them stay at no samples.
"""

import math
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
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
_sending_seconds = Counter(
    "collapipe_stage_sending_seconds_total",
    "Time from taking up a frame for a neighbour to the network's taking its last byte: encoding, pacing, waiting for "
    "room. Another thread does it for each direction, so it overlaps with computing.",
    (*_STAGE, "direction"),
)
_steps = Counter(
    "collapipe_stage_steps_total", "Mini-batches that a stage ran forward and backward.", _STAGE
)
_link_bytes = Counter(
    "collapipe_link_bytes_total",
    "Bytes of activations and gradients exchanged with neighbouring stages.",
    (*_STAGE, "direction", "way"),
)
_block_samples = Counter(
    "collapipe_stage_block_samples_total",
    "Units times samples that a stage ran forward and backward.",
    _STAGE,
)
_stage_samples = Counter(
    "collapipe_stage_samples_total", "Samples that a stage ran forward and backward.", _STAGE
)
_activation_bytes = Counter(
    "collapipe_stage_activation_bytes_total",
    "Bytes of what a stage passed on for training, before any codec.",
    _STAGE,
)
_update_seconds = Counter("collapipe_stage_update_seconds_total", "Time in the optimizer.", _STAGE)
_stash_bytes = Gauge(
    "collapipe_stage_stash_bytes", "Largest activation stash of the last mini-batch.", _STAGE
)
_in_flight = Gauge(
    "collapipe_stage_in_flight", "Most micro-batches held in the last mini-batch.", _STAGE
)
_transfer_bytes = Counter(
    "collapipe_link_transfer_bytes_total",
    "Bytes on the wire that arrived over a link, as its receiver counts them.",
    ("link", "codec"),
)
_transfer_seconds = Counter(
    "collapipe_link_transfer_seconds_total",
    "Time that frames took to arrive over a link, from their headers to their last bytes.",
    ("link",),
)
_rate_limit = Gauge(
    "collapipe_link_rate_limit_bps",
    "Rate that the sender of a link paces at; 0 is none.",
    ("link",),
)
_round_trip = Gauge("collapipe_link_round_trip_seconds", "Least round-trip time.", ("link",))
_probed_goodput = Gauge(
    "collapipe_link_probed_bps",
    "Rate that the last probe of a link saw at the receiver.",
    ("link",),
)
_channel_gain = Gauge("collapipe_radio_channel_gain", "Power gain of a radio link.", ("link",))
_noise_density = Gauge(
    "collapipe_radio_noise_watts_per_hertz", "Noise and interference at a receiver.", ("link",)
)
_transmit_power = Gauge("collapipe_radio_transmit_power_watts", "Power of a sender.", ("link",))
_energy = Counter("collapipe_energy_joules_total", "Energy used, by what measured it.", ("probe",))
_probe_present = Gauge(
    "collapipe_sensor_present", "Whether a probe works here: 1 or 0.", ("probe",)
)
_temperature = Gauge("collapipe_temperature_celsius", "Temperature of the processor.", ("probe",))
_overrun_seconds = Counter(
    "collapipe_emulation_overrun_seconds_total",
    "Real work beyond the time that the emulated device would have taken.",
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
_phase_seconds = Gauge(
    "collapipe_round_phase_seconds",
    "Time that a part of the last committed round took in a cluster.",
    ("cluster", "phase"),
)
_aggregation_seconds = Histogram(
    "collapipe_aggregation_seconds",
    "Time to collect the clusters' weights, average and commit them.",
    buckets=_ROUND_BUCKETS,
)
_predicted_seconds = Gauge(
    "collapipe_round_predicted_seconds", "Time that the last round was predicted to take."
)
_observed_seconds = Gauge("collapipe_round_observed_seconds", "Time that the last round took.")
_prediction_error = Histogram(
    "collapipe_round_prediction_error_ratio",
    "Distance of the predicted from the observed time of a round, over the observed.",
    buckets=(0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 3),
)
_solve_seconds = Histogram(
    "collapipe_plan_solve_seconds",
    "Time to decide a round.",
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
_plans_kept = Counter(
    "collapipe_plans_kept_total", "Rounds whose plan was kept, and why.", ("reason",)
)
_plans_infeasible = Counter(
    "collapipe_plans_infeasible_total", "Rounds for which no plan keeps within the limits."
)
_jobs_ended = Counter("collapipe_jobs_ended_total", "Jobs that ended, by how.", ("outcome",))
_moved_blocks = Counter("collapipe_moved_blocks_total", "Blocks that changed hands.", ("cluster",))
_placed_blocks = Gauge("collapipe_placed_blocks", "Blocks that a device runs.", ("host",))
_planned_micro_batches = Gauge(
    "collapipe_planned_micro_batches", "Micro-batches of a mini-batch.", ("cluster",)
)
_backlog = Gauge("collapipe_backlog", "Virtual queue of a device's energy budget.", ("host",))
_objective = Gauge(
    "collapipe_objective", "Parts of what the scheduler minimises: design (13).", ("part",)
)
_telemetry_failures = Counter(
    "collapipe_telemetry_failures_total",
    "Questions to a telemetry source that failed.",
    ("source",),
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
_state_free = Gauge(
    "collapipe_state_free_bytes",
    "Room that is left on the disk where this service keeps its state.",
    ("directory",),
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
for _outcome in ("committed", "aborted", "cancelled"):
    _round_seconds.labels(_outcome)


def scheduler_opened(source: str) -> None:
    """Makes the series of a scheduler appear at 0: what first appears at 1 has not grown for who asks."""
    _telemetry_failures.labels(source)
    for reason in ("hysteresis", "solver_failed", "solver_slow", "telemetry_missing"):
        _plans_kept.labels(reason)
    for outcome in ("succeeded", "failed", "cancelled"):
        _jobs_ended.labels(outcome)


def state_kept(directory: Path) -> None:
    """A service keeps its state in a directory; the room that is left is measured whenever it is asked for."""
    _state_free.labels(str(directory)).set_function(lambda: _free_bytes(directory.absolute()))


def _free_bytes(directory: Path) -> float:
    """Room on the disk of a directory that may not be there yet; NaN when nobody can tell: a page must not fail."""
    for place in (directory, *directory.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            break
    return math.nan


def stage_opened(cluster: str, stage: str) -> None:
    """Makes the series of a stage appear, at 0 where nothing happened yet."""
    for action, histogram in _action_seconds.items():
        histogram.labels(cluster, stage)
        for way in ("sent", "received"):
            _link_bytes.labels(cluster, stage, action, way)
        _sending_seconds.labels(cluster, stage, action)
    for counter in (_block_samples, _stage_samples, _activation_bytes, _update_seconds):
        counter.labels(cluster, stage)
    _waiting_seconds.labels(cluster, stage)
    _steps.labels(cluster, stage)


def stage_action(cluster: str, stage: str, action: str, seconds: float) -> None:
    """A stage computed `action` ("forward" or "backward") for one micro-batch."""
    _action_seconds[action].labels(cluster, stage).observe(seconds)


def stage_waited(cluster: str, stage: str, seconds: float) -> None:
    """A stage waited for a neighbour."""
    _waiting_seconds.labels(cluster, stage).inc(seconds)


def stage_step(cluster: str, stage: str) -> None:
    """A stage ran a mini-batch."""
    _steps.labels(cluster, stage).inc()


def stage_worked(
    cluster: str, stage: str, *, num_units: int, num_samples: int, activation_bytes: int
) -> None:
    """A stage ran a micro-batch forward and backward, and had passed so many bytes on."""
    _block_samples.labels(cluster, stage).inc(num_units * num_samples)
    _stage_samples.labels(cluster, stage).inc(num_samples)
    _activation_bytes.labels(cluster, stage).inc(activation_bytes)


def stage_updated(cluster: str, stage: str, seconds: float) -> None:
    """A stage took an optimizer step."""
    _update_seconds.labels(cluster, stage).inc(seconds)


def stage_sent(cluster: str, stage: str, direction: str, seconds: float) -> None:
    """A frame of a stage left "forward" or "backward", after so long."""
    _sending_seconds.labels(cluster, stage, direction).inc(seconds)


def stage_held(cluster: str, stage: str, in_flight: int, stash_bytes: int) -> None:
    """The most that a stage held at once in its last mini-batch."""
    _in_flight.labels(cluster, stage).set(in_flight)
    _stash_bytes.labels(cluster, stage).set(stash_bytes)


def link_transfer(link: str, codec: str, wire_bytes: int, seconds: float) -> None:
    """A frame arrived over a link, as its receiver saw it."""
    _transfer_bytes.labels(link, codec).inc(wire_bytes)
    _transfer_seconds.labels(link).inc(seconds)


def link_limited(link: str, rate_limit_bps: float) -> None:
    """The sender of a link paces at a rate; 0 for none."""
    _rate_limit.labels(link).set(rate_limit_bps)


def link_round_trip(link: str, seconds: float) -> None:
    """The sender of a link measured its round-trip time."""
    _round_trip.labels(link).set(seconds)


def link_probed(link: str, goodput_bps: float) -> None:
    """The sender of a link probed it."""
    _probed_goodput.labels(link).set(goodput_bps)


def radio_state(link: str, gain: float, noise_watts_per_hertz: float, power_watts: float) -> None:
    """What the radio of a sender knows of a link."""
    _channel_gain.labels(link).set(gain)
    _noise_density.labels(link).set(noise_watts_per_hertz)
    _transmit_power.labels(link).set(power_watts)


def energy_used(probe: str, joules: float) -> None:
    """A probe saw energy used since it was last read."""
    _energy.labels(probe).inc(joules)


def probe_present(probe: str, *, present: bool) -> None:
    """Whether a probe works on this host."""
    _probe_present.labels(probe).set(present)


def temperature(probe: str, celsius: float) -> None:
    """The processor's temperature."""
    _temperature.labels(probe).set(celsius)


def emulation_overrun(seconds: float) -> None:
    """Real work took longer than the emulated device would have."""
    _overrun_seconds.inc(seconds)


def round_predicted(predicted_seconds: float, observed_seconds: float) -> None:
    """A round that had been predicted ended."""
    _predicted_seconds.set(predicted_seconds)
    _observed_seconds.set(observed_seconds)
    _prediction_error.observe(abs(predicted_seconds - observed_seconds) / observed_seconds)


def round_phases(cluster: str, seconds: Mapping[str, float]) -> None:
    """How long each part of a committed round took in a cluster."""
    for phase, value in seconds.items():
        _phase_seconds.labels(cluster, phase).set(value)


def plan_infeasible() -> None:
    """No plan keeps within the limits."""
    _plans_infeasible.inc()


def job_ended(outcome: str) -> None:
    """A job "succeeded", "failed" or was "cancelled"."""
    _jobs_ended.labels(outcome).inc()


def plan_solved(seconds: float) -> None:
    """A round was decided."""
    _solve_seconds.observe(seconds)


def plan_kept(reason: str) -> None:
    """A plan was kept: "hysteresis", "solver_failed", "solver_slow" or "telemetry_missing"."""
    _plans_kept.labels(reason).inc()


def blocks_placed(cluster: str, blocks: Mapping[str, int], moved: int, micro_batches: int) -> None:
    """What the plan of a cluster is: blocks of each device, how many changed hands, micro-batches."""
    for host, count in blocks.items():
        _placed_blocks.labels(host).set(count)
    _moved_blocks.labels(cluster).inc(moved)
    _planned_micro_batches.labels(cluster).set(micro_batches)


def backlog(host: str, value: float) -> None:
    """The virtual queue of a device."""
    _backlog.labels(host).set(value)


def objective(parts: Mapping[str, float]) -> None:
    """The parts of the drift plus penalty: design (13)."""
    for part, value in parts.items():
        _objective.labels(part).set(value)


def telemetry_failed(source: str) -> None:
    """A question to a telemetry source failed."""
    _telemetry_failures.labels(source).inc()


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
    """A round was "committed", "aborted" or "cancelled"."""
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
