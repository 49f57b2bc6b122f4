"""Shapers, which limit the traffic of a host, and drivers of radios, without torch and gRPC."""
