"""Counts what the private updates of a job reveal about a cluster, as (epsilon, delta).

Two runs are neighbours if in one of them a cluster changes nothing in any round. A round with noise multiplier z is a
Gaussian mechanism with sensitivity 1 and standard deviation z. Several of them reveal as much as one with multiplier
1 / sqrt(sum of 1 / z^2), even if later rounds depend on earlier ones (Dong et al. 2022, "Gaussian differential privacy",
corollary 3.3).

Every attempt at a round counts from its beginning, whether it is repeated or not. A repeated attempt mostly sends the same
bytes, which reveal nothing new. But it may compute other ones, for example on hosts with other processors.
"""

import math
from bisect import bisect_left
from functools import lru_cache
from typing import Annotated

from dp_accounting import get_epsilon_gaussian
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.v1 import scheduler_pb2

_Cost = Annotated[FiniteFloat, Field(ge=0)]


class PrivacyAccount(BaseModel):
    """Sums of 1 / z^2 over all attempts at a round of one job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    of_averages: _Cost = 0.0
    """Here z is the noise multiplier of an average."""
    of_updates: _Cost = 0.0
    """Here z is the noise multiplier of the update of one cluster."""

    def after_rounds(self, job: JobConfig, num_rounds: int) -> "PrivacyAccount":
        """Returns the account after so many more rounds with private updates."""
        cost = num_rounds / job.privacy.noise_multiplier**2
        return PrivacyAccount(
            of_averages=self.of_averages + cost,
            of_updates=self.of_updates + cost * job.num_noise_shares,
        )

    def allows_rounds(self, job: JobConfig, num_rounds: int) -> bool:
        """Returns whether `privacy.max_epsilon` allows so many more rounds."""
        limit = job.privacy.max_epsilon
        return limit is None or self.after_rounds(job, num_rounds).loss(job).epsilon <= limit

    def rounds_left(self, job: JobConfig, most: int) -> int:
        """Returns how many more rounds `privacy.max_epsilon` allows, up to `most`."""
        numbers = range(1, most + 1)
        return bisect_left(numbers, True, key=lambda number: not self.allows_rounds(job, number))

    def loss(self, job: JobConfig) -> scheduler_pb2.PrivacyLoss:
        """Returns what all rounds so far reveal."""
        delta = job.privacy.delta
        return scheduler_pb2.PrivacyLoss(
            epsilon=_epsilon(self.of_averages, delta),
            update_epsilon=_epsilon(self.of_updates, delta),
            delta=delta,
        )


def check_first_round(job: JobConfig) -> None:
    """Refuses a job whose first round would already exceed `privacy.max_epsilon`; raises `InvalidInputError`."""
    privacy = job.privacy
    if privacy.max_epsilon is None or PrivacyAccount().allows_rounds(job, 1):
        return
    epsilon = PrivacyAccount().after_rounds(job, 1).loss(job).epsilon
    raise InvalidInputError(
        f"one round with privacy.noise_multiplier = {privacy.noise_multiplier:g} has an epsilon of {epsilon:.3g}, but "
        f"privacy.max_epsilon is {privacy.max_epsilon:g}: use more noise, or allow a larger epsilon"
    )


@lru_cache
def _epsilon(cost: float, delta: float) -> float:
    return float(get_epsilon_gaussian(1 / math.sqrt(cost), delta)) if cost else 0.0
