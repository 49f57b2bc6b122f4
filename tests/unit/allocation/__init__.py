"""Tests of the mathematics of placement."""
