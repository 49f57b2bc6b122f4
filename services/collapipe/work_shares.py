"""How the compute time of a micro-batch is divided: each product of the forward pass has two in the backward pass."""

FORWARD_SHARE = 1 / 3
"""Share of the forward pass."""
WEIGHTS_SHARE = 1 / 3
"""Share of the gradients of the weights, which are a part of the backward pass."""
FROZEN_FORWARD_SHARE = 1 / 2
"""Share of the forward pass in a block whose weights are frozen, because a frozen weight needs no gradient."""
