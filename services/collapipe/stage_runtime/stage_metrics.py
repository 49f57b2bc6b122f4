"""Turns the actions of a stage into metrics of its cluster and of its host."""

from collapipe.telemetry import metrics
from collapipe.tensors import FrameKind


class StageMetrics:
    """Updates the metrics of one stage. With a power `busy_watts` of 0, it counts no energy."""

    def __init__(self, cluster_index: int, stage_index: int, busy_watts: float) -> None:
        self._labels = (str(cluster_index), str(stage_index))
        self._busy_watts = busy_watts
        metrics.create_stage_series(*self._labels)

    def acted(
        self, kind: FrameKind, micro_batch: int, seconds: float, end_unit_seconds: float
    ) -> None:
        """The stage computed a pass of one micro-batch; `kind` is FORWARD or BACKWARD.

        `end_unit_seconds` is the part of the embedding or of the head.
        """
        direction = kind.name.lower()
        metrics.STAGE_PASS_SECONDS[direction].labels(*self._labels).observe(seconds)
        metrics.STAGE_END_UNIT_SECONDS.labels(*self._labels).inc(end_unit_seconds)
        self._use_energy(seconds)

    def computed_weight_gradients(self, seconds: float) -> None:
        """The stage computed the deferred gradients of one micro-batch, as a part of its backward pass."""
        metrics.STAGE_WEIGHT_GRADIENT_SECONDS.labels(*self._labels).inc(seconds)

    def evaluated(self, seconds: float) -> None:
        """The stage computed one micro-batch of an evaluation."""
        self._use_energy(seconds)

    def worked(self, num_blocks: int, num_samples: float, activation_bytes: int) -> None:
        """A micro-batch, or a slice of it, went forward and backward; `activation_bytes` went to the next stage."""
        metrics.STAGE_BLOCK_SAMPLES.labels(*self._labels).inc(num_blocks * num_samples)
        metrics.STAGE_SAMPLES.labels(*self._labels).inc(num_samples)
        metrics.STAGE_ACTIVATION_BYTES.labels(*self._labels).inc(activation_bytes)

    def updated(self, seconds: float) -> None:
        """The stage computed an optimizer step."""
        metrics.STAGE_UPDATE_SECONDS.labels(*self._labels).inc(seconds)
        self._use_energy(seconds)

    def waited(self, seconds: float) -> None:
        """The stage waited for one frame. Reported after each wait, because a mini-batch may take minutes."""
        metrics.STAGE_WAITING_SECONDS.labels(*self._labels).inc(seconds)

    def stepped(self, in_flight: int, stash_bytes: int) -> None:
        """The stage ran a mini-batch. The arguments are the most micro-batches and stashed bytes at once."""
        metrics.STAGE_STEPS.labels(*self._labels).inc()
        metrics.STAGE_IN_FLIGHT.labels(*self._labels).set(in_flight)
        metrics.STAGE_STASH_BYTES.labels(*self._labels).set(stash_bytes)

    def _use_energy(self, seconds: float) -> None:
        """Counts energy as watts times busy seconds: docs/scheduling.md (8)."""
        if self._busy_watts:
            metrics.ENERGY_JOULES.labels("model").inc(self._busy_watts * seconds)
