"""Tests of what survives a death."""
