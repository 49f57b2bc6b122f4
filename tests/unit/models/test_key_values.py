"""A row that goes through the units in several passes gives what one pass gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe.models import KeyValues, ModelAdapter, initial_model, split_state

MakeBatch = Callable[..., dict[str, Tensor]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("lengths", [(4, 5), (1, 7, 1)])
@pytest.mark.parametrize("half_blocks", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
@torch.no_grad()
def test_passes_over_parts_of_rows_equal_one_pass_over_whole_rows(
    make_adapter: Callable[..., ModelAdapter],
    make_batch: MakeBatch,
    family: str,
    half_blocks: bool,
    lengths: tuple[int, ...],
    padded: bool,
) -> None:
    adapter = make_adapter(family, "causal_lm", half_blocks=half_blocks)
    units: list[Any] = []
    for index, state in enumerate(split_state(adapter, initial_model(adapter, None, 1))[:-1]):
        units.append(adapter.build_unit(index).eval())
        units[-1].load_state_dict(state)
    batch = make_batch("causal_lm", padded=padded)

    def run(side: dict[str, Tensor], earlier: list[KeyValues | None]) -> Tensor:
        activation = None
        for unit, stage in zip(units, earlier, strict=True):
            activation = unit(activation, side, stage)
        assert activation is not None
        return activation

    expected = run(batch, [None] * len(units))
    middle = len(units) // 2
    first, second = KeyValues(), KeyValues()  # two stages
    earlier = [first if index < middle else second for index in range(len(units))]
    parts, start = [], 0
    for length in lengths:
        stop = start + length
        side = {
            "input_ids": batch["input_ids"][:, start:stop],
            "attention_mask": batch["attention_mask"][:, :stop].clone(),
        }
        parts.append(run(side, list(earlier)))
        start = stop
    valid = batch["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(parts, dim=1)[valid], expected[valid])
