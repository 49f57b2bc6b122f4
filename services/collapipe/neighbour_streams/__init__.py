"""The data plane: activations and their gradients travel between neighbouring stages."""
