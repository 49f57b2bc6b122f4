"""Estimates of the pipeline of a cluster: the size of its activations."""

from dataclasses import dataclass

from collapipe.telemetry.sample_window import SampleWindow


@dataclass(frozen=True)
class ClusterEstimate:
    """Measured values of one cluster."""

    activation_bytes_per_sample: float | None = None
    """Activations that a stage sends for one sample, before any codec, for D_k of docs/scheduling.md (3)."""
    samples: float = 0.0
    """Number of samples behind it, counted at every stage that sends activations."""


def estimate_clusters(window: SampleWindow) -> dict[str, ClusterEstimate]:
    """Computes the estimates of all clusters with samples, by the index of the cluster."""
    totals: dict[str, list[float]] = {}
    for group, cluster in window.groups("cluster"):
        grown = window.increases(group, "stage_activation_bytes_total", "stage_samples_total")
        if grown and grown[0] and grown[1]:  # the last stage sends no activations
            total = totals.setdefault(cluster, [0.0, 0.0])
            total[0] += grown[0]
            total[1] += grown[1]
    found = {}
    for cluster, (activation_bytes, samples) in sorted(totals.items()):
        what = f"cluster {cluster}: activation bytes per sample"
        per_sample = window.plausible(what, activation_bytes / samples, 1.0, 1e12)
        if per_sample is not None:
            found[cluster] = ClusterEstimate(per_sample, samples)
    return found
