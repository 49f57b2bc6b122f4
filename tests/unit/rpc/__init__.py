"""Tests of gRPC servers and channels, with real servers on loopback."""
