"""How much a forward pass keeps for its backward pass."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class KeptBytes:
    """Bytes that autograd keeps, weights left out; complete when the pass is done."""

    total: int = 0


@contextmanager
def count_kept_bytes(modules: Iterable[nn.Module]) -> Iterator[KeptBytes]:
    """Counts what autograd keeps of the forward passes within; changes nothing about them.

    Args:
        modules: Whose weights and buffers are not counted.
    """
    own = {
        tensor.untyped_storage().data_ptr()
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    seen: set[int] = set()
    kept = KeptBytes()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept.total += storage.nbytes()
        # an output that is kept as it is would keep its own graph, and with it itself
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
