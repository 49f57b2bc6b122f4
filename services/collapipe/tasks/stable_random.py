"""Random numbers that never change: a name gives the same ones on every host and with every numpy.

The streams of numpy's bit generators are frozen; those of its `Generator` methods (`permutation`,
`dirichlet`) are not. So only raw words are drawn here, and orders come from sorting them.
"""

import hashlib

import numpy as np
import numpy.typing as npt


def words(*name: int | str, start: int = 0, count: int) -> npt.NDArray[np.uint64]:
    """Draws the 64-bit words `start` to `start + count` of the endless stream of a name.

    Args:
        name: What the stream is for, joined by '/'.
        start: First word.
        count: How many words.
    """
    return np.random.PCG64(_seed(name)).advance(start).random_raw(count)


def fractions(*name: int | str, start: int = 0, count: int) -> npt.NDArray[np.float64]:
    """Draws from [0, 1), 53 bits each; arguments as of `words`."""
    mantissas = words(*name, start=start, count=count) >> np.uint64(11)
    drawn: npt.NDArray[np.float64] = mantissas.astype(np.float64) * 2.0**-53
    return drawn


def permutation(*name: int | str, count: int) -> npt.NDArray[np.int64]:
    """Draws an order of `count` things; `name` as of `words`."""
    return np.argsort(words(*name, count=count), kind="stable")


def shares(*name: int | str, alpha: float, count: int) -> npt.NDArray[np.float64]:
    """Draws shares that sum to 1 from a symmetric Dirichlet distribution; `name` as of `words`.

    The gamma variates of shape alpha are those of alpha + 1 times u ** (1 / alpha), kept as
    logarithms because a small alpha would underflow. `RandomState` is numpy's legacy generator,
    whose streams are frozen.
    """
    legacy = np.random.RandomState(np.random.MT19937(_seed(name)))
    logarithms = (
        np.log(legacy.standard_gamma(alpha + 1, count))
        + np.log1p(-legacy.random_sample(count)) / alpha
    )
    weights: npt.NDArray[np.float64] = np.exp(logarithms - logarithms.max())
    weights /= weights.sum()
    return weights


def _seed(name: tuple[int | str, ...]) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, name)).encode()).digest(), "little")
