"""What limits the traffic of a host: pacing in the process, traffic control in the kernel, radios. No torch, no gRPC."""
