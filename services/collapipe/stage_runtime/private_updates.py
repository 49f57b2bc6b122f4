"""Differential privacy of what a cluster has changed in a unit: bounds the change, and adds Gaussian noise.

The whole change of a cluster is bounded unit by unit, so that no device has to know what others have changed: with U
trained units, the change of each is clipped to 1 / sqrt(U) of the bound ("per-layer clipping", McMahan et al. 2018,
arXiv 1710.06963, section 2.2).

The noise depends on a secret, on the weights before and after the round, on the bound and on its own size. So a repeated attempt that trains the same
weights sends the same bytes, and reveals nothing new. An attempt that trains other weights gets other noise. If it had the
same noise, the difference of both would reveal the updates.
"""

import hmac
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from collapipe.errors import DivergedError
from collapipe.stage_runtime.gaussian_noise import Doubles, GaussianNoise
from collapipe.stage_runtime.optimizer import clip_scale

_CHUNK = 1 << 16
"""Values that are in memory in double precision together."""

_GRID_BITS = 20
"""The change with its noise is rounded to multiples of 2^-20 to 2^-21 of the standard deviation. So the low bits of the doubles,
which depend on the value that the noise hides, never leave the host (Mironov 2012, "On significance of the least
significant bits for differential privacy")."""


@dataclass(frozen=True)
class UpdatePrivacy:
    """How the change of one unit becomes private.

    Args:
        clip_norm: Largest Euclidean norm of the change.
        noise_stddev: Standard deviation of the noise of each value.
        secret: 32 bytes for this round, which only the hosts of this unit know.
    """

    clip_norm: float
    noise_stddev: float
    secret: bytes


def make_private(
    parameters: Mapping[str, nn.Parameter],
    base: Mapping[str, Tensor],
    privacy: UpdatePrivacy,
    digests: tuple[str, str],
) -> None:
    """Replaces the trained values of a unit by those before the round plus the clipped change and noise.

    Args:
        parameters: The trained parameters of the unit, whose values are replaced.
        base: Their values before the round.
        digests: Digests of the weights before and after the round.

    Raises:
        DivergedError: The change has no finite norm.
    """
    norm = math.sqrt(math.fsum(float(np.square(c).sum()) for _, _, c in _chunks(parameters, base)))
    if not math.isfinite(norm):
        raise DivergedError(
            f"the change of a unit in this round has the norm {norm}, which is not finite: lower training.learning_rate"
        )
    scale = clip_scale(norm, privacy.clip_norm)
    # Noise of another size must be independent, because with one noise in two sizes nothing would be hidden.
    parts = (*digests, privacy.clip_norm.hex(), privacy.noise_stddev.hex())
    noise = GaussianNoise(hmac.digest(privacy.secret, "/".join(parts).encode("ascii"), "sha256"))
    grid = math.ldexp(1.0, math.frexp(privacy.noise_stddev)[1] - 1 - _GRID_BITS)
    for values, before, change in _chunks(parameters, base):
        noisy = scale * change + privacy.noise_stddev * noise.draw(len(change))
        values.copy_(torch.from_numpy(before + np.rint(noisy / grid) * grid))


def _chunks(
    parameters: Mapping[str, nn.Parameter], base: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Doubles, Doubles]]:
    """Yields parts of the parameters, their values before the round, and what has changed."""
    for name, parameter in parameters.items():
        parts = zip(
            torch.split(parameter.detach().view(-1), _CHUNK),
            torch.split(base[name].view(-1), _CHUNK),
            strict=True,
        )
        for values, before in parts:
            old = before.cpu().double().numpy()
            yield values, old, values.cpu().double().numpy() - old
