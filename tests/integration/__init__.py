"""Real services in separate processes, over real gRPC."""
