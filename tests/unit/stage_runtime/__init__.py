"""Tests of stages, without a network."""
