"""Where the scheduler's telemetry comes from: sources that return the same raw samples, and the arithmetic on them."""

from collapipe.telemetry.sources.samples import NEEDED, Series, TelemetrySource, increase, latest

__all__ = ["NEEDED", "Series", "TelemetrySource", "increase", "latest"]
