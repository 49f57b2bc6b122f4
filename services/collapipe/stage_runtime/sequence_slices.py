"""Cuts micro-batches of language models along their rows into slices (TeraPipe, Li et al. 2021).

A token needs only the tokens before it, so the slices of a micro-batch can follow each other through the pipeline. A
single long row then keeps all stages busy.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from collapipe.errors import InvalidInputError
from collapipe.models import KeyValues


def cut_into_slices(tensors: Mapping[str, Tensor], num_slices: int) -> list[dict[str, Tensor]]:
    """Cuts the tensors of a micro-batch, each [rows, tokens], into slices of nearly equal length.

    The attention mask of a slice also covers the slices before it. One slice is the micro-batch itself.

    Raises:
        InvalidInputError: The rows have fewer tokens than there are slices.
    """
    if num_slices == 1:
        return [dict(tensors)]
    length = tensors["attention_mask"].shape[1]
    if length < num_slices:
        raise InvalidInputError(
            f"a micro-batch with rows of {length} tokens cannot be cut into {num_slices} slices: lower "
            "schedule.sequence_slices"
        )
    bounds = [length * index // num_slices for index in range(num_slices + 1)]
    return [
        {
            name: tensor[:, 0 if name == "attention_mask" else start : stop].contiguous()
            for name, tensor in tensors.items()
        }
        for start, stop in pairwise(bounds)
    ]


class _Kept(NamedTuple):
    """The keys or the values of one slice in one layer."""

    output: Tensor
    """A part of the graph of its own slice."""
    leaf: Tensor
    """The same values. Later slices use them, and leave their gradient here."""


class SliceKeyValues(KeyValues):
    """The keys and values of the slices of one micro-batch at one stage.

    Each slice has a graph of its own, so that its backward pass can run as soon as its gradient arrives, and frees the
    graph. The graph of a slice begins at leaves that have the keys and values of the slices before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[dict[int, tuple[_Kept, _Kept]]] = []
        """For each slice, the keys and the values of each layer."""

    def begin_slice(self) -> None:
        """Call it before the forward pass of each slice, in order."""
        self._kept.append({})

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, **_: object
    ) -> tuple[Tensor, Tensor]:
        own, before = (keys, values), self._kept[:-1]
        self._kept[-1][layer_idx] = _kept(keys), _kept(values)
        if not before:
            return own
        seen_keys, seen_values = (
            torch.cat([*(kept[layer_idx][i].leaf for kept in before), own[i]], dim=-2)
            for i in range(2)
        )
        return seen_keys, seen_values

    @property
    def last_slice_bytes(self) -> int:
        """Bytes of the keys and values of the last slice, with their gradients."""
        return 2 * sum(kept.leaf.nbytes for pair in self._kept[-1].values() for kept in pair)

    def pop_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Removes the last slice. Returns those of its keys and values that later slices have used, and their gradients.

        Call it before the backward pass of each slice, from the last one to the first.
        """
        used = [
            kept
            for pair in self._kept.pop().values()
            for kept in pair
            if kept.leaf.grad is not None
        ]
        return [kept.output for kept in used], [
            kept.leaf.grad for kept in used if kept.leaf.grad is not None
        ]


def _kept(output: Tensor) -> _Kept:
    return _Kept(output, output.detach().requires_grad_(output.requires_grad))
