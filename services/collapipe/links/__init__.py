"""What shapes a link: rates, radios and their emulation. No torch, no gRPC."""
