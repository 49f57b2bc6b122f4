"""The arithmetic of an optimizer step: gradient clipping, learning rate and update.

The stages of a pipeline update their own parameters, but clip by the global norm of all gradients. So each
stage reports the squared gradient norm of each parameter (`squared_norms`), and the control unit adds them
with `math.fsum`, whose result does not depend on the order. The control unit returns the factor
(`clip_scale`) with which each stage multiplies its gradients (`update_parameters`). So the result does not
depend on the placement of the units.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from collapipe.errors import InvalidInputError
from collapipe.job import TrainingConfig


def make_optimizer(
    parameters: Sequence[nn.Parameter], training: TrainingConfig
) -> torch.optim.Optimizer:
    """Makes the optimizer of one unit.

    Weight decay applies to matrices, but not to vectors (biases, layer norms). The optimizer is always
    torch's fused implementation: the others round differently, and torch's default has changed.
    """
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # A unit without trained parameters has an empty group, because torch refuses an optimizer without any.
    groups = [group for group in groups if group["params"]] or groups[:1]
    if training.optimizer == "sgd":
        return torch.optim.SGD(
            groups, lr=training.learning_rate, momentum=training.momentum, fused=True
        )
    return torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=training.betas, eps=training.epsilon, fused=True
    )


def learning_rate(training: TrainingConfig, step_index: int, total_steps: int) -> float:
    """Returns the learning rate of one optimizer step. Steps are counted over the whole job, from 0.

    Raises:
        InvalidInputError: The rate would have to fall after the warm-up, but the job has no steps then.
    """
    peak, step = training.learning_rate, step_index + 1
    warm_up = training.num_warm_up_steps(total_steps)
    if step <= warm_up:
        return peak * step / warm_up
    if training.decay == "linear":
        if total_steps <= warm_up:
            raise InvalidInputError(
                f"step {step_index} is after the warm-up of {warm_up} steps, but the job has only {total_steps} steps: run the same "
                "version everywhere"
            )
        return peak * (total_steps - step_index) / (total_steps - warm_up)
    if training.decay == "inverse_sqrt":
        return peak * math.sqrt(max(warm_up, 1) / step)
    return peak


def squared_norms(gradients: Iterable[Tensor | None]) -> list[float]:
    """Returns the squared norm of each gradient that is not `None`, in double precision.

    An accelerator computes all norms before this thread waits for them.
    """
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.float64)
        for gradient in gradients
        if gradient is not None
    ]
    return [norm**2 for norm in torch.stack(norms).tolist()] if norms else []


def clip_scale(norm: float, clip_norm: float) -> float:
    """Returns the factor that clips gradients of a global norm, like torch's `clip_grad_norm_`.

    Args:
        clip_norm: Largest norm allowed; 0 means no limit.
    """
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0


def update_parameters(optimizer: torch.optim.Optimizer, rate: float, gradient_scale: float) -> None:
    """Scales the gradients by a factor of at most 1, takes one optimizer step, and clears the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        for parameter in group["params"]:
            if gradient_scale < 1.0 and parameter.grad is not None:
                parameter.grad.mul_(gradient_scale)
    optimizer.step()
    optimizer.zero_grad()
