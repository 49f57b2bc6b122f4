"""Federated averaging of the models of clients."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Contribution:
    """The weights of a client after its local steps. The optimizer state stays with the client."""

    cluster_index: int
    num_samples: int
    weights: Mapping[str, Tensor]


def average(arrived: Iterable[Contribution]) -> dict[str, Tensor]:
    """Returns the average weighted by samples. It sums in cluster order, whatever the order of arrival."""
    contributions = sorted(arrived, key=lambda contribution: contribution.cluster_index)
    total = sum(contribution.num_samples for contribution in contributions)
    averaged: dict[str, Tensor] = {}
    for name, tensor in contributions[0].weights.items():
        mean = torch.zeros(tensor.shape, dtype=torch.float64)
        for contribution in contributions:
            share = contribution.num_samples / total
            mean = mean + share * contribution.weights[name].double()
        averaged[name] = mean.to(torch.float32)
    return averaged


def fixed_point_average(
    arrived: Iterable[Contribution], before: Mapping[str, Tensor], total_samples: int
) -> dict[str, Tensor]:
    """Returns the average of secure aggregation, without its masks: each change is an integer, in units of 2^-28.

    Args:
        before: The weights before the round.
        total_samples: Twice the rows of all clusters, late ones included.
    """
    contributions = list(arrived)
    num_samples = sum(contribution.num_samples for contribution in contributions)
    averaged: dict[str, Tensor] = {}
    for name, tensor in before.items():
        total = torch.zeros(tensor.shape, dtype=torch.int64)
        for contribution in contributions:
            change = contribution.weights[name].double() - tensor.double()
            share = contribution.num_samples / total_samples
            total += torch.round(change * share * 2**28).long()
        change = total.double() / 2**28 * (total_samples / num_samples)
        averaged[name] = (tensor.double() + change).to(torch.float32)
    return averaged
