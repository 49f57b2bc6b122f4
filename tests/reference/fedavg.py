"""FedAvg over clients that train on their own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Contribution:
    """What a client sends after its local steps. Its optimizer stays with it."""

    cluster_index: int
    num_samples: int
    weights: Mapping[str, Tensor]


def average(arrived: Iterable[Contribution]) -> dict[str, Tensor]:
    """Averages by samples, in cluster order, whatever the order of arrival."""
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
