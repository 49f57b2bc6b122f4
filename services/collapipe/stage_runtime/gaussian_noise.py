"""Gaussian noise from a secret key, by operations whose result does not depend on the processor.

The random bits are those of the stream cipher ChaCha20, so nobody can guess the noise without its key. All arithmetic is
addition, multiplication, division and square root of doubles, which IEEE 754 requires to be correctly rounded. Logarithms of libraries
differ between processors, and so does `torch.randn`.
"""

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

_MOST_PAIRS = 1 << 16
"""Candidates that are in memory together."""
_LOG_2 = 0.6931471805599453
_SERIES_TERMS = 11
"""Terms of the series of a logarithm. The next one is less than half of the last bit."""


class GaussianNoise:
    """A sequence of independent values with mean 0 and standard deviation 1.

    They come from the polar method (Marsaglia and Bray 1964, "A convenient method for generating normal variables").

    Args:
        key: 32 bytes, for this sequence only.
    """

    def __init__(self, key: bytes) -> None:
        self._bits = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        self._left: Doubles = np.empty(0)

    def draw(self, count: int) -> Doubles:
        """Returns the next values of the sequence."""
        parts, missing = [self._left], count - len(self._left)
        while missing > 0:
            parts.append(self._more(min(missing, _MOST_PAIRS)))
            missing -= len(parts[-1])
        values = np.concatenate(parts)
        self._left = values[count:]
        return values[:count]

    def _more(self, num_pairs: int) -> Doubles:
        """Returns two values for each of so many random points that lies in the unit circle."""
        words = np.frombuffer(self._bits.update(bytes(16 * num_pairs)), "<u8").reshape(-1, 2)
        points = (words >> np.uint64(11)) * 2.0**-52 - 1
        squares = points[:, 0] * points[:, 0] + points[:, 1] * points[:, 1]
        is_inside = (squares > 0) & (squares < 1)
        points, squares = points[is_inside], squares[is_inside]
        values: Doubles = points * np.sqrt(-2 * _log(squares) / squares)[:, np.newaxis]
        return values.reshape(-1)


def _log(values: Doubles) -> Doubles:
    """Returns natural logarithms: log(m * 2^e) = 2 artanh((m - 1) / (m + 1)) + e log(2), with m near 1."""
    mantissas, exponents = np.frexp(values)
    is_small = mantissas < 0.7071
    mantissas = np.where(is_small, 2 * mantissas, mantissas)
    ratios = (mantissas - 1) / (mantissas + 1)
    squares, series = ratios * ratios, np.zeros_like(ratios)
    for term in reversed(range(_SERIES_TERMS)):
        series = series * squares + 1 / (2 * term + 1)
    logarithms: Doubles = 2 * ratios * series + (exponents - is_small) * _LOG_2
    return logarithms
