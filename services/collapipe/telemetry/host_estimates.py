"""Estimates of a host: its compute time, its power, its optimizer time and its memory."""

from collections.abc import Collection
from dataclasses import dataclass

from collapipe.telemetry.sample_window import ABOVE_ZERO, Group, SampleWindow

ENERGY_SENSORS = ("ina3221", "battery", "rapl")
"""Sensors in the order of preference. Their energies overlap, so only the first with energy is used."""

_MAX_RATIO_TO_PRIOR = 1000.0
_LEAST_SHARE_OF_PRIOR = 0.05
_MAX_SECONDS = 1e4


@dataclass(frozen=True)
class HostPrior:
    """The profile of a host, measured before it trained."""

    seconds_per_sample: float = 0.0
    """a_k of docs/scheduling.md (2), forward and backward pass; 0 without a profile."""
    seconds_per_micro_batch: float = 0.0
    """o_k of docs/scheduling.md (2): the fixed cost of a micro-batch."""


@dataclass(frozen=True)
class HostEstimate:
    """Measured values of a host; `None` means that the window has no usable samples."""

    seconds_per_sample: float | None = None
    """a_k of docs/scheduling.md (2), averaged over all stages of the host; `None` if it ran no block."""
    end_seconds_per_sample: float | None = None
    """e_k of docs/scheduling.md (2); `None` if it ran neither the embedding nor the head."""
    deferred_share: float | None = None
    """Share of the gradients of weights that were left for later in the compute time: docs/scheduling.md (4)."""
    micro_batches: float = 0.0
    """Number of micro-batches behind both."""
    busy_watts: float | None = None
    """Energy divided by busy time, docs/scheduling.md (8). The power of an idle device is part of it."""
    busy_seconds: float = 0.0
    """Time of computing behind `busy_watts`."""
    step_seconds: float | None = None
    """Time of one stage in the optimizer for one step, a part of T_step in docs/scheduling.md (5)."""
    steps: float = 0.0
    """Number of optimizer steps behind `step_seconds`."""
    peak_resident_bytes: float | None = None
    """Largest memory that the process has held, for docs/scheduling.md (10)."""


@dataclass
class _Work:
    """What the stages of a host did within the window, added up."""

    computing_seconds: float = 0.0
    deferred_seconds: float = 0.0
    micro_batches: float = 0.0
    block_samples: float = 0.0
    end_unit_seconds: float = 0.0
    end_unit_samples: float = 0.0
    update_seconds: float = 0.0
    steps: float = 0.0


def estimate_host(
    window: SampleWindow, host: str, prior: HostPrior, clusters: Collection[str] | None = None
) -> HostEstimate:
    """Computes the estimate of one host.

    Args:
        clusters: The clusters whose stages count, except for its power. `None` means all.
    """
    work = _work(window, host, clusters)
    seconds_per_sample, end_seconds_per_sample = _seconds_per_sample(window, host, prior, work)
    is_measured = seconds_per_sample is not None or end_seconds_per_sample is not None
    whole = _work(window, host, None)
    busy_seconds = whole.computing_seconds + whole.update_seconds
    step_seconds = None
    if work.steps:
        what = f"{host}: seconds per optimizer step"
        step_seconds = window.plausible(what, work.update_seconds / work.steps, 0.0, _MAX_SECONDS)
    deferred_share = None
    if work.deferred_seconds:
        what = f"{host}: share of the gradients that were left for later"
        share = work.deferred_seconds / max(work.computing_seconds, ABOVE_ZERO)
        deferred_share = window.plausible(what, share, 0.0, 1.0)
    return HostEstimate(
        seconds_per_sample=seconds_per_sample,
        end_seconds_per_sample=end_seconds_per_sample,
        deferred_share=deferred_share,
        micro_batches=work.micro_batches if is_measured else 0.0,
        busy_watts=_busy_watts(window, host, busy_seconds),
        busy_seconds=busy_seconds,
        step_seconds=step_seconds,
        steps=work.steps if step_seconds is not None else 0.0,
        peak_resident_bytes=window.latest(
            Group(host, ()), "process_peak_resident_memory_bytes", 1e15
        ),
    )


def _work(window: SampleWindow, host: str, clusters: Collection[str] | None) -> _Work:
    work = _Work()
    for group, cluster in window.groups("cluster", host):
        if clusters is not None and cluster not in clusters:
            continue
        passes = window.increases(
            group,
            "stage_forward_seconds_sum",
            "stage_backward_seconds_sum",
            "stage_backward_seconds_count",
            "stage_block_samples_total",
            "stage_end_unit_seconds_total",
            "stage_samples_total",
        )
        if passes:
            forward_seconds, backward_seconds, micro_batches = passes[:3]
            block_samples, end_unit_seconds, samples = passes[3:]
            deferred = window.increases(group, "stage_weight_gradient_seconds_total")
            work.computing_seconds += forward_seconds + backward_seconds
            work.deferred_seconds += deferred[0] if deferred else 0.0
            work.micro_batches += micro_batches
            work.block_samples += block_samples
            if end_unit_seconds:
                work.end_unit_seconds += end_unit_seconds
                work.end_unit_samples += samples
        updates = window.increases(group, "stage_update_seconds_total", "stage_steps_total")
        if updates:
            update_seconds, steps = updates
            work.update_seconds += update_seconds
            work.steps += steps
    return work


def _seconds_per_sample(
    window: SampleWindow, host: str, prior: HostPrior, work: _Work
) -> tuple[float | None, float | None]:
    """Computes a_k and e_k of docs/scheduling.md (2) from the measured times, with o_k of the profile.

    The fixed costs of the micro-batches are divided like the rest of the time.
    """
    fixed_seconds = prior.seconds_per_micro_batch * work.micro_batches
    # A fixed cost that is too large is no error of the samples of this host.
    varying = 1.0 - fixed_seconds / work.computing_seconds if work.computing_seconds else 0.0
    per_block = per_end_unit = None
    if work.block_samples:
        expected = prior.seconds_per_sample
        least, most, reason = ABOVE_ZERO, _MAX_SECONDS, ""
        if expected:
            least, most = expected / _MAX_RATIO_TO_PRIOR, expected * _MAX_RATIO_TO_PRIOR
            reason = f"; the profile says {expected:.4g}"
        gross = (work.computing_seconds - work.end_unit_seconds) / work.block_samples
        what = f"{host}: seconds per block and sample"
        if window.plausible(what, gross, least, most, reason) is not None:
            per_block = max(varying * gross, _LEAST_SHARE_OF_PRIOR * (expected or gross))
    if work.end_unit_samples:
        gross = work.end_unit_seconds / work.end_unit_samples
        what = f"{host}: seconds of embedding or head per sample"
        if window.plausible(what, gross, ABOVE_ZERO, _MAX_SECONDS) is not None:
            per_end_unit = max(varying, _LEAST_SHARE_OF_PRIOR) * gross
    return per_block, per_end_unit


def _busy_watts(window: SampleWindow, host: str, busy_seconds: float) -> float | None:
    """Divides the energy of one sensor by the busy time.

    The sensor "model" is not used: it only multiplies configured watts by the busy time.
    """
    groups = {sensor: group for group, sensor in window.groups("sensor", host)}
    for sensor in ENERGY_SENSORS:
        if sensor not in groups:
            continue
        joules = window.increases(groups[sensor], "energy_joules_total")
        if joules and joules[0] and busy_seconds:
            what = f"{host}: busy watts by {sensor}"
            return window.plausible(what, joules[0] / busy_seconds, 1e-3, 1e5)
    return None
