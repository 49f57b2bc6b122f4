"""Tests of how clusters become one model."""
