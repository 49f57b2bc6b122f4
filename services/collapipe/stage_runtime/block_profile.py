"""Measures the cost of the blocks of a layer on this host. On an emulated processor, the times are computed instead."""

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from collapipe.errors import InvalidInputError
from collapipe.models import Head, ModelAdapter, Side
from collapipe.stage_runtime.activation_stash import count_kept_bytes
from collapipe.stage_runtime.compute_device import ComputeDevice
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.emulated_processor import EmulatedProcessor
from collapipe.stage_runtime.operation_counts import StageWork

_TIME_BOX_SECONDS = 0.5
_LEAST_REPETITIONS = 3

_TIMED_TOKENS = 64
"""Most tokens of the samples that are timed. A slow device would need minutes for thousands of tokens."""

ADAM_STATE_BYTES = 16
"""Bytes for each parameter in training: weight, gradient and two moments in fp32. docs/scheduling.md (10)."""


@dataclass(frozen=True)
class BlockProfile:
    """The cost of the mean block, forward and backward: docs/scheduling.md (2) and (10)."""

    seconds_per_sample: float
    """Seconds for each sample of a micro-batch: a in (2)."""
    seconds_per_micro_batch: float
    """Seconds for each micro-batch of a whole layer, whatever its size: o in (2)."""
    state_bytes: int
    """Bytes of trained weights, gradients and moments."""
    stash_bytes_per_sample: int
    """Bytes that are kept of each sample for the backward pass."""
    num_parameters: int
    work_shares: tuple[float, ...]
    """Time of each block of a layer, divided by that of the mean block."""
    stash_shares: tuple[float, ...]
    """Kept bytes of each block of a layer, divided by those of the mean block."""


def profile_block(
    adapter: ModelAdapter,
    device: ComputeDevice,
    micro_batch_sizes: Sequence[int],
    sequence_length: int,
    processor: EmulatedProcessor | None = None,
) -> BlockProfile:
    """Times the blocks of the first layer, forward and backward, with random activations: half a second for each size.

    The time of samples that are longer than those timed follows from counted operations: the part of the weights is linear
    in the length, and that of attention is quadratic.

    A stage may train in another thread at the same time. The compute lock makes the threads take turns, and
    the random numbers of the stage do not change, because it seeds before each pass.

    Args:
        micro_batch_sizes: Samples of each micro-batch to time. A fit of a and o in docs/scheduling.md (2)
            needs two sizes.
        sequence_length: Tokens of each sample.

    Raises:
        InvalidInputError: A size or the length is smaller than 1, or there is no size.
    """
    if not micro_batch_sizes or min(micro_batch_sizes) < 1 or sequence_length < 1:
        raise InvalidInputError(
            f"a profile needs micro-batch sizes and a sequence length of at least 1, not "
            f"{list(micro_batch_sizes)} and {sequence_length}"
        )
    blocks = [
        adapter.build_unit(1 + i).to(device.torch_device).train() for i in range(adapter.period)
    ]
    hidden_size, dtype = adapter.config.hidden_size, adapter.base_dtype
    sizes = sorted(set(micro_batch_sizes))
    works = [StageWork([block], adapter.attention_size) for block in blocks]
    sides = {size: make_side(adapter, size, sequence_length) for size in sizes}
    seconds = _emulated_seconds(StageWork(blocks, adapter.attention_size), sides, processor)
    scale = 1.0
    if seconds:
        costs = [work.forward(sides[sizes[-1]]).flops for work in works]
    else:
        length = min(sequence_length, _TIMED_TOKENS)
        short = {
            size: {
                name: tensor.to(device.torch_device)
                for name, tensor in make_side(adapter, size, length).items()
            }
            for size in sizes
        }
        timed = _time(blocks, short, hidden_size, dtype, device)
        seconds = {size: sum(times) for size, times in timed.items()}
        whole = sides[sizes[-1]]
        growths = [
            work.forward(whole).flops / work.forward(short[sizes[-1]]).flops for work in works
        ]
        costs = [cost * growth for cost, growth in zip(timed[sizes[-1]], growths, strict=True)]
        scale = sum(costs) / seconds[sizes[-1]] if seconds[sizes[-1]] else 1.0
    per_sample, per_micro_batch = fit_costs(seconds)
    num_parameters = sum(p.numel() for b in blocks for p in b.parameters() if p.requires_grad)
    side = make_side(adapter, 1, sequence_length)
    stashes = [count_stash_bytes(adapter, 1 + i, side) for i in range(adapter.period)]
    return BlockProfile(
        seconds_per_sample=scale * per_sample / len(blocks),
        seconds_per_micro_batch=per_micro_batch,
        state_bytes=num_parameters * ADAM_STATE_BYTES // len(blocks),
        stash_bytes_per_sample=math.ceil(statistics.mean(stashes)),
        num_parameters=num_parameters // len(blocks),
        work_shares=_shares(costs),
        stash_shares=_shares(stashes),
    )


def make_side(adapter: ModelAdapter, rows: int, length: int) -> dict[str, Tensor]:
    """Makes the side tensors of a micro-batch without padding, for shapes and costs only."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    labels = mask[:, 0] if adapter.task == "classification" else mask
    return {"input_ids": mask, "attention_mask": mask, "labels": labels}


def count_stash_bytes(adapter: ModelAdapter, unit_index: int, side: Side) -> int:
    """Counts what a unit keeps of a micro-batch for its backward pass, without computing and without memory.

    Fake tensors have shapes only. They take the same path through torch as real ones on a CPU. So attention counts as its
    kernel keeps it: linear in the length, or quadratic with dropout.
    """
    hidden_size = adapter.config.hidden_size
    # Whether a row has padding must be known here, because a fake mask has no values.
    shape = (*side["attention_mask"].shape, hidden_size)
    adapter.shared_inputs(torch.zeros((), dtype=adapter.base_dtype).expand(shape), side)
    # Fake tensors can be neither copied nor quantised, and a quantised layer keeps as much as another.
    unit, model = adapter.build_unit_on_meta(unit_index)
    with FakeTensorMode(allow_non_fake_inputs=True), COMPUTE_LOCK:
        adapter.allocate_unit(unit.train(), model)
        activation = None
        if unit_index:
            activation = torch.empty(shape, dtype=adapter.base_dtype, requires_grad=True)
        with count_kept_bytes([unit]) as kept:
            if isinstance(unit, Head):
                assert activation is not None
                outputs = unit.loss_sum(activation, side, 0.0)
            else:
                outputs = unit(activation, side)
            del outputs
    return sum(kept.values())


def fit_costs(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Fits seconds = o + b a to timed micro-batches by least squares, with a > 0 and o >= 0.

    Args:
        seconds: Seconds of a micro-batch, by its number of samples b.

    Returns:
        a and o of docs/scheduling.md (2). For a single size, o = 0.
    """
    if len(seconds) > 1:
        slope, offset = statistics.linear_regression(list(seconds), list(seconds.values()))
        if slope > 0 and offset >= 0:
            return slope, offset
    # For a single size, or if noise makes a or o negative, fit a line through the origin.
    return sum(b * t for b, t in seconds.items()) / sum(b**2 for b in seconds), 0.0


def _shares(values: Sequence[float]) -> tuple[float, ...]:
    """Divides values by their mean. All shares are 1 where the clock was too coarse to measure anything."""
    mean = statistics.mean(values)
    return tuple(value / mean if mean else 1.0 for value in values)


def _random_activation(side: Side, hidden_size: int, dtype: torch.dtype) -> Tensor:
    mask = side["attention_mask"]
    shape = (*mask.shape, hidden_size)
    return torch.randn(shape, dtype=dtype, device=mask.device, requires_grad=True)


def _emulated_seconds(
    work: StageWork, sides: Mapping[int, Side], processor: EmulatedProcessor | None
) -> dict[int, float]:
    """Returns the seconds of each size on the emulated processor. Empty if this host emulates no device."""
    seconds: dict[int, float] = {}
    if processor is None:
        return seconds
    for size, side in sides.items():
        forward = processor.seconds(work.forward(side), 0.0)
        backward = processor.seconds(work.backward(side), 1.0)
        if forward is None or backward is None:
            return {}
        seconds[size] = forward + backward
    return seconds


def _time(
    blocks: Sequence[nn.Module],
    sides: Mapping[int, Side],
    hidden_size: int,
    dtype: torch.dtype,
    device: ComputeDevice,
) -> dict[int, list[float]]:
    """Returns the median seconds of each block for each size. The sizes take turns, so that noise affects all alike."""
    seconds: dict[int, list[list[float]]] = {size: [[] for _ in blocks] for size in sides}
    queue = device.queue()
    started = time.perf_counter()
    limit = _TIME_BOX_SECONDS * len(sides)
    repetitions = 0
    while repetitions < _LEAST_REPETITIONS or time.perf_counter() - started < limit:
        for (size, side), (index, block) in itertools.product(sides.items(), enumerate(blocks)):
            with COMPUTE_LOCK:
                activation = _random_activation(side, hidden_size, dtype)
                timing = queue.start()
                outputs: Tensor = block(activation, side)
                torch.autograd.backward(outputs, torch.ones_like(outputs))
                timing.stop(partial(_append_seconds, seconds[size][index]))
            queue.settle()
        repetitions += 1
    return {size: list(map(statistics.median, times)) for size, times in seconds.items()}


def _append_seconds(seconds: list[float], started: float, ended: float) -> None:
    seconds.append(ended - started)
