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
