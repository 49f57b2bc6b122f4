"""How the change of a unit is clipped and gets noise before it is pushed."""

import hashlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from collapipe.errors import DivergedError, WrongStateError
from collapipe.job import TrainingConfig
from collapipe.models import ModelAdapter
from collapipe.secure_aggregation.masks import MaskKeys
from collapipe.stage_runtime import ResidentUnit
from collapipe.stage_runtime.gaussian_noise import GaussianNoise
from collapipe.stage_runtime.private_updates import UpdatePrivacy, make_private
from collapipe.weights.tensor_blob import load_tensors

from .chains import held_unit

BLOCK = 1
KEY = bytes(range(32))
HARDLY_ANY = UpdatePrivacy(clip_norm=0.125, noise_stddev=2.0**-30, secret=b"secret")
NOISY = UpdatePrivacy(clip_norm=0.125, noise_stddev=0.5, secret=b"secret")


def initial(adapter: ModelAdapter) -> ResidentUnit:
    unit = held_unit(adapter, BLOCK, TrainingConfig())
    generator = torch.Generator().manual_seed(5)
    for parameter in unit.parameters:
        parameter.data.normal_(generator=generator)
    return unit


def trained(adapter: ModelAdapter, privacy: UpdatePrivacy | None, seed: int = 1) -> ResidentUnit:
    """Returns a unit after two updates with random gradients."""
    unit = initial(adapter)
    unit.seal()
    unit.privacy = privacy
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for parameter in unit.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        unit.update(1e-2, 1.0)
    return unit


def pushed(unit: ResidentUnit) -> dict[str, Tensor]:
    upload = unit.upload()
    assert upload.base_digest == ""
    assert upload.blob.digest == unit.seal().weights
    return load_tensors(b"".join(upload.blob.read()))


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([state[name].double().reshape(-1) for name in sorted(state)])


@pytest.fixture
def base(bert: ModelAdapter) -> Tensor:
    return flat(dict(initial(bert).module.state_dict()))


def test_large_change_is_scaled_down_to_the_bound(bert: ModelAdapter, base: Tensor) -> None:
    plain = flat(pushed(trained(bert, None))) - base
    assert plain.norm() > 2 * HARDLY_ANY.clip_norm
    clipped = flat(pushed(trained(bert, HARDLY_ANY))) - base
    expected = plain * (HARDLY_ANY.clip_norm / plain.norm())
    assert torch.allclose(clipped, expected, rtol=0, atol=1e-6)


def test_small_change_is_not_scaled(bert: ModelAdapter, base: Tensor) -> None:
    plain = flat(pushed(trained(bert, None)))
    bound = 2 * float((plain - base).norm())
    private = flat(pushed(trained(bert, replace(HARDLY_ANY, clip_norm=bound))))
    assert torch.allclose(private, plain, rtol=0, atol=1e-6)


def test_noise_has_its_standard_deviation(bert: ModelAdapter) -> None:
    noise = flat(pushed(trained(bert, NOISY))) - flat(pushed(trained(bert, HARDLY_ANY)))
    assert noise.mean() == pytest.approx(0, abs=5 * NOISY.noise_stddev / math.sqrt(len(noise)))
    assert noise.std() == pytest.approx(NOISY.noise_stddev, rel=5 / math.sqrt(2 * len(noise)))


def test_low_bits_of_the_noise_stay_on_the_host() -> None:
    parameter = torch.nn.Parameter(torch.full((1000,), 0.1))
    make_private({"zero": parameter}, {"zero": torch.zeros(1000)}, NOISY, ("before", "after"))
    steps = parameter.detach().double() / (NOISY.noise_stddev * 2.0**-20)
    assert torch.equal(steps, steps.round())


def test_equal_weights_get_equal_bytes(bert: ModelAdapter) -> None:
    first, again = (flat(pushed(trained(bert, NOISY))) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("change", "seed"),
    [({}, 2), ({"secret": b"2"}, 1), ({"noise_stddev": 0.25}, 1), ({"clip_norm": 0.0625}, 1)],
    ids=str,
)
def test_noise_of_other_weights_secrets_sizes_or_bounds_is_independent(
    bert: ModelAdapter, change: dict[str, Any], seed: int
) -> None:
    noises = torch.stack(
        [
            flat(pushed(trained(bert, privacy, number)))
            - flat(pushed(trained(bert, HARDLY_ANY, number)))
            for privacy, number in ((NOISY, 1), (replace(NOISY, **change), seed))
        ]
    )
    assert abs(torch.corrcoef(noises)[0, 1]) < 5 / math.sqrt(noises.shape[1])


def test_change_whose_beginning_is_lost_is_not_pushed(bert: ModelAdapter) -> None:
    unit = trained(bert, NOISY)
    unit._base = None
    with pytest.raises(WrongStateError, match=f"unit {BLOCK} "):
        unit.upload()


def test_optimizer_states_do_not_depend_on_the_noise(bert: ModelAdapter) -> None:
    units = [trained(bert, privacy) for privacy in (None, NOISY)]
    for unit in units:
        unit.upload()
    plain, private = (unit.seal() for unit in units)
    assert plain.optimizer == private.optimizer
    assert plain.weights != private.weights


def test_masked_upload_has_the_private_change(bert: ModelAdapter, base: Tensor) -> None:
    private = flat(pushed(trained(bert, NOISY)))
    unit = trained(bert, NOISY)
    upload = unit.masked_upload(1, 4, MaskKeys((), ()))
    change = flat(load_tensors(b"".join(upload.blob.read()))) * 4 / 2.0**28
    assert torch.allclose(change, private - base, rtol=0, atol=4 / 2.0**28)
    assert torch.equal(flat(dict(unit.module.state_dict())), private)


def test_unit_that_was_not_trained_is_pushed_as_it_is(bert: ModelAdapter) -> None:
    unit = trained(bert, NOISY)
    unit.upload()
    digest = unit.seal().weights
    assert unit.upload().blob.digest == digest


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_change_without_a_finite_norm_is_not_pushed(bert: ModelAdapter, value: float) -> None:
    unit = trained(bert, NOISY)
    unit.parameters[0].data.view(-1)[0] = value
    with pytest.raises(DivergedError, match="norm"):
        unit.upload()


# --- the noise


def test_noise_is_normal_and_has_the_bits_of_every_other_processor() -> None:
    values = GaussianNoise(KEY).draw(100_000)
    digest = hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()
    assert digest == "9d2d6b8a2d2007a5af69b6a13a4828cbfb4104ab85999352d4bb5c383abbefd6"
    assert stats.kstest(values, "norm").pvalue > 0.01


def test_sequence_of_the_noise_does_not_depend_on_the_sizes_of_its_parts() -> None:
    noise = GaussianNoise(KEY)
    parts = [noise.draw(count) for count in (1, 0, 70_000, 3, 140_000)]
    assert np.array_equal(np.concatenate(parts), GaussianNoise(KEY).draw(210_004))


def test_another_key_gives_other_noise() -> None:
    one, other = (GaussianNoise(key).draw(1000) for key in (KEY, KEY[::-1]))
    assert not np.isin(one, other).any()
