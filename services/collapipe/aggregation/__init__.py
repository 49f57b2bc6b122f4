"""How the clusters' models become one."""

from collapipe.aggregation.fedavg import federated_average

__all__ = ["federated_average"]
