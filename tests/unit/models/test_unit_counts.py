"""Tests that units cost what `collapipe.stage_runtime.unit_counts` counts without their weights, for every family."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from collapipe.job import TaskConfig
from collapipe.models import Head, ModelAdapter, divide_state, initial_model, split_state
from collapipe.stage_runtime.activation_stash import count_kept_bytes
from collapipe.stage_runtime.block_profile import count_stash_bytes, make_side
from collapipe.stage_runtime.unit_counts import count_units, mean_longest
from collapipe.weights.tensor_blob import TensorBlob

MakeAdapter = Callable[..., ModelAdapter]

LENGTH = 12


@pytest.mark.parametrize(
    ("lora", "half_blocks"),
    [(None, False), ({"r": 3, "target_modules": "all-linear"}, True)],
    ids=["full", "half-lora"],
)
def test_counted_bytes_are_those_of_the_units_that_a_job_begins_with(
    adapter: ModelAdapter, with_lora: MakeAdapter, lora: dict[str, object] | None
) -> None:
    if lora is not None:
        adapter = with_lora(adapter, **lora)
    task = TaskConfig.model_validate({"kind": adapter.task, "max_length": LENGTH})
    counted = count_units(adapter, task)
    states = split_state(adapter, initial_model(adapter, None, seed=3))
    assert len(counted) == len(states)
    for index, (unit, state) in enumerate(zip(counted, states, strict=True)):
        trained, frozen = divide_state(state, adapter.frozen_names(index))
        assert unit.weights_bytes == len(b"".join(TensorBlob(trained).read()))
        assert unit.frozen_bytes == (len(b"".join(TensorBlob(frozen).read())) if frozen else 0)
        parameters = adapter.build_unit(index).parameters()
        assert unit.update_bytes == 28 * sum(p.numel() for p in parameters if p.requires_grad)


@pytest.mark.parametrize(
    ("lengths", "num_rows"), [([3, 9, 9, 5], 2), ([7], 3), ([1, 2, 4, 8, 16], 4)]
)
def test_mean_length_with_padding_is_that_of_all_draws(lengths: list[int], num_rows: int) -> None:
    drawn = [max(rows) for rows in itertools.product(lengths, repeat=num_rows)]
    assert mean_longest(lengths, num_rows) == math.ceil(sum(drawn) / len(drawn))


def test_operations_are_those_of_shorter_rows_and_memory_of_the_longest(
    adapter: ModelAdapter,
) -> None:
    task = TaskConfig.model_validate({"kind": adapter.task, "max_length": LENGTH})
    short, long = count_units(adapter, task, 5), count_units(adapter, task)
    assert all(one.flops < other.flops for one, other in zip(short[1:-1], long[1:-1], strict=True))
    assert [unit.stash_bytes for unit in short] == [unit.stash_bytes for unit in long]


def test_counted_stash_is_what_a_real_pass_keeps(adapter: ModelAdapter) -> None:
    for index in range(adapter.num_units):
        unit, side = adapter.build_unit(index), make_side(adapter, 2, LENGTH)
        shape = (2, LENGTH, adapter.config.hidden_size)
        activation = torch.randn(shape, requires_grad=True) if index else None
        with count_kept_bytes([unit]) as kept:
            if isinstance(unit, Head):
                assert activation is not None
                outputs = unit.loss_sum(activation, side, 0.0)
            else:
                outputs = unit(activation, side)
        del outputs
        counted = count_stash_bytes(adapter, index, make_side(adapter, 2, LENGTH))
        # In the head of a translator, the masks of padding count, too: two in each of its two layers.
        masks = isinstance(unit, Head) and adapter.task == "translation"
        assert counted == sum(kept.values()) + masks * 4 * (2 * LENGTH * LENGTH * 4)


@pytest.mark.parametrize(("dropout", "is_linear"), [(0.0, True), (0.1, False)])
def test_stash_of_attention_is_linear_in_the_length_unless_it_has_dropout(
    make_adapter: MakeAdapter, dropout: float, is_linear: bool
) -> None:
    adapter = make_adapter("llama", "causal_lm", attention_dropout=dropout)
    short, long = (count_stash_bytes(adapter, 1, make_side(adapter, 1, s)) for s in (128, 1024))
    if is_linear:
        assert long == pytest.approx(8 * short, rel=0.01)
    else:
        assert long > 16 * short


def test_attention_counts_heads_times_head_size(make_adapter: MakeAdapter) -> None:
    for family, size in (("qwen3", 4 * 8), ("llama", 16), ("gpt2", 16)):
        assert make_adapter(family, "causal_lm").attention_size == size
