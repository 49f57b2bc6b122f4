import json

import torch
from torch import Tensor, nn

from collapipe.models import ModelAdapter, adapter_for
from collapipe.stage_runtime.operation_counts import StageWork, Work

from .conftest import MakeAdapter

HIDDEN, INNER, LENGTH, ROWS = 16, 24, 6, 3
BLOCK_WEIGHTS = 4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER


def side(rows: int = ROWS, length: int = LENGTH, **more: Tensor) -> dict[str, Tensor]:
    return {"attention_mask": torch.ones(rows, length, dtype=torch.int64), **more}


def work_of(adapter: ModelAdapter, *units: int, recomputes: bool = False) -> StageWork:
    modules = [adapter.build_unit(unit) for unit in units]
    return StageWork(modules, HIDDEN, recomputes=recomputes)


def test_block_multiplies_weights_with_tokens_and_compares_tokens(bert: ModelAdapter) -> None:
    for rows in (1, ROWS):
        expected = 2 * BLOCK_WEIGHTS * rows * LENGTH + 4 * rows * LENGTH**2 * HIDDEN
        assert work_of(bert, 1).forward(side(rows)) == Work(expected)
        assert work_of(bert, 1, 2).forward(side(rows)) == Work(2 * expected)
        assert work_of(bert, 1).backward(side(rows)) == Work(2 * expected)
        assert work_of(bert, 1, recomputes=True).backward(side(rows)) == Work(3 * expected)


def test_formula_agrees_with_the_flop_counter_of_torch(bert: ModelAdapter) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    block = bert.build_unit(1)
    activation = torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        block(activation, side()).sum().backward()
    work = work_of(bert, 1)
    # Torch counts the operations of attention with some kernels only.
    attention = 3 * 4 * ROWS * LENGTH**2 * HIDDEN
    total = work.forward(side()).flops + work.backward(side()).flops
    assert total - attention <= counter.get_total_flops() <= total + attention


def test_frozen_weights_cost_one_product_in_a_backward_pass(bert: ModelAdapter) -> None:
    rank, tokens = 2, ROWS * LENGTH
    values = {**bert.config.to_dict(), "lora": {"r": rank, "target_modules": ["query"]}}
    adapter = adapter_for("bert", "classification", json.dumps(values))
    factors = 2 * HIDDEN * rank
    attention = 4 * ROWS * LENGTH**2 * HIDDEN
    work = work_of(adapter, 1)
    forward = 2 * (BLOCK_WEIGHTS + factors) * tokens + attention
    assert work.forward(side()) == Work(forward)
    assert work.backward(side()) == Work(2 * forward - 2 * BLOCK_WEIGHTS * tokens)


def test_embedding_moves_the_gradient_of_its_tables_without_operations(
    bert: ModelAdapter,
) -> None:
    embedding = bert.build_unit(0)
    tables = sum(m.weight.numel() for m in embedding.modules() if isinstance(m, nn.Embedding))
    assert tables > 36 * HIDDEN
    assert work_of(bert, 0).forward(side()) == Work()
    assert work_of(bert, 0).backward(side()) == Work(0.0, 16.0 * tables)


def test_head_works_on_as_many_tokens_as_there_are_labels(bert: ModelAdapter) -> None:
    # The pooler and the classifier work on the first token of a row.
    weights = HIDDEN * HIDDEN + HIDDEN * 3
    labels = torch.zeros(ROWS, dtype=torch.int64)
    assert work_of(bert, 4).forward(side(labels=labels)) == Work(2.0 * weights * ROWS)
    assert work_of(bert, 4).forward(side()) == Work(2.0 * weights * ROWS * LENGTH)


def test_tied_output_layer_of_a_decoder_is_counted_once_as_weight_and_once_as_table(
    make_adapter: MakeAdapter,
) -> None:
    adapter = make_adapter("marian")
    table = adapter.config.vocab_size * HIDDEN
    weights = 8 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER + table
    head = work_of(adapter, 2)
    labels = torch.zeros(ROWS, 5, dtype=torch.int64)
    assert head.forward(side(labels=labels)) == Work(2.0 * weights * ROWS * 5)
    assert head.backward(side(labels=labels)).moved_bytes == 16 * table


def test_update_moves_every_parameter(bert: ModelAdapter) -> None:
    parameters = sum(p.numel() for p in bert.build_unit(2).parameters())
    assert work_of(bert, 2).update() == Work(0.0, 28.0 * parameters)


def test_stage_without_units_has_no_work() -> None:
    nothing = StageWork([], HIDDEN)
    assert {nothing.forward(side()), nothing.backward(side()), nothing.update()} == {Work()}
