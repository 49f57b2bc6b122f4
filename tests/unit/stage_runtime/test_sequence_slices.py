"""Micro-batches that are cut into slices of their rows train what whole ones train."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.job import ModelConfig, TaskConfig
from collapipe.models import (
    ModelAdapter,
    adapter_for,
    create_config_json,
    initial_model,
    split_state,
)
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
    States,
    Trained,
    assert_identical,
    make_chain,
    train_chain,
    train_plainly,
)

LENGTH = 12
_LLAMA_CLASS = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 20,
}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_inner": 24, "n_positions": 20},
    "llama": _LLAMA_CLASS,
    # Windows shorter than a slice or a row, in all layers and in two of three.
    "mistral": _LLAMA_CLASS | {"sliding_window": 4},
    "qwen2": _LLAMA_CLASS
    | {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": _LLAMA_CLASS | {"head_dim": 8},
}
LORA = {
    "gpt2": r".*h\.[12]\.(attn\.c_attn|mlp\.c_fc)",
    "llama": r".*layers\.[12]\.(self_attn\.(q|v)|mlp\.down)_proj",
}
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


def make_batch(number: int, *, padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    input_ids = torch.randint(4, 40, (3, LENGTH), generator=generator)
    labels = torch.randint(4, 40, (3, LENGTH), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    if padded:
        for row, length in ((1, 7), (2, 2)):  # the last row ends in its first slice
            attention_mask[row, length:] = 0
            labels[row, length:] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


MakeAdapter = Callable[..., ModelAdapter]


@pytest.fixture
def make_adapter(make_tokenizer: Callable[[str], Tokenizer]) -> MakeAdapter:
    def make(
        family: str,
        *,
        dropout: float = 0.0,
        lora: bool = False,
        half_blocks: bool = False,
        dtype: str = "float32",
    ) -> ModelAdapter:
        drops = dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], dropout)
        if family != "gpt2":
            drops = {"attention_dropout": dropout}
        model = ModelConfig(family=family, config=SIZES[family] | drops, half_blocks=half_blocks)
        task = TaskConfig(kind="causal_lm", max_length=LENGTH)
        values = json.loads(create_config_json(model, task, [], make_tokenizer(family)))
        values["dtype"] = dtype
        if lora:
            targets = LORA.get(family, LORA["llama"])
            values["lora"] = {"r": 2, "lora_alpha": 8, "target_modules": targets}
        return adapter_for(family, "causal_lm", json.dumps(values))

    return make


def states_of(adapter: ModelAdapter) -> States:
    states = split_state(adapter, initial_model(adapter, None, seed=3))
    generator = torch.Generator().manual_seed(4)
    return [
        # A factor B of LoRA starts at zero, and the gradient of its factor A would be zero, too.
        {n: torch.randn(t.shape, generator=generator) if "lora_B" in n else t for n, t in s.items()}
        for s in states
    ]


def gradients(chain: Chain, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the gradients of a mini-batch, and its loss as "loss"."""
    loss = chain.train(0, batches, 0.0)[-1].loss
    found = {
        f"{unit.unit_index}/{name}": parameter.grad
        for unit in chain.units
        for name, parameter in unit.module.named_parameters()
        if parameter.grad is not None
    }
    return found | {"loss": torch.tensor(loss, dtype=torch.float64)}


def assert_gradients_agree(
    adapter: ModelAdapter,
    cut: Cut,
    num_slices: int,
    dtype: torch.dtype,
    padded: bool,
    tolerance: float,
) -> None:
    """Compares cut and whole micro-batches. The tolerance is relative to the largest gradient of a tensor."""
    batches = [make_batch(number, padded=padded) for number in range(2)]
    states = [{name: t.to(dtype) for name, t in state.items()} for state in states_of(adapter)]
    found = []
    for count in (1, num_slices):
        cuts = [0, 2, adapter.num_units]
        chain = make_chain(adapter, states, TRAINING, cuts, [2, 1], num_slices=count)
        for unit in chain.units:
            unit.module.to(dtype).load_state_dict(states[unit.unit_index])
        if count > 1:
            chain.cut = cut
        found.append(gradients(chain, batches))
    whole, sliced = found
    assert whole.keys() == sliced.keys()
    for name, expected in whole.items():
        error = (sliced[name] - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, f"{name} differs by {error:.2g} of its largest value"
    assert len(whole) > 3


# --- gradients


# In the other families, norms and rotations compute in fp32 even in a model in float64.
FLOAT64 = {"gpt2": 1e-12, "llama": 1e-6, "mistral": 1e-6, "qwen2": 1e-6, "qwen3": 1e-6}


@pytest.mark.parametrize(
    ("lora", "padded"),
    [(False, False), (False, True), (True, True)],
    ids=["full", "padded", "lora"],
)
@pytest.mark.parametrize("family", SIZES)
def test_gradients_of_slices_equal_those_of_whole_rows(
    make_adapter: MakeAdapter, family: str, lora: bool, padded: bool
) -> None:
    adapter = make_adapter(family, lora=lora)
    for lengths in ((6, 6), (3, 3, 3, 3), (1, 6, 3, 2)):
        cut = slices_of_lengths(*lengths)
        for dtype, tolerance in ((torch.float64, FLOAT64[family]), (torch.float32, 2e-5)):
            assert_gradients_agree(adapter, cut, len(lengths), dtype, padded, tolerance)


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_gradients_of_slices_of_half_blocks_equal_those_of_whole_rows(
    make_adapter: MakeAdapter, family: str
) -> None:
    adapter = make_adapter(family, half_blocks=True)
    cut = slices_of_lengths(5, 4, 3)
    assert_gradients_agree(adapter, cut, 3, torch.float64, True, FLOAT64[family])


# --- bits


@pytest.mark.parametrize("split", [False, True], ids=["", "split backward"])
@pytest.mark.parametrize("recompute", [(), range(5)], ids=["keeps", "recomputes"])
@pytest.mark.parametrize("cuts", [HALVES, THIRDS, EACH], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_any_placement_trains_the_same_bits(
    make_adapter: MakeAdapter,
    family: str,
    cuts: list[int],
    recompute: Collection[int],
    split: bool,
) -> None:
    adapter = make_adapter(family, dropout=0.1)
    states = states_of(adapter)

    def train(
        cuts: list[int], windows: list[int], recompute: Collection[int], split: bool
    ) -> Trained:
        steps = [[make_batch(3 * s + n, padded=True) for n in range(3)] for s in range(2)]
        training = TRAINING.model_copy(update={"split_backward": split})
        chain = make_chain(
            adapter, states, training, cuts, windows, recompute=recompute, num_slices=4
        )
        return train_chain(chain, training, steps)

    one_stage = train(WHOLE, [1], (), False)
    num_stages = len(cuts) - 1
    for windows in ([1] * num_stages, list(range(num_stages, 0, -1))):
        assert_identical(train(cuts, windows, recompute, split), one_stage)


@pytest.mark.parametrize("recompute", [(), range(5)], ids=["keeps", "recomputes"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_any_placement_on_a_bfloat16_base_trains_the_same_bits(
    make_adapter: MakeAdapter, family: str, recompute: Collection[int]
) -> None:
    adapter = make_adapter(family, dropout=0.1, lora=True, dtype="bfloat16")
    states = states_of(adapter)
    steps = [[make_batch(3 * s + n, padded=True) for n in range(3)] for s in range(2)]
    one_stage, three_stages = (
        train_chain(
            make_chain(adapter, states, TRAINING, cuts, windows, recompute=again, num_slices=4),
            TRAINING,
            steps,
        )
        for cuts, windows, again in ((WHOLE, [1], ()), (THIRDS, [3, 2, 1], recompute))
    )
    assert_identical(three_stages, one_stage)


def test_one_slice_trains_the_bits_of_a_plain_loop(make_adapter: MakeAdapter) -> None:
    adapter = make_adapter("gpt2", dropout=0.1)
    states = states_of(adapter)
    steps = [[make_batch(number, padded=True) for number in range(3)] for _ in range(2)]
    chain = make_chain(adapter, states, TRAINING, THIRDS, [3, 2, 1], num_slices=1)
    assert_identical(
        train_chain(chain, TRAINING, steps), train_plainly(adapter, states, TRAINING, steps)
    )


def test_dropout_of_each_slice_is_its_own(make_adapter: MakeAdapter) -> None:
    adapter = make_adapter("gpt2", dropout=0.5)
    chain = make_chain(adapter, states_of(adapter), TRAINING, WHOLE, [1], num_slices=2)
    batch = make_batch(0, padded=False)
    batch["input_ids"][:] = 5
    dropped: list[Tensor] = []
    chain.units[0].module.register_forward_hook(
        lambda module, inputs, outputs: dropped.append(outputs == 0)
    )
    chain.train(0, [batch], 0.0)
    assert not torch.equal(*dropped)


# --- order, memory and reports


@pytest.mark.parametrize("windows", [[1, 1, 1], [3, 2, 1]], ids=str)
def test_backward_passes_begin_with_the_last_slice_and_keep_the_windows(
    make_adapter: MakeAdapter, windows: list[int]
) -> None:
    adapter = make_adapter("gpt2")
    chain = make_chain(adapter, states_of(adapter), TRAINING, THIRDS, windows, num_slices=3)
    stage, did = chain.stages[1], []
    forward, backward = stage._send_forward, stage._send_backward

    def record(kind: str, send: Callable[[Frame], None]) -> Callable[[Frame], None]:
        return lambda frame: (
            did.append((kind, frame.micro_batch, frame.slice_index)),
            send(frame),
        )[1]

    stage._send_forward, stage._send_backward = record("F", forward), record("B", backward)
    chain.train(0, [make_batch(number, padded=False) for number in range(4)], 0.0)
    places = list(itertools.product(range(4), range(3)))
    assert [one[1:] for one in did if one[0] == "F"] == places
    assert [one[1:] for one in did if one[0] == "B"] == [(m, 2 - s) for m, s in places]
    held = list(itertools.accumulate({"F": 1, "B": -1}[one[0]] for one in did))
    assert 3 <= max(held) <= 3 * windows[1]
    for observer, window in zip(chain.observers, windows, strict=True):
        assert 1 <= observer.steps[0][0] <= window


def test_each_slice_reports_its_part_of_the_samples(make_adapter: MakeAdapter) -> None:
    adapter = make_adapter("llama")
    chain = make_chain(adapter, states_of(adapter), TRAINING, THIRDS, [1, 1, 1], num_slices=4)
    chain.train(0, [make_batch(0, padded=False)], 0.0)
    for observer in chain.observers:
        assert [samples for _, samples, _ in observer.work] == [0.75] * 4
    counts = Counter((one.stage, one.kind) for one in chain.passes)
    assert set(counts.values()) == {4}


def test_stash_counts_keys_and_values_with_their_gradients(make_adapter: MakeAdapter) -> None:
    adapter, batch = make_adapter("gpt2"), make_batch(0, padded=False)
    kept = {}
    for num_slices in (1, 2, 4):
        chain = make_chain(
            adapter, states_of(adapter), TRAINING, THIRDS, [1, 1, 1], num_slices=num_slices
        )
        chain.train(0, [batch], 0.0)
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


def test_work_of_slices_adds_up_to_that_of_whole_rows_and_grows(make_adapter: MakeAdapter) -> None:
    adapter, batch = make_adapter("gpt2"), make_batch(0, padded=False)
    work = StageWork([adapter.build_unit(1)], 16)
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
    with pytest.raises(InvalidInputError, match="rows of 12 tokens cannot be cut into 13 slices"):
        cut_into_slices(make_batch(0, padded=False), 13)


def test_frame_of_another_slice_is_refused(make_adapter: MakeAdapter) -> None:
    adapter = make_adapter("gpt2")
    chain = make_chain(adapter, states_of(adapter), TRAINING, WHOLE, [1], num_slices=2)
    part = cut_into_slices(make_batch(0, padded=False), 2)[1]
    chain.mailboxes[0].put(Frame(FrameKind.FORWARD, 0, 0, part, 1))
    expected = (
        "got FORWARD of step 0, slice 1 of micro-batch 0, while it runs slice 0 of micro-batch 0"
    )
    with pytest.raises(WrongStateError, match=expected):
        chain.stages[0].run_step(0, 1, 36, 0.0)
    assert chain.stages[0].waiting_for == ""
