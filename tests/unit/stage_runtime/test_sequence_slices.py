"""Micro-batches that are cut into slices of their rows train what whole ones train."""

import itertools
from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe.errors import InvalidInputError, PeerLostError
from collapipe.models import ModelAdapter
from collapipe.stage_runtime.operation_counts import StageWork
from collapipe.stage_runtime.sequence_slices import cut_into_slices
from collapipe.tensors import Frame, FrameKind

from .chains import (
    EACH,
    HALVES,
    THIRDS,
    TRAINING,
    WHOLE,
    Chain,
    Cut,
    TinyModel,
    assert_identical,
    states_of,
    train_chain,
)
from .conftest import MakeAdapter

LENGTH = 12
FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "qwen3"]
LORA = r".*(h|layers)\.[12]\.(attn\.c_attn|mlp\.c_fc|self_attn\.(q|v)_proj|mlp\.down_proj)"
"""The layers of LoRA. The first block is frozen, so the stage with it computes no gradient."""


def slices_of_lengths(*lengths: int) -> Cut:
    def cut(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        bounds = list(itertools.accumulate(lengths, initial=0))
        assert bounds[-1] == batch["input_ids"].shape[1]
        return [
            {name: t[:, 0 if name == "attention_mask" else a : b] for name, t in batch.items()}
            for a, b in itertools.pairwise(bounds)
        ]

    return cut


def make_batch(number: int, *, padded: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    input_ids = torch.randint(4, 40, (3, LENGTH), generator=generator)
    labels = torch.randint(4, 40, (3, LENGTH), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    if padded:
        for row, length in ((1, 7), (2, 2)):  # the last row ends in its first slice
            attention_mask[row, length:] = 0
            labels[row, length:] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def tiny_of(adapter: ModelAdapter) -> TinyModel:
    return TinyModel(adapter, states_of(adapter), partial(make_batch, padded=True))


@pytest.fixture(scope="module")
def gpt2(make_adapter: MakeAdapter) -> TinyModel:
    return tiny_of(make_adapter("gpt2"))


def gradients(chain: Chain, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the gradients of a mini-batch, and its loss as "loss"."""
    loss = chain.train(0, batches)[-1].loss
    found = {
        f"{unit.unit_index}/{name}": parameter.grad
        for unit in chain.units
        for name, parameter in unit.module.named_parameters()
        if parameter.grad is not None
    }
    return found | {"loss": torch.tensor(loss, dtype=torch.float64)}


# --- gradients


@pytest.mark.parametrize(
    ("family", "options", "padded"),
    [
        *((family, {}, False) for family in ("gpt2", "mistral")),
        *((family, {}, True) for family in FAMILIES),
        *((family, {"lora": LORA}, True) for family in ("gpt2", "llama")),
        ("gpt2", {"half_blocks": True}, True),
        ("mistral", {"half_blocks": True}, True),
    ],
)
def test_gradients_of_slices_equal_those_of_whole_rows(
    make_adapter: MakeAdapter, family: str, options: dict[str, Any], padded: bool
) -> None:
    adapter = make_adapter(family, **options)
    batches = [make_batch(number, padded=padded) for number in range(2)]

    def gradients_of(dtype: torch.dtype, *lengths: int) -> dict[str, Tensor]:
        states = [{n: t.to(dtype) for n, t in state.items()} for state in states_of(adapter)]
        cuts = [0, 2, adapter.num_units]
        tiny = TinyModel(adapter, states, make_batch)
        chain = tiny.chain(cuts, num_slices=len(lengths))
        chain.cut = slices_of_lengths(*lengths)
        for unit in chain.units:
            unit.module.to(dtype).load_state_dict(states[unit.unit_index])
        return gradients(chain, batches)

    # In the other families, norms and rotations compute in fp32 even in a model in float64.
    exact = 1e-12 if family == "gpt2" else 1e-6
    for dtype, tolerance in ((torch.float64, exact), (torch.float32, 2e-5)):
        whole = gradients_of(dtype, LENGTH)
        assert len(whole) > 3
        for lengths in ((6, 6), (1, 6, 3, 2)) if dtype is torch.float64 else ((3, 3, 3, 3),):
            sliced = gradients_of(dtype, *lengths)
            assert whole.keys() == sliced.keys()
            for name, expected in whole.items():
                error = (sliced[name] - expected).abs().max() / expected.abs().max()
                assert error <= tolerance, f"{name} differs by {error:.2g} of its largest value"


# --- bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_any_placement_trains_the_same_bits(
    make_adapter: MakeAdapter, family: str, dtype: str
) -> None:
    lora = LORA if dtype == "bfloat16" else ""
    tiny = tiny_of(make_adapter(family, dropout=0.1, lora=lora, dtype=dtype))
    steps = [tiny.batches(6)[:3], tiny.batches(6)[3:]]
    one_stage = train_chain(tiny.chain(WHOLE, num_slices=4), steps)

    def check(cuts: list[int], windows: list[int], recompute: Collection[int], split: bool) -> None:
        training = TRAINING.model_copy(update={"split_backward": split})
        chain = tiny.chain(cuts, windows, training, recompute=recompute, num_slices=4)
        assert_identical(train_chain(chain, steps), one_stage)

    check(HALVES, [1, 1], (), False)
    check(HALVES, [2, 1], range(5), True)
    check(THIRDS, [3, 2, 1], (), True)
    check(THIRDS, [1, 1, 1], range(5), True)
    check(EACH, [5, 4, 3, 2, 1], range(5), False)
    check(EACH, [1] * 5, (), False)


def test_one_slice_trains_the_bits_of_a_plain_loop(make_adapter: MakeAdapter) -> None:
    tiny = tiny_of(make_adapter("gpt2", dropout=0.1))
    tiny.assert_equals_a_plain_loop(tiny.chain(THIRDS, num_slices=1), num_steps=2, size=3)


def test_dropout_of_each_slice_is_its_own(make_adapter: MakeAdapter) -> None:
    chain = tiny_of(make_adapter("gpt2", dropout=0.5)).chain(WHOLE, num_slices=2)
    batch = make_batch(0)
    batch["input_ids"][:] = 5
    dropped: list[Tensor] = []
    chain.units[0].module.register_forward_hook(
        lambda module, inputs, outputs: dropped.append(outputs == 0)
    )
    chain.train(0, [batch])
    assert not torch.equal(*dropped)


# --- order, memory and reports


@pytest.mark.parametrize("windows", [[1, 1, 1], [3, 2, 1]], ids=str)
def test_backward_passes_begin_with_the_last_slice_and_keep_the_windows(
    gpt2: TinyModel, windows: list[int]
) -> None:
    chain = gpt2.chain(THIRDS, windows, num_slices=3)
    sent = chain.record_sent(1)
    chain.train(0, gpt2.batches(4))
    places = list(itertools.product(range(4), range(3)))
    orders = {
        kind: [(one.micro_batch, one.slice_index) for one in sent if one.kind is kind]
        for kind in (FrameKind.FORWARD, FrameKind.BACKWARD)
    }
    assert orders[FrameKind.FORWARD] == places
    assert orders[FrameKind.BACKWARD] == [(m, 2 - s) for m, s in places]
    held = list(itertools.accumulate(1 if one.kind is FrameKind.FORWARD else -1 for one in sent))
    assert 3 <= max(held) <= 3 * windows[1]
    for observer, window in zip(chain.observers, windows, strict=True):
        assert 1 <= observer.steps[0][0] <= window


def test_each_slice_reports_its_part_of_the_samples(gpt2: TinyModel) -> None:
    chain = gpt2.chain(THIRDS, [1, 1, 1], num_slices=4)
    chain.train(0, [make_batch(0)])
    for observer in chain.observers:
        assert [samples for _, samples, _ in observer.work] == [0.75] * 4
    counts = Counter((one.stage, one.kind) for one in chain.passes)
    assert set(counts.values()) == {4}


def test_stash_counts_keys_and_values_with_their_gradients(gpt2: TinyModel) -> None:
    batch = make_batch(0)
    kept = {}
    for num_slices in (1, 2, 4):
        chain = gpt2.chain(THIRDS, [1, 1, 1], num_slices=num_slices)
        chain.train(0, [batch])
        kept[num_slices] = chain.observers[1].steps[0][1]
    layers, activation = 3, batch["input_ids"].numel() * 16 * 4
    for num_slices in (2, 4):
        # Of a whole row and of the first slice, autograd keeps no mask, and keys and values with the queries.
        seen = [index + 1 for index in range(1, num_slices)]
        keys_and_values = 2 * activation * sum(seen) / num_slices
        masks = 4 * 3 * LENGTH**2 * sum(seen) / num_slices**2
        own_with_gradients = 2 * 2 * activation
        expected = layers * (keys_and_values + masks + own_with_gradients)
        assert kept[num_slices] - kept[1] == pytest.approx(expected, abs=num_slices)


def test_work_of_slices_adds_up_to_that_of_whole_rows_and_grows(gpt2: TinyModel) -> None:
    batch = make_batch(0)
    work = StageWork([gpt2.adapter.build_unit(1)], 16)
    parts = [
        work.forward(part, part["input_ids"].shape[1]).flops for part in cut_into_slices(batch, 3)
    ]
    attention = 4.0 * 3 * LENGTH**2 * 16
    assert sum(parts) == pytest.approx(work.forward(batch).flops)
    assert parts[1] - parts[0] == parts[2] - parts[1] == pytest.approx(2 * attention / 9)


# --- cutting and failures


def test_slices_are_of_nearly_equal_length_and_masks_cover_earlier_tokens() -> None:
    batch = make_batch(0, padded=True)
    assert cut_into_slices(batch, 1) == [batch]
    parts = cut_into_slices(batch, 5)
    assert [part["input_ids"].shape[1] for part in parts] == [2, 2, 3, 2, 3]
    for name in ("input_ids", "labels"):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), batch[name])
    for part, stop in zip(parts, (2, 4, 7, 9, 12), strict=True):
        assert torch.equal(part["attention_mask"], batch["attention_mask"][:, :stop])


def test_more_slices_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\b12\b.*\b13\b"):
        cut_into_slices(make_batch(0), 13)


def test_frame_of_another_slice_is_refused(gpt2: TinyModel) -> None:
    chain = gpt2.chain(WHOLE, num_slices=2)
    part = cut_into_slices(make_batch(0), 2)[1]
    chain.mailboxes[0].put(Frame(FrameKind.FORWARD, 0, 0, part, 1))
    with pytest.raises(PeerLostError, match="FORWARD.*slice 1.*slice 0"):
        chain.stages[0].run_step(0, 1, 36, 0.0)
    assert chain.stages[0].waiting_for == ""
