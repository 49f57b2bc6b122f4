"""Random numbers that are the same on every host and with every version of numpy.

numpy guarantees the streams of its bit generators, but not those of `Generator` methods such as
`permutation`. So this module draws only raw words, and makes orders by sorting them.
"""

import hashlib

import numpy as np
import numpy.typing as npt


def words(*name: int | str, start: int = 0, count: int) -> npt.NDArray[np.uint64]:
    """Draws the 64-bit words `start` to `start + count` of a stream.

    Args:
        name: Parts of the name of the stream. The hash of the name is the seed.
    """
    return np.random.PCG64(_seed(name)).advance(start).random_raw(count)


def fractions(*name: int | str, start: int = 0, count: int) -> npt.NDArray[np.float64]:
    """Draws uniform numbers from [0, 1) with 53 bits; the arguments are those of `words`."""
    mantissas = words(*name, start=start, count=count) >> np.uint64(11)
    drawn: npt.NDArray[np.float64] = mantissas.astype(np.float64) * 2.0**-53
    return drawn


def permutation(*name: int | str, count: int) -> npt.NDArray[np.int64]:
    """Draws a random order of the numbers 0 to `count` - 1; `name` as in `words`."""
    return np.argsort(words(*name, count=count), kind="stable")


def shares(*name: int | str, alpha: float, count: int) -> npt.NDArray[np.float64]:
    """Draws shares that sum to 1 from a symmetric Dirichlet distribution; `name` as in `words`.

    The shares are gamma variates of shape alpha, divided by their sum. Each is a gamma variate of
    shape alpha + 1 times u ** (1 / alpha), with u uniform. The function adds logarithms, because the
    product underflows for a small alpha. numpy guarantees the streams of `RandomState`, too.
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
