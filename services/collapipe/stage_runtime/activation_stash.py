"""Keeps the tensors that a stage needs for its backward passes, and counts their bytes."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collapipe.stage_runtime.weight_gradients import DeferredGradients


@dataclass
class StashedMicroBatch:
    """What a stage keeps of one micro-batch until its backward pass."""

    inputs: Tensor | None
    outputs: Tensor | None
    """`None` if the backward pass computes the outputs again."""
    side: dict[str, Tensor]
    kept_bytes: int
    sent_bytes: int = 0
    """Bytes of the frame that the stage sent to the next stage."""


class ActivationStash:
    """The micro-batches of one mini-batch that wait at one stage for their backward pass, or for a part of it.

    Args:
        modules: The units of the stage.
        keeps_graph: Whether the outputs are kept, with what autograd needs. Otherwise a backward pass runs the forward
            pass again, or there is none.
    """

    def __init__(self, modules: Sequence[nn.Module], *, keeps_graph: bool) -> None:
        self._modules = modules
        self._keeps_graph = keeps_graph
        self._micro_batches: dict[int, StashedMicroBatch] = {}
        self._deferred: deque[DeferredGradients] = deque()
        self._bytes_per_token: float | None = None
        self.most_micro_batches = 0
        """Most micro-batches that were held at once."""
        self.most_bytes = 0
        """Most bytes that were held at once."""

    def run_forward(
        self,
        micro_batch: int,
        inputs: Tensor | None,
        side: dict[str, Tensor],
        run: Callable[[], Tensor | None],
    ) -> tuple[Tensor | None, StashedMicroBatch]:
        """Calls `run`, the forward pass. Returns its outputs, and the entry that the stash keeps."""
        num_tokens = max(side["attention_mask"].numel(), 1)
        with torch.set_grad_enabled(self._keeps_graph):
            if not self._keeps_graph or self._bytes_per_token is not None:
                outputs = run()
            else:  # Counting takes time, so it is done for the first micro-batch of a mini-batch only.
                with count_kept_bytes(self._modules) as kept:
                    outputs = run()
                self._bytes_per_token = sum(kept.values()) / num_tokens
        if not self._keeps_graph:
            kept_bytes = inputs.nbytes if inputs is not None else 0
        else:
            kept_bytes = round((self._bytes_per_token or 0.0) * num_tokens)
        entry = StashedMicroBatch(inputs, outputs if self._keeps_graph else None, side, kept_bytes)
        self._micro_batches[micro_batch] = entry
        self._count()
        return outputs, entry

    def pop(self, micro_batch: int) -> StashedMicroBatch:
        return self._micro_batches.pop(micro_batch)

    def defer(self, gradients: DeferredGradients) -> None:
        """Keeps what is left of the micro-batch after its backward pass."""
        self._deferred.append(gradients)
        self._count()

    def pop_deferred(self) -> DeferredGradients:
        """Returns the oldest deferred gradients."""
        return self._deferred.popleft()

    def _count(self) -> None:
        kept = [stashed.kept_bytes for stashed in self._micro_batches.values()]
        kept += [gradients.kept_bytes for gradients in self._deferred]
        self.most_micro_batches = max(self.most_micro_batches, len(kept))
        self.most_bytes = max(self.most_bytes, sum(kept))


@contextmanager
def count_kept_bytes(modules: Sequence[nn.Module]) -> Iterator[dict[int, int]]:
    """Counts the bytes that autograd keeps of the forward passes in this context. Changes no result.

    Args:
        modules: Their weights and buffers are not counted.

    Yields:
        The bytes of each storage, by its identity. Complete when the forward passes are done.
    """
    own = {
        tensor.untyped_storage()._cdata
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:  # Unlike `data_ptr`, fake tensors have it, too.
            kept.setdefault(storage._cdata, storage.nbytes())
        # Without `detach`, an operation that keeps its own output would keep its graph in a reference cycle.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
