"""Tests of the scheduler: its decisions, and what it keeps."""
