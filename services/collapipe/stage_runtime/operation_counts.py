"""What the units of a stage cost a processor, by formula: what an emulated processor is slowed by.

Products of matrices are counted exactly from the shapes; norms, activations and dropout are part of a profile's
sustained rate. Embedding tables multiply nothing: their cost is the gradient, which is as large as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from collapipe.models import Head

_GRADIENT_BYTES = 16
"""Bytes moved for a parameter of a table in a backward pass: its gradient is written once, and added to the sum."""
_UPDATE_BYTES = 28
"""Bytes moved for a parameter in a step of Adam: 4 read (weight, gradient, two moments), 3 written, in fp32."""


@dataclass(frozen=True)
class Work:
    """What an action asks of a processor: operations, and bytes that only move."""

    flops: float = 0.0
    moved_bytes: float = 0.0


class StageWork:
    """The work of a range of units.

    Args:
        modules: The units, in order.
        hidden_size: Values of a token between units.
        recomputes: Whether a backward pass runs the forward pass again.
    """

    def __init__(
        self, modules: Sequence[nn.Module], hidden_size: int, *, recomputes: bool = False
    ) -> None:
        head = modules[-1] if modules and isinstance(modules[-1], Head) else None
        segment = modules[:-1] if head is not None else modules
        self._segment_weights = sum(map(_linear_weights, segment))
        self._num_attentions = sum(1 for module in segment if _linear_weights(module))
        self._head_weights = _linear_weights(head) if head is not None else 0
        self._table_weights = sum(map(_table_weights, modules))
        self._num_parameters = sum(
            parameter.numel()
            for module in modules
            for parameter in module.parameters()
            if parameter.requires_grad
        )
        self._hidden_size = hidden_size
        self._recomputes = recomputes

    def forward(self, side: Mapping[str, Tensor]) -> Work:
        """The forward pass of a micro-batch.

        A weight multiplies each token: 2 operations. The head works on as many tokens as there are labels. Attention
        compares each token of a sequence with each: 4 operations for each pair and each of the hidden values.

        Args:
            side: Tensors beside the activation: `attention_mask` [batch, length], and perhaps `labels`.
        """
        batch, length = side["attention_mask"].shape
        labels = side.get("labels")
        flops = 2.0 * self._segment_weights * batch * length
        flops += 4.0 * self._num_attentions * batch * length**2 * self._hidden_size
        flops += 2.0 * self._head_weights * (batch * length if labels is None else labels.numel())
        return Work(flops)

    def backward(self, side: Mapping[str, Tensor]) -> Work:
        """The backward pass of a micro-batch: two products where the forward pass has one."""
        flops = self.forward(side).flops * (3 if self._recomputes else 2)
        return Work(flops, float(_GRADIENT_BYTES * self._table_weights))

    def update(self) -> Work:
        """An optimizer step."""
        return Work(moved_bytes=float(_UPDATE_BYTES * self._num_parameters))


def _linear_weights(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


def _table_weights(module: nn.Module) -> int:
    return sum(
        part.weight.numel()
        for part in module.modules()
        if isinstance(part, nn.Embedding) and part.weight.requires_grad
    )
