"""Masks: streams of ChaCha20 as integers modulo 2^32.

Each unit has keys of its own in each attempt at a round, so no key makes two streams.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms

_NONCE = bytes(16)
"""Each key is used once."""


@dataclass(frozen=True)
class MaskKeys:
    """The keys of the masks of one unit, 32 bytes each."""

    added: tuple[bytes, ...]
    subtracted: tuple[bytes, ...]


class MaskStream:
    """The sum of the masks of a unit, for its values in order."""

    def __init__(self, keys: MaskKeys) -> None:
        self._added, self._subtracted = _streams(keys.added), _streams(keys.subtracted)

    def take(self, count: int) -> npt.NDArray[np.uint32]:
        """Returns the masks of the next `count` values."""
        total = np.zeros(count, np.uint32)
        zeros = bytes(4 * count)
        for stream in self._added:
            total += np.frombuffer(stream.update(zeros), "<u4")
        for stream in self._subtracted:
            total -= np.frombuffer(stream.update(zeros), "<u4")
        return total


def _streams(keys: Iterable[bytes]) -> list[CipherContext]:
    return [Cipher(algorithms.ChaCha20(key, _NONCE), mode=None).encryptor() for key in keys]
