"""Tests of the stage host, without a network."""
