"""What a block costs on this host, measured; on an emulated processor, computed as the emulation does."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collapipe.errors import InvalidInputError
from collapipe.models import ModelAdapter
from collapipe.stage_runtime.activation_stash import count_kept_bytes
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.emulated_processor import EmulatedProcessor
from collapipe.stage_runtime.operation_counts import StageWork

MICRO_BATCH_SIZES = (2, 8)
"""Samples of the micro-batches that are timed when nobody says which: two sizes tell a and o of design (2) apart."""

_TIME_BOX_SECONDS = 0.5
_LEAST_REPETITIONS = 3

ADAM_STATE_BYTES = 16
"""Bytes a parameter needs in training: weight, gradient and two moments in fp32 (design (10))."""


@dataclass(frozen=True)
class BlockProfile:
    """Cost of one block, forward and backward: design (2) and (10)."""

    seconds_per_sample: float
    """a: seconds that one more sample costs."""
    seconds_per_micro_batch: float
    """o: seconds that a micro-batch costs whatever its size."""
    state_bytes: int
    """Weights, gradients and moments."""
    stash_bytes_per_sample: int
    """Kept of one sample for the backward pass."""
    num_parameters: int


def profile_block(
    adapter: ModelAdapter,
    device: torch.device,
    micro_batch_sizes: Sequence[int],
    sequence_length: int,
    processor: EmulatedProcessor | None = None,
) -> BlockProfile:
    """Times the first block forward and backward on random activations, for about half a second a size.

    A stage may train in another thread meanwhile: they take turns, and the stage's random numbers stay what they are.

    Args:
        adapter: Builds the block.
        device: Where it computes.
        micro_batch_sizes: Samples of the micro-batches to time.
        sequence_length: Tokens of a sample.
        processor: What the host is to compute like.

    Raises:
        InvalidInputError: There is nothing to time.
    """
    if not micro_batch_sizes or min(micro_batch_sizes) < 1 or sequence_length < 1:
        raise InvalidInputError(
            f"a profile needs micro-batches and a length of at least 1, not {list(micro_batch_sizes)} "
            f"and {sequence_length}"
        )
    block = adapter.build_unit(1).to(device).train()
    hidden_size = adapter.config.hidden_size
    inputs = {
        size: _Inputs(size, sequence_length, hidden_size, device)
        for size in sorted(set(micro_batch_sizes))
    }
    work = StageWork([block], hidden_size)
    seconds = {size: _emulated_seconds(work, one.side, processor) for size, one in inputs.items()}
    measured = _time(block, inputs) if None in seconds.values() else {}
    per_sample, per_micro_batch = fit_costs(
        {size: measured[size] if known is None else known for size, known in seconds.items()}
    )
    num_parameters = sum(p.numel() for p in block.parameters() if p.requires_grad)
    largest = max(inputs)
    with COMPUTE_LOCK, count_kept_bytes([block]) as kept:
        activation = inputs[largest].draw()
        outputs = block(activation, inputs[largest].side)
    del outputs  # it held what was kept
    return BlockProfile(
        seconds_per_sample=per_sample,
        seconds_per_micro_batch=per_micro_batch,
        state_bytes=num_parameters * ADAM_STATE_BYTES,
        stash_bytes_per_sample=math.ceil(kept.total / largest),
        num_parameters=num_parameters,
    )


def fit_costs(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Fits seconds = o + b a to timed micro-batches by least squares, with a > 0 and o >= 0.

    Args:
        seconds: Of a micro-batch, by its number of samples b.

    Returns:
        a and o of design (2). One size alone gives o = 0.
    """
    sizes = list(seconds)
    mean_size, mean_seconds = statistics.fmean(sizes), statistics.fmean(seconds.values())
    spread = sum((size - mean_size) ** 2 for size in sizes)
    slope = offset = 0.0
    if spread:
        slope = sum((b - mean_size) * (t - mean_seconds) for b, t in seconds.items()) / spread
        offset = mean_seconds - slope * mean_size
    if slope <= 0 or offset < 0:  # noise, or one size: the line through the origin
        return sum(b * t for b, t in seconds.items()) / sum(b**2 for b in sizes), 0.0
    return slope, offset


class _Inputs:
    """Random micro-batches of one size."""

    def __init__(self, size: int, length: int, hidden_size: int, device: torch.device) -> None:
        self._shape = (size, length, hidden_size)
        self._device = device
        self.side = {"attention_mask": torch.ones(size, length, dtype=torch.int64, device=device)}

    def draw(self) -> Tensor:
        return torch.randn(self._shape, device=self._device, requires_grad=True)


def _emulated_seconds(
    work: StageWork, side: Mapping[str, Tensor], processor: EmulatedProcessor | None
) -> float | None:
    if processor is None:
        return None
    forward = processor.seconds(work.forward(side), 0.0)
    backward = processor.seconds(work.backward(side), 1.0)
    return None if forward is None or backward is None else forward + backward


def _time(block: nn.Module, inputs: Mapping[int, _Inputs]) -> dict[int, float]:
    """Median seconds forward and backward of each size; the sizes take turns, so that all see the same noise."""
    seconds: dict[int, list[float]] = {size: [] for size in inputs}
    started = time.perf_counter()
    limit = _TIME_BOX_SECONDS * len(inputs)
    repetitions = 0
    while repetitions < _LEAST_REPETITIONS or time.perf_counter() - started < limit:
        for size, one in inputs.items():
            with COMPUTE_LOCK:
                activation = one.draw()
                before = time.perf_counter()
                outputs: Tensor = block(activation, one.side)
                torch.autograd.backward(outputs, torch.ones_like(outputs))
                if outputs.device.type == "cuda":
                    torch.cuda.synchronize(outputs.device)
                seconds[size].append(time.perf_counter() - before)
        repetitions += 1
    return {size: statistics.median(values) for size, values in seconds.items()}
