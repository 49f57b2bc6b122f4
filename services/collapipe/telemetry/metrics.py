"""Every metric of the system; the services update these objects directly.

Most constants have the name of their metric without the prefix `collapipe_` and the suffix `_total`. Metrics use
base units. Label values are bounded: `link` is "sender>receiver" with host ids, `direction` is "forward" or
"backward" and `way` is "sent" or "received". A service exports every metric, with no samples where it never
updates one.
"""

import math
import resource
import shutil
import sys
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

_DIRECTIONS = ("forward", "backward")
_WAYS = ("sent", "received")

# The passes of a tiny block take microseconds, those of a loaded Raspberry Pi tens of seconds.
_PASS_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_ROUND_BUCKETS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
_CALL_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

# --- stages

_STAGE = ("cluster", "stage")

STAGE_PASS_SECONDS = {
    direction: Histogram(
        f"collapipe_stage_{direction}_seconds",
        f"Time that a stage computed the {direction} pass of one micro-batch.",
        _STAGE,
        buckets=_PASS_BUCKETS,
    )
    for direction in _DIRECTIONS
}
STAGE_WAITING_SECONDS = Counter(
    "collapipe_stage_waiting_seconds_total",
    "Time that a stage waited for activations or activation gradients.",
    _STAGE,
)
STAGE_SENDING_SECONDS = Counter(
    "collapipe_stage_sending_seconds_total",
    "Time from encoding a frame until the network has taken its last byte, with pacing and waiting for buffers. "
    "Each direction has its own thread, so this time overlaps with computing.",
    (*_STAGE, "direction"),
)
STAGE_STEPS = Counter(
    "collapipe_stage_steps_total", "Mini-batches that a stage ran forward and backward.", _STAGE
)
STAGE_BLOCK_SAMPLES = Counter(
    "collapipe_stage_block_samples_total",
    "Samples that a stage ran forward and backward, times the number of its blocks.",
    _STAGE,
)
STAGE_END_UNIT_SECONDS = Counter(
    "collapipe_stage_end_unit_seconds_total",
    "Time of the forward and backward passes that a stage spent in the embedding or in the head.",
    _STAGE,
)
STAGE_SAMPLES = Counter(
    "collapipe_stage_samples_total", "Samples that a stage ran forward and backward.", _STAGE
)
STAGE_ACTIVATION_BYTES = Counter(
    "collapipe_stage_activation_bytes_total",
    "Bytes of training activations that a stage sent to the next stage, before any codec.",
    _STAGE,
)
STAGE_UPDATE_SECONDS = Counter(
    "collapipe_stage_update_seconds_total", "Time that a stage spent in the optimizer.", _STAGE
)
STAGE_WEIGHT_GRADIENT_SECONDS = Counter(
    "collapipe_stage_weight_gradient_seconds_total",
    "Part of the time of backward passes in which a stage computed gradients that it had left for later.",
    _STAGE,
)
STAGE_STASH_BYTES = Gauge(
    "collapipe_stage_stash_bytes", "Largest activation stash of the last mini-batch.", _STAGE
)
STAGE_IN_FLIGHT = Gauge(
    "collapipe_stage_in_flight",
    "Most micro-batches that a stage held at once in the last mini-batch.",
    _STAGE,
)

# --- links

LINK_BYTES = Counter(
    "collapipe_link_bytes_total",
    "Bytes of activations and activation gradients that a stage exchanged, before any codec.",
    (*_STAGE, "direction", "way"),
)
LINK_TRANSFER_BYTES = Counter(
    "collapipe_link_transfer_bytes_total",
    "Bytes on the wire that arrived over a link, counted by its receiver.",
    ("link", "codec"),
)
LINK_TRANSFER_SECONDS = Counter(
    "collapipe_link_transfer_seconds_total",
    "Time that frames took to arrive over a link, from the header to the last byte.",
    ("link",),
)
LINK_RATE_LIMIT_BPS = Gauge(
    "collapipe_link_rate_limit_bps",
    "Rate to which the sender of a link limits itself; 0 means no limit.",
    ("link",),
)
LINK_ROUND_TRIP_SECONDS = Gauge(
    "collapipe_link_round_trip_seconds", "Least round-trip time of the last probe.", ("link",)
)
LINK_PROBED_BPS = Gauge(
    "collapipe_link_probed_bps",
    "Rate that the receiver of a link measured during the last probe.",
    ("link",),
)
LINKS_UNSHAPED = Gauge(
    "collapipe_links_unshaped",
    "1 if a shaper process should shape the links of this host and the kernel does not do what links.json says, else 0.",
)
RADIO_CHANNEL_GAIN = Gauge("collapipe_radio_channel_gain", "Power gain of a radio link.", ("link",))
RADIO_NOISE_WATTS_PER_HERTZ = Gauge(
    "collapipe_radio_noise_watts_per_hertz", "Noise and interference at a receiver.", ("link",)
)
RADIO_TRANSMIT_POWER_WATTS = Gauge(
    "collapipe_radio_transmit_power_watts", "Transmit power of a sender.", ("link",)
)

# --- hosts

ENERGY_JOULES = Counter(
    "collapipe_energy_joules_total", "Energy that the host used, by sensor.", ("sensor",)
)
SENSOR_PRESENT = Gauge(
    "collapipe_sensor_present", "Whether a sensor works on this host: 1 or 0.", ("sensor",)
)
TEMPERATURE_CELSIUS = Gauge(
    "collapipe_temperature_celsius", "Temperature of the processor.", ("sensor",)
)
EMULATION_OVERRUN_SECONDS = Counter(
    "collapipe_emulation_overrun_seconds_total",
    "Time by which real work took longer than the emulated device would have taken.",
)
BLOB_BYTES = Counter(
    "collapipe_blob_bytes_total",
    "Bytes of weights, optimizer state and vocabularies that this host exchanged.",
    ("way",),
)
STATE_FREE_BYTES = Gauge(
    "collapipe_state_free_bytes",
    "Free space on the disk where this service keeps its state.",
    ("directory",),
)
PROCESS_PEAK_RESIDENT_MEMORY_BYTES = Gauge(
    "collapipe_process_peak_resident_memory_bytes", "Largest resident memory of this process."
)

# --- training and rounds

TRAINED_SAMPLES = Counter(
    "collapipe_trained_samples_total", "Samples that a cluster trained.", ("cluster",)
)
TRAINING_LOSS = Gauge("collapipe_training_loss", "Loss of the last mini-batch.", ("cluster",))
EVALUATION_METRIC = Gauge(
    "collapipe_evaluation_metric",
    "Value of the last evaluation on the held-out rows of a cluster.",
    ("cluster", "metric"),
)
JOB_METRIC = Gauge(
    "collapipe_job_metric",
    "Value of the last evaluation on the held-out rows of all clusters.",
    ("metric",),
)
JOB_EPSILON = Gauge(
    "collapipe_job_epsilon",
    "Epsilon of the private updates of a job: for those who see averages, or the updates of single clusters.",
    ("seen",),
)
ROUND_SECONDS = Histogram(
    "collapipe_round_seconds",
    "Time from the plan of a round to the end of the round.",
    ("outcome",),
    buckets=_ROUND_BUCKETS,
)
ROUND_PHASE_SECONDS = Gauge(
    "collapipe_round_phase_seconds",
    "Time that a phase of the last committed round took in a cluster.",
    ("cluster", "phase"),
)
AGGREGATION_SECONDS = Histogram(
    "collapipe_aggregation_seconds",
    "Time to check, sync and commit the averages of a round.",
    buckets=_ROUND_BUCKETS,
)

# --- scheduler

HOSTS = Gauge("collapipe_hosts", "Hosts that are registered and alive.", ("role",))
ROUND_PREDICTED_SECONDS = Gauge(
    "collapipe_round_predicted_seconds", "Predicted time of the last round."
)
ROUND_OBSERVED_SECONDS = Gauge(
    "collapipe_round_observed_seconds", "Observed time of the last round that had a prediction."
)
ROUND_PREDICTION_ERROR_RATIO = Histogram(
    "collapipe_round_prediction_error_ratio",
    "Difference between the predicted and the observed time of a round, divided by the observed time.",
    buckets=(0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 3),
)
PLAN_SOLVE_SECONDS = Histogram(
    "collapipe_plan_solve_seconds",
    "Time to decide the plans of a round.",
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
PLANS_KEPT = Counter(
    "collapipe_plans_kept_total", "Rounds that kept the previous plan, by reason.", ("reason",)
)
PLANS_INFEASIBLE = Counter(
    "collapipe_plans_infeasible_total", "Rounds for which no plan satisfies the limits."
)
JOBS_ENDED = Counter("collapipe_jobs_ended_total", "Jobs that ended, by outcome.", ("outcome",))
MOVED_BLOCKS = Counter(
    "collapipe_moved_blocks_total", "Blocks that moved to another host.", ("cluster",)
)
LATE_ROUNDS = Counter(
    "collapipe_late_rounds_total",
    "Rounds for which a cluster was late or failed: left out, or ended early.",
    ("cluster",),
)
PLACED_BLOCKS = Gauge("collapipe_placed_blocks", "Blocks that a host runs.", ("host",))
PLANNED_MICRO_BATCHES = Gauge(
    "collapipe_planned_micro_batches", "Micro-batches of a mini-batch in the plan.", ("cluster",)
)
BACKLOG = Gauge("collapipe_backlog", "Energy queue of a device, in round budgets.", ("host",))
OBJECTIVE = Gauge(
    "collapipe_objective",
    "Terms of the objective that the scheduler minimises: docs/scheduling.md (13).",
    ("part",),
)
TELEMETRY_FAILURES = Counter(
    "collapipe_telemetry_failures_total", "Queries to a telemetry source that failed.", ("source",)
)
TELEMETRY_DROPPED = Counter(
    "collapipe_telemetry_dropped_samples_total",
    "Samples that the scheduler left out, because their labels name hosts or clusters that it does not know.",
    ("source",),
)

# --- gRPC servers; these names are established, so existing dashboards for gRPC work

_CALL = ("grpc_type", "grpc_service", "grpc_method")

CALLS_STARTED = Counter("grpc_server_started", "Calls that began on the server.", _CALL)
CALLS_HANDLED = Counter(
    "grpc_server_handled", "Calls that ended on the server, with any status.", (*_CALL, "grpc_code")
)
CALL_SECONDS = Histogram(
    "grpc_server_handling_seconds",
    "Time from the start of a call to its status.",
    _CALL,
    buckets=_CALL_BUCKETS,
)


def create_stage_series(cluster: str, stage: str) -> None:
    """Exports the counters of a stage with value 0, so that Prometheus sees their first increase."""
    for direction in _DIRECTIONS:
        STAGE_PASS_SECONDS[direction].labels(cluster, stage)
        STAGE_SENDING_SECONDS.labels(cluster, stage, direction)
        for way in _WAYS:
            LINK_BYTES.labels(cluster, stage, direction, way)
    for counter in (
        STAGE_WAITING_SECONDS,
        STAGE_STEPS,
        STAGE_BLOCK_SAMPLES,
        STAGE_END_UNIT_SECONDS,
        STAGE_SAMPLES,
        STAGE_ACTIVATION_BYTES,
        STAGE_UPDATE_SECONDS,
        STAGE_WEIGHT_GRADIENT_SECONDS,
    ):
        counter.labels(cluster, stage)


def create_scheduler_series(telemetry_source: str) -> None:
    """Exports the counters of a scheduler with value 0, so that Prometheus sees their first increase."""
    TELEMETRY_FAILURES.labels(telemetry_source)
    TELEMETRY_DROPPED.labels(telemetry_source)
    for reason in ("hysteresis", "solver_failed", "solver_slow", "telemetry_missing"):
        PLANS_KEPT.labels(reason)
    for outcome in ("succeeded", "failed", "cancelled"):
        JOBS_ENDED.labels(outcome)


def watch_free_space(state_dir: Path) -> None:
    """Exports the free space of the disk that holds `state_dir`, measured anew for every scrape."""
    STATE_FREE_BYTES.labels(str(state_dir)).set_function(lambda: _free_bytes(state_dir.absolute()))


def _free_bytes(directory: Path) -> float:
    """Returns the free space for a directory that need not exist yet.

    The result is NaN where it cannot be measured: an error would fail the whole /metrics page.
    """
    for existing in (directory, *directory.parents):
        try:
            return shutil.disk_usage(existing).free
        except FileNotFoundError:
            continue
        except OSError:
            break
    return math.nan


def peak_resident_bytes() -> int:
    """Returns the largest resident memory that this process has had."""
    # On Linux, ru_maxrss of a new process begins with the peak of its parent, so /proc is read instead.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


PROCESS_PEAK_RESIDENT_MEMORY_BYTES.set_function(peak_resident_bytes)
for _way in _WAYS:
    BLOB_BYTES.labels(_way)
for _outcome in ("committed", "aborted", "cancelled"):
    ROUND_SECONDS.labels(_outcome)
