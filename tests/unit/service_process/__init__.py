"""Tests of the process of a service."""
