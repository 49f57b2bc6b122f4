"""Gradients of embedding tables, row by row.

A micro-batch uses a few hundred rows of a table with tens of thousands. Autograd would make a gradient of the
whole table for each micro-batch and add it to the one before. Here only the rows that were used are added, which
gives the same bits: within a micro-batch a row's gradients are summed first, as autograd does, and a row that was
not used adds zeros.
"""

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_NORM_BLOCK = 32
"""torch adds the squares of a tensor in this many interleaved sums, or in fewer."""


def use_row_gradients(module: nn.Module) -> dict[nn.Parameter, "RowGradients"]:
    """Replaces the gradients of the embedding tables in a unit. Returns these tables by their weights.

    A table whose weights have another use, such as a tied output layer, stays as it is.
    """
    uses = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    tables: dict[nn.Parameter, RowGradients] = {}
    for table in module.modules():
        if type(table) is not nn.Embedding:
            continue
        weight = cast(nn.Parameter, table.weight)
        has_rules = table.max_norm or table.scale_grad_by_freq or table.sparse
        if weight.requires_grad and uses[weight] == 1 and not has_rules:
            table.__class__ = RowGradients
            tables[weight] = cast(RowGradients, table)
    return tables


class RowGradients(nn.Embedding):
    """An embedding table that `use_row_gradients` has changed."""

    _used_rows: list[Tensor]
    """The rows that each micro-batch has used since the gradient was cleared, without duplicates."""

    def forward(self, input: Tensor) -> Tensor:
        looked_up: Tensor = _Lookup.apply(input, self.weight, self)  # type: ignore[no-untyped-call]
        return looked_up

    def add_gradient(self, indices: Tensor, gradient: Tensor) -> None:
        """Adds the gradient of what was looked up, whose last dimension is that of a row."""
        rows, positions = torch.unique(indices.reshape(-1), return_inverse=True)
        padding = -1
        if self.padding_idx is not None and (found := (rows == self.padding_idx).nonzero()).numel():
            padding = int(found)
        summed = torch.ops.aten.embedding_dense_backward(
            gradient.reshape(-1, self.embedding_dim), positions, len(rows), padding, False
        )
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
            self._used_rows = []
        self.weight.grad.index_add_(0, rows, summed)
        self._used_rows.append(rows)

    def used_gradient(self) -> Tensor | None:
        """Returns a gradient with the same norm, to the bit, which has only the rows that were used where possible."""
        gradient = self.weight.grad
        # With several threads, each one sums a part of the tensor, and other rows in the parts give other bits.
        one_thread = torch.get_num_threads() == 1 and self.weight.device.type == "cpu"
        if gradient is None or not one_thread or self.embedding_dim % _NORM_BLOCK:
            return gradient
        return gradient[torch.unique(torch.cat(self._used_rows))]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, table: RowGradients) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.table = table
        return functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (indices,) = ctx.saved_tensors
        ctx.table.add_gradient(indices, gradients[0])
        return None, None, None
