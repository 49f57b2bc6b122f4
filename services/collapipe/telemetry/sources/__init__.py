"""The sources of the scheduler's telemetry. All of them return the same raw samples."""

from collapipe.telemetry.sources.samples import NEEDED as NEEDED
from collapipe.telemetry.sources.samples import Series as Series
from collapipe.telemetry.sources.samples import TelemetrySource as TelemetrySource
