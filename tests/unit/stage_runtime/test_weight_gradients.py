"""Gradients of linear layers in two parts against those of autograd, to the bit."""

import copy

import pytest
import torch
from torch import Tensor, nn

from collapipe.models import ModelAdapter
from collapipe.stage_runtime.activation_stash import count_kept_bytes
from collapipe.stage_runtime.weight_gradients import (
    SplitLinear,
    deferred_gradients,
    use_split_backward,
)

NUM_MICRO_BATCHES = 3


def inputs(number: int, shape: tuple[int, ...], strided: bool) -> Tensor:
    torch.manual_seed(number)
    values = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2] if strided else torch.randn(shape)
    return values.requires_grad_()


def gradient(number: int, outputs: Tensor, strided: bool) -> Tensor:
    torch.manual_seed(100 + number)
    values = torch.randn_like(outputs)
    return values.transpose(0, 1).contiguous().transpose(0, 1) if strided else values


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(6, 24), (1, 24), (3, 5, 24), (1, 1, 24)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("defers", [False, True], ids=["at once", "deferred"])
def test_gradients_have_the_bits_of_autograd(
    defers: bool, bias: bool, shape: tuple[int, ...], strided: bool
) -> None:
    plain = nn.Linear(24, 7, bias=bias)
    changed = copy.deepcopy(plain)
    layers = use_split_backward(changed)
    assert layers == [changed]
    left = []
    for number in range(NUM_MICRO_BATCHES):
        expected, found = (inputs(number, shape, strided) for _ in range(2))
        outputs, same = plain(expected), changed(found)
        assert torch.equal(outputs, same)
        outputs.backward(gradient(number, outputs, strided))
        with deferred_gradients(layers if defers else []) as deferred:
            same.backward(gradient(number, same, strided))
        assert expected.grad is not None and found.grad is not None
        assert torch.equal(expected.grad, found.grad)
        left.append(deferred)
    if defers:
        assert changed.weight.grad is None
    for deferred in left:
        deferred.compute()
    for one, other in zip(plain.parameters(), changed.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
        assert one.grad.stride() == other.grad.stride()


def test_layer_with_tied_weights_stays_as_it_is() -> None:
    unit = nn.ModuleDict({"table": nn.Embedding(9, 4), "out": nn.Linear(4, 9, bias=False)})
    unit["other"] = nn.Linear(4, 4)
    unit["out"].weight = unit["table"].weight
    assert use_split_backward(unit) == [unit["other"]]
    assert type(unit["out"]) is nn.Linear


def test_layer_without_training_stays_as_it_is() -> None:
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    assert use_split_backward(frozen) == []


def test_layers_with_the_same_inputs_keep_them_once() -> None:
    layers = [layer for _ in range(3) for layer in use_split_backward(nn.Linear(8, 4))]
    given = torch.randn(5, 8, requires_grad=True)
    outputs = torch.cat([layer(given) for layer in layers])
    with deferred_gradients(layers) as deferred:
        outputs.sum().backward()
    assert deferred.kept_bytes <= 4 * (5 * 8 + 3 * 5 * 4)
    deferred.compute()
    assert deferred.kept_bytes == 0


def test_failed_backward_pass_leaves_no_layer_deferring() -> None:
    layers = use_split_backward(nn.Linear(3, 3))
    with pytest.raises(ZeroDivisionError), deferred_gradients(layers):
        raise ZeroDivisionError
    assert layers[0].deferred is None


def test_deferred_gradients_take_no_more_memory_than_the_graph(bert: ModelAdapter) -> None:
    block = bert.build_unit(1)
    layers = use_split_backward(block)
    assert all(isinstance(layer, SplitLinear) for layer in layers)
    activation = torch.randn(2, 5, 16, requires_grad=True)
    side = {"attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    with count_kept_bytes([block]) as kept:
        outputs = block(activation, side)
    with deferred_gradients(layers) as deferred:
        outputs.sum().backward()
    assert 0 < deferred.kept_bytes <= sum(kept.values())
