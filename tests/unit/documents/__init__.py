"""Tests of documents that survive a crash."""
