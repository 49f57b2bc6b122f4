"""Averages the models of the clusters into the global model."""

from collapipe.aggregation.fedavg import federated_average

__all__ = ["federated_average"]
