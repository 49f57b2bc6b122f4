"""Metrics, logs, sensors and the estimates that the scheduler computes from metrics."""
