"""Clipped and noised updates of whole models, cluster by cluster."""

import hmac
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from collapipe.job import JobConfig
from collapipe.models import ModelAdapter
from collapipe.stage_runtime.gaussian_noise import GaussianNoise
from collapipe.weights.tensor_blob import TensorBlob


def private_weights(
    job: JobConfig,
    adapter: ModelAdapter,
    noise_secret: bytes,
    round_index: int,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Returns the weights before a round plus the clipped change of each unit and its noise.

    Args:
        noise_secret: The secret of the cluster for this job.
    """
    private = dict(after)
    clip_norm = job.privacy.clip_norm / math.sqrt(adapter.num_units)
    for index in range(adapter.num_units):
        names = adapter.state_names(index)
        digests = [TensorBlob({n: w[n] for n in names}).digest for w in (before, after)]
        of_unit = hmac.digest(noise_secret, f"{round_index}/{index}".encode(), "sha256")
        parts = (*digests, clip_norm.hex(), job.noise_stddev.hex())
        noise = GaussianNoise(hmac.digest(of_unit, "/".join(parts).encode(), "sha256"))
        trained = [name for name, _ in adapter.build_unit_on_meta(index)[0].named_parameters()]
        changes = {n: (after[n].double() - before[n].double()).reshape(-1).numpy() for n in trained}
        norm = math.sqrt(math.fsum(float(np.square(c).sum()) for c in changes.values()))
        scale = min(1.0, clip_norm / (norm + 1e-6))
        grid = 2.0 ** (math.floor(math.log2(job.noise_stddev)) - 20)
        for name, change in changes.items():
            noisy = scale * change + job.noise_stddev * noise.draw(len(change))
            value = before[name].double().reshape(-1).numpy() + np.rint(noisy / grid) * grid
            private[name] = torch.from_numpy(value).to(torch.float32).reshape(before[name].shape)
    return private
