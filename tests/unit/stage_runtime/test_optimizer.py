import math

import pytest
import torch
from torch import nn

from collapipe.errors import InvalidInputError
from collapipe.job import TrainingConfig
from collapipe.stage_runtime.optimizer import (
    clip_scale,
    learning_rate,
    make_optimizer,
    squared_norms,
    update_parameters,
)


@pytest.mark.parametrize(
    ("decay", "warm_up", "expected"),
    [
        ("constant", 0, [8, 8, 8, 8, 8, 8, 8, 8]),
        ("constant", 4, [2, 4, 6, 8, 8, 8, 8, 8]),
        ("linear", 0, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("linear", 4, [2, 4, 6, 8, 8, 6, 4, 2]),
        ("linear", 8, [1, 2, 3, 4, 5, 6, 7, 8]),
        ("linear", "auto", [8, 7, 6, 5, 4, 3, 2, 1]),
        ("linear", 16, [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]),
        ("inverse_sqrt", 0, [8 / math.sqrt(t) for t in range(1, 9)]),
        ("inverse_sqrt", 4, [2, 4, 6, 8, *(8 * math.sqrt(4 / t) for t in range(5, 9))]),
    ],
)
def test_learning_rate_rises_and_falls(
    decay: str, warm_up: int | str, expected: list[float]
) -> None:
    training = TrainingConfig.model_validate(
        {"learning_rate": 8.0, "decay": decay, "warm_up_steps": warm_up}
    )
    rates = [learning_rate(training, step, total_steps=8) for step in range(8)]
    assert rates == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("total", [24, 108])
def test_warm_up_is_a_tenth_of_the_training_if_nobody_says_how_long(total: int) -> None:
    training = TrainingConfig.model_validate({"warm_up_steps": "auto"})
    rates = [learning_rate(training, step, total) for step in range(total)]
    assert rates.index(max(rates)) + 1 == total // 10


@pytest.mark.parametrize(
    ("norm", "limit", "expected"),
    [
        (5.0, None, 1.0),
        (0.0, 1.0, 1.0),
        (0.5, 1.0, 1.0),
        (1.0, 1.0, 1 / (1 + 1e-6)),
        (4.0, 1.0, 1 / (4 + 1e-6)),
        (4.0, 8.0, 1.0),
    ],
)
def test_clip_scale_reduces_a_norm_to_the_limit(
    norm: float, limit: float | None, expected: float
) -> None:
    assert clip_scale(norm, limit) == expected


def test_clipping_equals_that_of_torch() -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (4,), ())]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape) * 7
    norm = math.sqrt(math.fsum(squared_norms(p.grad for p in parameters)))
    ours = [p.grad * clip_scale(norm, 2.0) for p in parameters if p.grad is not None]
    torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    for gradient, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_squared_norms_are_in_double_precision_and_only_of_parameters_with_a_gradient() -> None:
    with_gradient, without = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    with_gradient.grad = torch.tensor([1e30, 1e30])  # the squares overflow in single precision
    assert squared_norms([without.grad, with_gradient.grad]) == pytest.approx([2e60], rel=1e-6)


@pytest.mark.parametrize(("scale", "applied"), [(0.25, 0.25), (1.0, 1.0), (3.0, 1.0)])
def test_update_clips_gradients_but_never_makes_them_larger(scale: float, applied: float) -> None:
    training = TrainingConfig(optimizer="sgd", weight_decay=0.0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (4,))]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    update_parameters(make_optimizer(parameters, training), 0.5, scale)
    for parameter, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - applied)
        assert parameter.grad is None


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_only_matrices_decay(kind: str) -> None:
    training = TrainingConfig.model_validate(
        {"optimizer": kind, "weight_decay": 0.5, "learning_rate": 0.1}
    )
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    assert len(make_optimizer([matrix], training).param_groups) == 1
    assert len(make_optimizer([vector], training).param_groups) == 1
    optimizer = make_optimizer([matrix, vector], training)
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    assert torch.equal(vector.detach(), torch.ones(2))


def test_rate_that_cannot_fall_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="warm-up of 0.* 0"):
        learning_rate(TrainingConfig(decay="linear", warm_up_steps=0), 0, total_steps=0)
