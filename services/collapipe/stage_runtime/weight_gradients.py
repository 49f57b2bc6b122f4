"""Gradients of linear layers in two parts: first those of the inputs, and later those of the weights.

A backward pass through a stage needs only the gradients of the inputs of its layers, and the stage before it waits
for the result. The gradients of the weights can wait until the stage has nothing else to do. Here the products are
those of autograd, so that the sums are the same to the bit.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Needed(NamedTuple):
    """What the gradients of one layer are computed from."""

    layer: "SplitLinear"
    inputs: Tensor
    """[n, in]"""
    gradient: Tensor
    """Gradient of the outputs, [n, out]."""
    gradient_of_sum: Tensor
    """The same, in the shape in which it was added to the bias."""

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Returns the gradients of the weights and of the bias, with the operations of autograd."""
        of_bias = None
        if self.layer.bias is not None:
            of_bias = self.gradient_of_sum.sum(tuple(range(self.gradient_of_sum.ndim - 1)))
        return self.gradient.t().mm(self.inputs), of_bias


class DeferredGradients:
    """The gradients of linear layers that the backward pass of one micro-batch has left for later.

    A layer must run only once in a forward pass.
    """

    def __init__(self) -> None:
        self._needed: list[_Needed] = []

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors that are kept. Layers with the same inputs share them."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for needed in self._needed
            for tensor in needed[1:]
        }
        return sum(storages.values())

    def add(self, needed: _Needed) -> None:
        self._needed.append(needed)

    @torch.no_grad()
    def compute(self) -> None:
        """Adds the gradients to those of the parameters. Call it in the order of the micro-batches."""
        while self._needed:
            needed = self._needed.pop()
            parameters = needed.layer.weight, needed.layer.bias
            for parameter, gradient in zip(parameters, needed.gradients(), strict=True):
                if gradient is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient


class SplitLinear(nn.Linear):
    """A linear layer that `use_split_backward` has changed."""

    deferred: DeferredGradients | None = None
    """Where a backward pass leaves the gradients of the weights; `None` if it computes them at once."""

    def forward(self, input: Tensor) -> Tensor:
        outputs: Tensor = _Linear.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return outputs


def use_split_backward(module: nn.Module) -> list[SplitLinear]:
    """Makes the linear layers of a unit able to defer the gradients of their weights. Returns these layers.

    A layer whose weights have another use, such as a tied output layer, stays as it is: autograd adds the gradients
    of both uses before it adds them to those of earlier micro-batches.
    """
    uses = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    layers = []
    for layer in module.modules():
        if type(layer) is nn.Linear and all(
            parameter.requires_grad and uses[parameter] == 1 for parameter in layer.parameters()
        ):
            layer.__class__ = SplitLinear
            layers.append(cast(SplitLinear, layer))
    return layers


@contextmanager
def deferred_gradients(layers: Iterable[SplitLinear]) -> Iterator[DeferredGradients]:
    """Makes a backward pass in this context leave out the gradients of the weights of these layers."""
    deferred = DeferredGradients()
    for layer in layers:
        layer.deferred = deferred
    try:
        yield deferred
    finally:
        for layer in layers:
            layer.deferred = None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLinear
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer = layer
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        layer: SplitLinear = ctx.layer
        flat = gradients[0].reshape(-1, layer.out_features)
        # For other inputs, torch adds the bias after the product, and its gradient is summed in another order.
        is_fused = inputs.ndim <= 3 and inputs.is_contiguous()
        needed = _Needed(
            layer,
            inputs.detach().reshape(-1, layer.in_features),
            flat,
            flat if is_fused else gradients[0],
        )
        of_inputs = flat.mm(weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
        if layer.deferred is None:
            return of_inputs, *needed.gradients(), None
        layer.deferred.add(needed)
        return of_inputs, None, None, None
