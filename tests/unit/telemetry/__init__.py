"""Tests of metrics, logs, sensors, estimates and telemetry sources."""
