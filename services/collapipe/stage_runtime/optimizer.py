"""The arithmetic of an update, spread over stages and yet the same as in one process.

Each stage reports one squared norm a parameter; `math.fsum` rounds their sum correctly whatever the order,
so the global norm does not depend on the placement.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from collapipe.job import TrainingConfig


def make_optimizer(
    parameters: Sequence[nn.Parameter], training: TrainingConfig
) -> torch.optim.Optimizer:
    """Makes the optimizer of one unit; matrices decay, vectors (biases, layer norms) do not.

    Always the fused kind: torch's other kinds round differently, and which one is its default has changed.
    """
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if training.optimizer == "sgd":
        return torch.optim.SGD(
            groups, lr=training.learning_rate, momentum=training.momentum, fused=True
        )
    return torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=training.betas, eps=training.epsilon, fused=True
    )


def learning_rate(training: TrainingConfig, step_index: int, total_steps: int) -> float:
    """The learning rate of one optimizer step.

    Args:
        training: Peak, warm-up and decay.
        step_index: Steps taken since the job began.
        total_steps: Steps of the whole job.
    """
    peak, warm_up, step = training.learning_rate, training.warm_up_steps, step_index + 1
    if step <= warm_up:
        return peak * step / warm_up
    if training.decay == "linear":
        return peak * (total_steps - step_index) / (total_steps - warm_up)
    if training.decay == "inverse_sqrt":
        return peak * math.sqrt(max(warm_up, 1) / step)
    return peak


def squared_norms(parameters: Iterable[nn.Parameter]) -> list[float]:
    """The squared gradient norm of each parameter that has a gradient, in double precision."""
    return [
        float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
        for parameter in parameters
        if parameter.grad is not None
    ]


def clip_scale(norm: float, clip_norm: float) -> float:
    """What to multiply gradients of a global norm with so that it does not exceed the limit; 0 is no limit."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0
