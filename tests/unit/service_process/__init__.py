"""Tests of what every process does before and after it serves."""
