"""Averages the parameters of the clusters: FedAvg, and averages that a few poisoned clusters cannot move far.

FedAvg is Algorithm 1 of McMahan et al. 2017, weighted by numbers of samples. The coordinate-wise median and trimmed mean
are Algorithm 1 of Yin et al. 2018 (arXiv 1803.01498). All sums are in double precision and in cluster order. So the result does
not depend on the order in which clusters finish. The average of a single cluster equals that cluster bit for bit.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from collapipe.errors import InvalidInputError


def federated_average(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Averages one tensor. It takes the next cluster's tensor only when it has added the one before.

    Args:
        tensors: The tensor of each cluster, in cluster order.
        weights: Training rows of each cluster, in cluster order, or other weights.

    Raises:
        InvalidInputError: No cluster has samples, or the tensors differ in shape or element type.
    """
    total = sum(weights)
    if total <= 0:
        raise InvalidInputError(
            f"clusters with {list(weights)} samples cannot be averaged: at least one needs samples"
        )
    first: Tensor | None = None
    for tensor, weight in zip(tensors, weights, strict=True):
        if first is None:
            first, average = tensor, torch.zeros_like(tensor, dtype=torch.float64)
        _check_same(first, tensor)
        if first.is_floating_point():
            average += tensor.double().mul_(weight / total)
    assert first is not None
    # Integer tensors, such as position ids, are constants.
    return average.to(first.dtype) if first.is_floating_point() else first


def bounded_weights(num_samples: Sequence[int], max_share: float) -> list[float]:
    """Returns a weight for each cluster, so that none has a larger share than allowed.

    What the bounded clusters lose goes to the others, in proportion to their samples.

    Args:
        num_samples: Training rows of each cluster.
        max_share: Largest share of a cluster. If it is too small for so few clusters, all get equal weights.
    """
    total = sum(num_samples)
    if not total or max(num_samples) <= max_share * total:
        return list(num_samples)
    if max_share * sum(count > 0 for count in num_samples) <= 1:
        return [float(count > 0) for count in num_samples]
    shares = [count / total for count in num_samples]
    bounded: set[int] = set()
    while over := {i for i, share in enumerate(shares) if share > max_share and i not in bounded}:
        bounded |= over
        free = sum(count for i, count in enumerate(num_samples) if i not in bounded)
        left = 1 - max_share * len(bounded)
        shares = [
            max_share if i in bounded else left * count / free
            for i, count in enumerate(num_samples)
        ]
    return shares


def trimmed_mean(tensors: Sequence[Tensor], num_trimmed: int | None) -> Tensor:
    """Averages one tensor, value by value, without the largest and the smallest values. All clusters count the same.

    Args:
        tensors: The tensor of each cluster, in cluster order.
        num_trimmed: How many values are left out at each end; `None` for the median. It is reduced where no value
            would remain.

    Raises:
        InvalidInputError: The tensors differ in shape or element type.
    """
    first, count = tensors[0], len(tensors)
    for tensor in tensors:
        _check_same(first, tensor)
    if not first.is_floating_point():
        return first
    most = (count - 1) // 2
    trimmed = most if num_trimmed is None else min(num_trimmed, most)
    ordered = torch.stack([tensor.double() for tensor in tensors]).sort(dim=0).values
    return ordered[trimmed : count - trimmed].mean(dim=0).to(first.dtype)


def clipped_average(
    base: Tensor, tensors: Iterable[Tensor], weights: Sequence[float], scales: Sequence[float]
) -> Tensor:
    """Averages what the clusters have changed in one tensor, after the change of each cluster is scaled.

    Args:
        base: The tensor before the round.
        tensors: The tensor of each cluster, in cluster order.
        weights: As in `federated_average`.
        scales: Factor for the change of each cluster, from `clipping_scales`.

    Raises:
        InvalidInputError: No cluster has samples, or the tensors differ in shape or element type.
    """

    def scaled() -> Iterable[Tensor]:
        for tensor, scale in zip(tensors, scales, strict=True):
            _check_same(base, tensor)
            yield tensor if scale == 1.0 else base.double().lerp(tensor.double(), scale)

    if not base.is_floating_point():
        return federated_average(tensors, weights)
    return federated_average((tensor.double() for tensor in scaled()), weights).to(base.dtype)


def clipping_scales(norms: Sequence[float]) -> list[float]:
    """Returns factors that make the norm of no change larger than the median norm, the lower one of two.

    Args:
        norms: Euclidean norm of what each cluster has changed.
    """
    limit = sorted(norms)[(len(norms) - 1) // 2]
    return [limit / norm if norm > limit else 1.0 for norm in norms]


def _check_same(first: Tensor, tensor: Tensor) -> None:
    if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
        raise InvalidInputError(
            f"a tensor is {first.dtype} {list(first.shape)} in one cluster and {tensor.dtype} "
            f"{list(tensor.shape)} in another: all clusters must train the same model"
        )
