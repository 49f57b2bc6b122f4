"""Gradients of embedding tables against those of autograd, to the bit."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from collapipe.stage_runtime.optimizer import squared_norms
from collapipe.stage_runtime.row_gradients import RowGradients, use_row_gradients

ROWS = 500


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("padding", [None, 0, 17, 300])
@pytest.mark.parametrize("width", [5, 32, 48, 384])
def test_gradient_and_norm_have_the_bits_of_autograd(width: int, padding: int | None) -> None:
    plain = table(width, padding)
    changed = copy.deepcopy(plain)
    tables = use_row_gradients(changed)
    assert list(tables) == [changed.weight]
    for _ in range(2):  # The second time, the gradient was cleared in between.
        expected, found = run(plain), run(changed)
        assert same_bits(expected, found)
        assert squared_norms([tables[changed.weight].used_gradient()]) == squared_norms([expected])
        plain.weight.grad = changed.weight.grad = None
    assert tables[changed.weight].used_gradient() is None


def test_norm_reads_only_the_rows_that_were_used() -> None:
    changed = table(32)
    (rows,) = use_row_gradients(changed).values()
    run(changed)
    used = rows.used_gradient()
    assert used is not None
    assert len(used) <= 60


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = table(8)
        self.output = nn.Linear(8, ROWS)
        self.output.weight = self.table.weight


def test_tables_with_another_use_or_rule_stay_as_they_are() -> None:
    frozen = table(8).requires_grad_(False)
    others = [nn.Embedding(4, 8, max_norm=1.0), nn.Embedding(4, 8, scale_grad_by_freq=True)]
    for module in (Tied(), frozen, *others):
        assert use_row_gradients(module) == {}
        assert not any(isinstance(each, RowGradients) for each in module.modules())
