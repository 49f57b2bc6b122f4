"""Shapers, which limit the traffic of a host, and drivers of radios. Nothing here needs torch or gRPC."""
