"""The sources of the scheduler's telemetry. All of them return the same raw samples."""

from collapipe.telemetry.sources.samples import NEEDED, Series, TelemetrySource

__all__ = ["NEEDED", "Series", "TelemetrySource"]
