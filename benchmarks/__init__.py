"""Measurements of the running system; what is slow or noisy, and so is no test."""
