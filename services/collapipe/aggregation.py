"""FedAvg: averages the parameters of the clusters, weighted by their numbers of samples.

McMahan et al. 2017, Algorithm 1. Sums are in double precision and in cluster order. So the result does not
depend on the order in which clusters finish. The average of a single cluster equals that cluster bit for bit.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from collapipe.errors import InvalidInputError


def federated_average(tensors: Iterable[Tensor], num_samples: Sequence[int]) -> Tensor:
    """Averages one tensor. It takes the next cluster's tensor only when it has added the one before.

    Args:
        tensors: The tensor of each cluster, in cluster order.
        num_samples: Training rows of each cluster, in cluster order.

    Raises:
        InvalidInputError: No cluster has samples, or the tensors differ in shape or element type.
    """
    total = sum(num_samples)
    if total <= 0:
        raise InvalidInputError(
            f"clusters with {list(num_samples)} samples cannot be averaged: at least one needs samples"
        )
    first: Tensor | None = None
    for tensor, samples in zip(tensors, num_samples, strict=True):
        if first is None:
            first, average = tensor, torch.zeros_like(tensor, dtype=torch.float64)
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise InvalidInputError(
                f"a tensor is {first.dtype} {list(first.shape)} in one cluster and {tensor.dtype} "
                f"{list(tensor.shape)} in another: all clusters must train the same model"
            )
        if first.is_floating_point():
            average += tensor.double().mul_(samples / total)
    assert first is not None
    # Integer tensors, such as position ids, are constants.
    return average.to(first.dtype) if first.is_floating_point() else first
