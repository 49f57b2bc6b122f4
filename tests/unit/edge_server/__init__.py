"""Tests of the global model."""
