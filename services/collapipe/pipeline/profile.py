"""What a block costs on this host, measured."""

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from collapipe.models import ModelAdapter

_TIME_BOX_SECONDS = 0.5
_LEAST_REPETITIONS = 3

ADAM_STATE_BYTES = 16
"""Bytes a parameter needs in training: weight, gradient and two moments in fp32 (design (10))."""


@dataclass(frozen=True)
class BlockProfile:
    """Cost of one block: seconds per sample (forward and backward), bytes of state, bytes kept per micro-batch."""

    seconds_per_sample: float
    state_bytes: int
    stash_bytes: int


def profile_block(
    adapter: ModelAdapter, device: torch.device, micro_batch_size: int, sequence_length: int
) -> BlockProfile:
    """Times the first block forward and backward on random activations, for at most about half a second."""
    block = adapter.build_unit(1).to(device).train()
    shape = (micro_batch_size, sequence_length, adapter.config.hidden_size)
    side = {"attention_mask": torch.ones(shape[:2], dtype=torch.int64, device=device)}
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < _LEAST_REPETITIONS or time.perf_counter() - started < _TIME_BOX_SECONDS:
        activation = torch.randn(shape, device=device, requires_grad=True)
        before = time.perf_counter()
        outputs = block(activation, side)
        outputs.backward(torch.ones_like(outputs))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - before)
    parameters = sum(p.numel() for p in block.parameters() if p.requires_grad)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = block(torch.randn(shape, device=device, requires_grad=True), side)
    return BlockProfile(
        seconds_per_sample=statistics.median(seconds) / micro_batch_size,
        state_bytes=parameters * ADAM_STATE_BYTES,
        stash_bytes=sum(kept.values()),
    )
