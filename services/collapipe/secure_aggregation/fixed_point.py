"""Changes of weights as integers modulo 2^32, whose sum does not depend on the order.

A cluster with n_i of N rows sends q_i = round(change_i * (n_i / N) * 2^28). N is at least the sum of all n_i, and no change is
larger than `MOST_SECURE_CHANGE`, which is 7. So the sum of all q_i is below 2^31 with room for their rounding, and the average change is their sum * 2^-28 * N / (sum of all n_i).
"""

import torch
from torch import Tensor

from collapipe.errors import CorruptDataError, DivergedError, WrongStateError
from collapipe.job import MOST_SECURE_CHANGE

_SCALE = 2.0**28


def to_ring(
    weights: Tensor, base: Tensor, num_samples: int, total_samples: int, name: str
) -> Tensor:
    """Returns the change of one tensor as int32, on its device. All arithmetic is in double precision.

    Args:
        base: The weights with which the round began.
        num_samples: Rows of the cluster.
        total_samples: N, at least the rows of all clusters.
        name: Name of the tensor, for errors.

    Raises:
        DivergedError: A weight is not finite, or has changed by more than `MOST_SECURE_CHANGE`.
        WrongStateError: The cluster alone has more rows than N.
    """
    if num_samples > total_samples:
        raise WrongStateError(
            f"the cluster has trained on {num_samples} rows, but all clusters together may have {total_samples} in a round with "
            "masks, twice what they had before it: cancel the job and resume it, so that it counts them again"
        )
    change = weights.double() - base.double()
    largest = float(change.abs().max()) if change.numel() else 0.0
    if not largest <= MOST_SECURE_CHANGE:  # This includes NaN.
        raise DivergedError(
            f"{name} has a weight that changed by {largest:.3g} in one round, but averaging.secure allows {MOST_SECURE_CHANGE:g} (lower "
            "training.learning_rate, or train fewer training.local_steps)"
        )
    return change.mul_(num_samples / total_samples * _SCALE).round_().to(torch.int32)


def from_ring(
    base: Tensor, total: Tensor, num_samples: int, total_samples: int, name: str
) -> Tensor:
    """Returns the average of one tensor, in the type of `base`.

    Args:
        base: The weights with which the round began.
        total: Sum of the integers of all clusters, as int32.
        num_samples: Rows of these clusters together.
        total_samples: As in `to_ring`.
        name: Name of the tensor, for errors.

    Raises:
        CorruptDataError: The average change is larger than that of any cluster may be, so some mask is left.
    """
    change = total.double().mul_(total_samples / num_samples / _SCALE)
    largest = float(change.abs().max()) if change.numel() else 0.0
    # Each cluster rounds by half a step, 2^-29, at most.
    if largest > MOST_SECURE_CHANGE + 1e-3:
        raise CorruptDataError(
            f"{name} would change by {largest:.3g} on average, but no cluster may change a weight by more than {MOST_SECURE_CHANGE:g}: some "
            "mask was not removed, because a control unit has revealed a wrong share; run the round again"
        )
    return change.add_(base.double()).to(base.dtype)
