"""Tests of the gRPC factories, over real loopback servers."""
