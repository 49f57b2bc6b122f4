"""What a stage does, as metrics of its cluster and of its host."""

from collapipe.stage_runtime import Action, StageObserver
from collapipe.telemetry import metrics


class StageMeter(StageObserver):
    """Counts what one stage does.

    Args:
        cluster_index: Of the stage.
        stage_index: Of the stage.
        busy_watts: Power beyond idle while the host computes, where no probe measures it; 0 counts no energy.
    """

    def __init__(self, cluster_index: int, stage_index: int, busy_watts: float) -> None:
        self._labels = (str(cluster_index), str(stage_index))
        self._busy_watts = busy_watts
        metrics.stage_opened(*self._labels)

    def acted(self, action: Action, seconds: float) -> None:
        metrics.stage_action(*self._labels, action.kind.name.lower(), seconds)
        self._use_energy(seconds)

    def evaluated(self, seconds: float) -> None:
        self._use_energy(seconds)

    def worked(self, num_units: int, num_samples: int, activation_bytes: int) -> None:
        metrics.stage_worked(
            *self._labels,
            num_units=num_units,
            num_samples=num_samples,
            activation_bytes=activation_bytes,
        )

    def updated(self, seconds: float) -> None:
        metrics.stage_updated(*self._labels, seconds)
        self._use_energy(seconds)

    def waited(self, seconds: float) -> None:
        metrics.stage_waited(*self._labels, seconds)

    def stepped(self, in_flight: int, stash_bytes: int) -> None:
        metrics.stage_step(*self._labels)
        metrics.stage_held(*self._labels, in_flight, stash_bytes)

    def _use_energy(self, seconds: float) -> None:
        """Without a probe, energy is watts times busy seconds: design (8)."""
        if self._busy_watts:
            metrics.energy_used("model", self._busy_watts * seconds)
