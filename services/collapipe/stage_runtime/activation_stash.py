"""Keeps the tensors that a stage needs for its backward passes, and counts their bytes."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collapipe.stage_runtime.sequence_slices import SliceKeyValues
from collapipe.stage_runtime.weight_gradients import DeferredGradients


@dataclass
class StashedPass:
    """What a stage keeps of one micro-batch, or of one slice of it, until its backward pass."""

    inputs: Tensor | None
    outputs: Tensor | None
    """`None` if the backward pass computes the outputs again."""
    side: dict[str, Tensor]
    num_tokens: int
    """Tokens of a row."""
    kept_bytes: int
    sent_bytes: int = 0
    """Bytes of the frame that the stage sent to the next stage."""


class ActivationStash:
    """The micro-batches of one mini-batch that wait at one stage for their backward pass, or for a part of it.

    Args:
        modules: The units of the stage.
        num_slices: Slices of a micro-batch.
        keeps_graph: Whether the outputs are kept, with what autograd needs. Otherwise a backward pass runs the forward
            pass again, or there is none.
    """

    def __init__(self, modules: Sequence[nn.Module], num_slices: int, *, keeps_graph: bool) -> None:
        self._modules = modules
        self._num_slices = num_slices
        self._keeps_graph = keeps_graph
        self._passes: dict[tuple[int, int], StashedPass] = {}
        """By micro-batch and slice."""
        self._key_values: dict[int, SliceKeyValues] = {}
        """By micro-batch; empty if micro-batches are not cut into slices."""
        self._deferred: deque[DeferredGradients] = deque()
        self._bytes_per_token: dict[int, float] = {}
        """By slice."""
        self.most_micro_batches = 0
        """Most micro-batches that were held at once. Slices of several micro-batches count as one if they would fill it."""
        self.most_bytes = 0
        """Most bytes that were held at once."""

    def run_forward(
        self,
        place: tuple[int, int],
        inputs: Tensor | None,
        side: dict[str, Tensor],
        num_tokens: int,
        run: Callable[[SliceKeyValues | None], Tensor | None],
    ) -> tuple[Tensor | None, StashedPass]:
        """Calls `run`, the forward pass. Returns its outputs, and the entry that the stash keeps.

        Args:
            place: The micro-batch and the slice.
            num_tokens: Tokens of a row in this pass.
            run: Takes the keys and values of the earlier slices; `None` for a micro-batch that is not cut.
        """
        slice_index = place[1]
        all_tokens = max(num_tokens * side["attention_mask"].shape[0], 1)
        earlier = self.begin_slice(*place)
        with torch.set_grad_enabled(self._keeps_graph):
            if not self._keeps_graph or slice_index in self._bytes_per_token:
                outputs = run(earlier)
            else:  # Counting takes time, so it is done for the first micro-batch of a mini-batch only.
                with count_kept_bytes(self._modules) as kept:
                    outputs = run(earlier)
                self._bytes_per_token[slice_index] = sum(kept.values()) / all_tokens
        if not self._keeps_graph:
            kept_bytes = inputs.nbytes if inputs is not None else 0
        else:
            kept_bytes = round(self._bytes_per_token[slice_index] * all_tokens)
            kept_bytes += earlier.last_slice_bytes if earlier is not None else 0
        kept_outputs = outputs if self._keeps_graph else None
        entry = StashedPass(inputs, kept_outputs, side, num_tokens, kept_bytes)
        self._passes[place] = entry
        self._count()
        if not self._keeps_graph and slice_index + 1 == self._num_slices:
            self._key_values.pop(place[0], None)
        return outputs, entry

    def begin_slice(self, micro_batch: int, slice_index: int) -> SliceKeyValues | None:
        """Returns where a forward pass finds the keys and values of earlier slices; `None` if there is one slice."""
        if self._num_slices == 1:
            return None
        if slice_index == 0:
            self._key_values[micro_batch] = SliceKeyValues()
        earlier = self._key_values[micro_batch]
        earlier.begin_slice()
        return earlier

    def tokens_before(self, micro_batch: int, slice_index: int) -> int:
        """Returns the tokens of a row in the slices before one whose forward pass comes next."""
        return sum(self._passes[micro_batch, index].num_tokens for index in range(slice_index))

    def slices(self, micro_batch: int) -> list[StashedPass]:
        """Returns all slices of a micro-batch that no backward pass has popped."""
        return [self._passes[micro_batch, index] for index in range(self._num_slices)]

    def pop(
        self, micro_batch: int, slice_index: int
    ) -> tuple[StashedPass, tuple[list[Tensor], list[Tensor]]]:
        """Returns an entry, and what `SliceKeyValues.pop_gradients` returns."""
        entry = self._passes.pop((micro_batch, slice_index))
        if micro_batch not in self._key_values:
            return entry, ([], [])
        gradients = self._key_values[micro_batch].pop_gradients()
        if slice_index == 0:
            del self._key_values[micro_batch]
        return entry, gradients

    def defer(self, gradients: DeferredGradients) -> None:
        """Keeps what is left of the micro-batch after its backward pass."""
        self._deferred.append(gradients)
        self._count()

    def pop_deferred(self) -> DeferredGradients:
        """Returns the oldest deferred gradients."""
        return self._deferred.popleft()

    def _count(self) -> None:
        kept = [stashed.kept_bytes for stashed in self._passes.values()]
        kept += [gradients.kept_bytes for gradients in self._deferred]
        num_held = math.ceil(len(kept) / self._num_slices)
        self.most_micro_batches = max(self.most_micro_batches, num_held)
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
