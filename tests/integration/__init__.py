"""Tests of real services in separate processes, which communicate over gRPC."""
