"""FedAvg: averages the parameters of the clusters, weighted by their numbers of samples.

McMahan et al. 2017, Algorithm 1. Sums are in double precision and in cluster order. So the result does not
depend on the order in which clusters finish. The average of a single cluster equals that cluster bit for bit.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from collapipe.errors import InvalidInputError


def federated_average(
    names: Iterable[str],
    read: Sequence[Callable[[str], Tensor]],
    num_samples: Sequence[int],
) -> dict[str, Tensor]:
    """Averages one tensor after the other, so that at most one tensor of each cluster is in memory.

    Args:
        read: For each cluster, in cluster order, a function that reads a tensor by its name.
        num_samples: Training rows of each cluster, in cluster order.

    Raises:
        InvalidInputError: No cluster has samples, or the tensors of a name differ in shape or element type.
    """
    total = sum(num_samples)
    if total <= 0:
        raise InvalidInputError(
            f"clusters with {list(num_samples)} samples cannot be averaged: at least one needs samples"
        )
    return {
        name: _average(name, [read_one(name) for read_one in read], num_samples, total)
        for name in names
    }


def _average(
    name: str, tensors: Sequence[Tensor], num_samples: Sequence[int], total: int
) -> Tensor:
    first = tensors[0]
    if any(tensor.shape != first.shape or tensor.dtype != first.dtype for tensor in tensors):
        shapes = [(list(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        raise InvalidInputError(f"{name} differs between clusters: {shapes}")
    if not first.is_floating_point():
        return first  # integer tensors, such as position ids, are constants
    average = torch.zeros_like(first, dtype=torch.float64)
    for tensor, samples in zip(tensors, num_samples, strict=True):
        average += tensor.double() * (samples / total)
    return average.to(first.dtype)
