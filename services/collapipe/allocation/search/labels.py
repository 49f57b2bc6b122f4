"""Partial plans of one cluster, as arrays."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from collapipe.allocation.search.arrays import Floats, Ints


@dataclass(frozen=True)
class Labels:
    """Partial plans, one in each position of the arrays.

    A label runs the blocks from `start` to the last one on the devices from `device` to the head.

    Args:
        row: Row of the tables in `ClusterCosts`.
        device: First device of the partial plan; the number of devices stands for the edge server.
        last: Number of blocks on the edge server.
        mask: Bits of the devices in use.
        loop: Latency loop of the first stage, in seconds; 0 if no in-flight window can be too small for it.
        delay_cost: Without the cost of the bottleneck.
        bottleneck: In seconds.
        summed_cost: Energy and convergence.
        error: What codecs add to the convergence term.
        parent: Index of the label that this label extends, in the layer before.
        codec: Index, in the link tables, of the codec on the link after `device`.
    """

    row: Ints
    device: Ints
    start: Ints
    last: Ints
    mask: Ints
    loop: Floats
    delay_cost: Floats
    bottleneck: Floats
    summed_cost: Floats
    error: Floats
    parent: Ints
    codec: Ints

    def take(self, index: npt.NDArray[np.generic]) -> "Labels":
        return Labels(*(getattr(self, field.name)[index] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.row)


def joined(parts: list[Labels]) -> Labels:
    """Returns all labels of the parts, in their order; there must be a part."""
    if len(parts) == 1:
        return parts[0]
    return Labels(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Labels))
    )
