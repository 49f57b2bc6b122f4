"""Estimates of clusters: the size of their activations."""

from dataclasses import dataclass

from collapipe.telemetry.sample_window import SampleWindow


@dataclass(frozen=True)
class ClusterEstimate:
    """Measured values of one cluster."""

    activation_bytes_per_sample: float | None = None
    """Bytes of one sample's activation, before a codec encodes it: for D_k of docs/scheduling.md (3)."""
    samples: float = 0.0
    """Number of samples behind that value, counted at every stage that sends activations."""


def estimate_clusters(window: SampleWindow) -> dict[str, ClusterEstimate]:
    """Computes the estimates of all clusters with samples, by the index of the cluster."""
    totals: dict[str, tuple[float, float]] = {}
    for group, cluster in window.groups("cluster"):
        grown = window.increases(group, "stage_activation_bytes_total", "stage_samples_total")
        if grown and grown[0] and grown[1]:  # The last stage sends no activations.
            num_bytes, samples = totals.get(cluster, (0.0, 0.0))
            totals[cluster] = num_bytes + grown[0], samples + grown[1]
    found = {}
    for cluster, (activation_bytes, samples) in sorted(totals.items()):
        what = f"cluster {cluster}: activation bytes per sample"
        per_sample = window.plausible(what, activation_bytes / samples, 1.0, 1e12)
        if per_sample is not None:
            found[cluster] = ClusterEstimate(per_sample, samples)
    return found
