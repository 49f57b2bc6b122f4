"""Gradients of linear layers and embedding tables against those of autograd, to the bit, and what a stage keeps for them."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from collapipe.models import ModelAdapter
from collapipe.stage_runtime.activation_stash import count_kept_bytes
from collapipe.stage_runtime.optimizer import squared_norms
from collapipe.stage_runtime.row_gradients import RowGradients, use_row_gradients
from collapipe.stage_runtime.weight_gradients import (
    SplitLinear,
    deferred_gradients,
    use_split_backward,
)

# --- gradients of linear layers in two parts


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
    for number in range(3):
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


def test_tied_and_frozen_layers_stay_as_they_are() -> None:
    unit = nn.ModuleDict({"table": nn.Embedding(9, 4), "out": nn.Linear(4, 9, bias=False)})
    unit["other"] = nn.Linear(4, 4)
    unit["frozen"] = nn.Linear(4, 4)
    unit["frozen"].weight.requires_grad_(False)
    unit["out"].weight = unit["table"].weight
    assert use_split_backward(unit) == [unit["other"]]
    assert type(unit["out"]) is nn.Linear


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


# --- gradients of embedding tables

ROWS = 500


def table(width: int, padding: int | None = None) -> nn.Embedding:
    torch.manual_seed(3)
    return nn.Embedding(ROWS, width, padding_idx=padding)


def run(table: nn.Embedding, num_micro_batches: int = 5) -> Tensor:
    """Runs micro-batches in which rows occur several times. Returns the gradient."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(num_micro_batches):
        indices = torch.randint(0, 60, (4, 16), generator=generator)
        looked_up = table(indices)
        looked_up.backward(torch.randn(looked_up.shape, generator=generator))
    assert table.weight.grad is not None
    return table.weight.grad


@pytest.mark.parametrize("padding", [None, 0, 17, 300])
@pytest.mark.parametrize("width", [5, 32, 48, 384])
def test_gradient_and_norm_of_a_table_have_the_bits_of_autograd(
    width: int, padding: int | None
) -> None:
    plain = table(width, padding)
    changed = copy.deepcopy(plain)
    tables = use_row_gradients(changed)
    assert list(tables) == [changed.weight]
    rows = tables[changed.weight]
    for _ in range(2):  # The second time, the gradient was cleared in between.
        expected, found = run(plain), run(changed)
        assert torch.equal(expected.view(torch.int32), found.view(torch.int32))
        used = rows.used_gradient()
        assert used is not None
        # For some widths, the sums of torch depend on the number of rows, so the norm needs all of them.
        assert len(used) <= (ROWS if width % 32 else 60)
        assert squared_norms([used]) == squared_norms([expected])
        plain.weight.grad = changed.weight.grad = None
    assert rows.used_gradient() is None


def test_tables_with_another_use_or_rule_stay_as_they_are() -> None:
    tied = nn.ModuleDict({"table": table(8), "output": nn.Linear(8, ROWS)})
    tied["output"].weight = tied["table"].weight
    frozen = table(8).requires_grad_(False)
    others = [nn.Embedding(4, 8, max_norm=1.0), nn.Embedding(4, 8, scale_grad_by_freq=True)]
    for module in (tied, frozen, *others):
        assert use_row_gradients(module) == {}
        assert not any(isinstance(each, RowGradients) for each in module.modules())


# --- bytes that are kept for a backward pass


def test_kept_bytes_are_counted_without_weights() -> None:
    layer = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs = torch.randn(5, 8, requires_grad=True)
    with count_kept_bytes([layer]) as kept:
        layer(inputs)
    # Each product keeps its input. The input of the second product is also the output that the ReLU keeps.
    assert sum(kept.values()) == 4 * (5 * 8 + 5 * 16)


def test_counting_changes_no_gradient(bert: ModelAdapter) -> None:
    block = bert.build_unit(1).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    activation = torch.randn(2, 5, 16)
    side = {"attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    gradients = []
    for counts in (False, True):
        block.zero_grad()
        if counts:
            with count_kept_bytes([block]):
                outputs = block(activation, side)
        else:
            outputs = block(activation, side)
        outputs.square().sum().backward()
        gradients.append([p.grad.clone() for p in block.parameters() if p.grad is not None])
    assert gradients[0]
    assert all(map(torch.equal, *gradients))


def test_counting_makes_no_reference_cycle() -> None:
    gc.disable()
    try:
        inputs = torch.randn(5, requires_grad=True)
        with count_kept_bytes([]):
            outputs = inputs.exp()  # autograd keeps the output of `exp`
        graph = weakref.ref(outputs)
        del outputs
        assert graph() is None
    finally:
        gc.enable()


def test_pass_without_a_graph_keeps_nothing() -> None:
    with count_kept_bytes([]) as kept, torch.no_grad():
        torch.randn(5, requires_grad=True).exp()
    assert sum(kept.values()) == 0
