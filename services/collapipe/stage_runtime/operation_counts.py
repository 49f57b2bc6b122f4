"""Counts the operations of a stage from the shapes of its units, for an emulated processor.

Only products of matrices are counted. The time of norms, activation functions and dropout is part of the
sustained rate in a device profile. An embedding table multiplies nothing: its cost is the memory traffic of
its gradient, which is as large as the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from collapipe.models import Head, Unit
from collapipe.stage_runtime.weight_gradients import SplitLinear

_GRADIENT_BYTES = 16
"""Bytes moved for each parameter of a table in a backward pass: the gradient is written and accumulated."""
_UPDATE_BYTES = 28
"""Bytes moved for each parameter in a step of Adam: four fp32 values are read (weight, gradient, two
moments), and three are written."""


@dataclass(frozen=True)
class Work:
    """The cost of an action: operations, and bytes that are moved without an operation."""

    flops: float = 0.0
    moved_bytes: float = 0.0


class StageWork:
    """The work of the units of one stage, in order.

    Args:
        attention_size: Values in the queries of a token: heads times head size.
        recomputes: Whether a backward pass runs the forward pass again.
        splits: Whether a backward pass leaves the gradients of linear layers for later.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        attention_size: int,
        *,
        recomputes: bool = False,
        splits: bool = False,
    ) -> None:
        head = modules[-1] if modules and isinstance(modules[-1], Head) else None
        segment = modules[:-1] if head is not None else modules
        self._segment_weights = sum(map(_linear_weights, segment))
        self._num_attentions = sum(
            isinstance(module, Unit) and module.has_attention for module in segment
        )
        self._head_weights = _linear_weights(head) if head is not None else 0
        self._frozen_segment_weights = sum(_linear_weights(m, is_frozen=True) for m in segment)
        self._frozen_head_weights = _linear_weights(head, is_frozen=True) if head is not None else 0
        self._split_segment_weights = self._split_head_weights = 0
        if splits:
            self._split_segment_weights = sum(_linear_weights(m, (SplitLinear,)) for m in segment)
            self._split_head_weights = (
                _linear_weights(head, (SplitLinear,)) if head is not None else 0
            )
        self._table_weights = sum(map(_table_weights, modules))
        self._num_parameters = sum(
            parameter.numel()
            for module in modules
            for parameter in module.parameters()
            if parameter.requires_grad
        )
        self._attention_size = attention_size
        self._recomputes = recomputes

    def forward(self, side: Mapping[str, Tensor], num_tokens: int | None = None) -> Work:
        """Returns the work of the forward pass of a micro-batch or a slice.

        Each weight costs two operations for each token. The head works on as many tokens as there are labels.
        Attention costs four operations for each value of a query and each pair of tokens of a sequence. Slices divide
        these pairs among them: the later one of two tokens decides.

        Args:
            num_tokens: Tokens of a row in this pass. Without it, all that the attention mask covers.
        """
        batch, length = side["attention_mask"].shape
        tokens = length if num_tokens is None else num_tokens
        flops = _products(side, tokens, self._segment_weights, self._head_weights)
        pairs = batch * tokens * (2 * length - tokens)
        return Work(flops + 4.0 * self._num_attentions * pairs * self._attention_size)

    def generate(self, num_tokens: int, num_keys: int) -> Work:
        """Returns the work of a pass over some tokens of one sequence, which see `num_keys` tokens, themselves included.

        The head works on one token.
        """
        flops = 2.0 * (self._segment_weights * num_tokens + self._head_weights)
        pairs = num_tokens * num_keys
        return Work(flops + 4.0 * self._num_attentions * pairs * self._attention_size)

    def backward(self, side: Mapping[str, Tensor], num_tokens: int | None = None) -> Work:
        """Returns the work of the backward pass: two products for each product of the forward pass, or one if its weight
        is frozen.

        The work that is left for later is not counted.
        """
        flops = self.forward(side, num_tokens).flops * (3 if self._recomputes else 2)
        flops -= _products(
            side, num_tokens, self._frozen_segment_weights, self._frozen_head_weights
        )
        flops -= self.weight_gradients(side, num_tokens).flops
        return Work(flops, float(_GRADIENT_BYTES * self._table_weights))

    def weight_gradients(self, side: Mapping[str, Tensor], num_tokens: int | None = None) -> Work:
        """Returns the work that the backward pass of a micro-batch leaves for later."""
        return Work(
            _products(side, num_tokens, self._split_segment_weights, self._split_head_weights)
        )

    def update(self) -> Work:
        return Work(moved_bytes=float(_UPDATE_BYTES * self._num_parameters))


def _products(
    side: Mapping[str, Tensor], num_tokens: int | None, segment_weights: int, head_weights: int
) -> float:
    """Returns the operations of one product of each weight with each token, or with each label in the head."""
    batch, length = side["attention_mask"].shape
    tokens = batch * (length if num_tokens is None else num_tokens)
    labels = side.get("labels")
    num_labels = tokens if labels is None else labels.numel()
    return 2.0 * (segment_weights * tokens + head_weights * num_labels)


def _linear_weights(
    module: nn.Module,
    kinds: tuple[type[nn.Linear | Conv1D], ...] = (nn.Linear, Conv1D),
    *,
    is_frozen: bool = False,
) -> int:
    """Counts the weights of linear layers, or only those that are frozen. The layers of GPT-2 are called `Conv1D`."""
    return sum(
        part.nf * part.nx if isinstance(part, Conv1D) else part.in_features * part.out_features
        for name, part in module.named_modules()
        # The original of a module that LoRA trains as a whole is never run.
        if isinstance(part, kinds)
        and "original_module" not in name
        and not (is_frozen and part.weight.requires_grad)
    )


def _table_weights(module: nn.Module) -> int:
    return sum(
        part.weight.numel()
        for part in module.modules()
        if isinstance(part, nn.Embedding) and part.weight.requires_grad
    )
