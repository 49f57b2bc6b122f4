import gc
import weakref

import torch
from torch import nn

from collapipe.models import ModelAdapter
from collapipe.stage_runtime.activation_stash import count_kept_bytes


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
