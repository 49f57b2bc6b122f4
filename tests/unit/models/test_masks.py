"""Blocks of a stage share the expanded mask of a micro-batch, and never that of another one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from collapipe.models import ModelAdapter

MakeAdapter = Callable[..., ModelAdapter]
MakeBatch = Callable[..., dict[str, Tensor]]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("bert", "classification"),
        ("distilbert", "classification"),
        ("roberta", "classification"),
        ("marian", "translation"),
        ("bart", "translation"),
        ("gpt2", "causal_lm"),
        ("qwen2", "causal_lm"),
    ],
)
def test_each_micro_batch_is_computed_with_its_own_mask(
    make_adapter: MakeAdapter, make_batch: MakeBatch, family: str, kind: str
) -> None:
    adapter = make_adapter(family, kind)
    blocks = [adapter.build_unit(index).eval() for index in (1, 2)]
    for block in blocks:
        torch.nn.init.normal_(next(block.parameters()))
    padded, whole = (make_batch(kind, padded=padded) for padded in (True, False))
    activation = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(1))

    def run(*sides: dict[str, Tensor]) -> list[Tensor]:
        """Runs both blocks on each micro-batch."""
        return [block(activation, side) for side in sides for block in blocks]

    with torch.no_grad():
        together = run(padded, whole, padded)
        apart = []
        for side in (padded, whole, padded):
            adapter._last_shared = None
            apart += run(side)
    assert all(map(torch.equal, together, apart))
    assert adapter._last_shared is not None
    assert adapter._last_shared[0] is padded["attention_mask"]
