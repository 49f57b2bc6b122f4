"""Shamir's shares of secrets, and their encryption for the cluster that keeps them.

The library pycryptodome shares 16 bytes as one value of GF(2^128).
"""

from collections.abc import Mapping, Sequence

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from collapipe.errors import CorruptDataError

_NONCE = bytes(12)
"""Each key encrypts one message."""


def split_secret(secret: bytes, threshold: int, holders: Sequence[int]) -> dict[int, bytes]:
    """Returns a share for each holder. Any `threshold` of them give the secret, and fewer tell nothing about it.

    Args:
        secret: 16 bytes.
        holders: Cluster indices, ascending.
    """
    shares = Shamir.split(threshold, len(holders), secret)
    return {holder: share for holder, (_, share) in zip(holders, shares, strict=True)}


def join_secret(shares: Mapping[int, bytes], holders: Sequence[int]) -> bytes:
    """Returns the secret of enough shares. With too few, it returns other bytes.

    Args:
        shares: By holder.
        holders: All holders, as in `split_secret`.
    """
    numbers = {holder: number for number, holder in enumerate(holders, start=1)}
    return Shamir.combine([(numbers[holder], share) for holder, share in shares.items()])


def encrypt(key: bytes, shares: bytes, context: bytes) -> bytes:
    """Encrypts shares with a key of 32 bytes that encrypts nothing else.

    Args:
        context: Authenticated with the shares. The receiver must give the same bytes.
    """
    return ChaCha20Poly1305(key).encrypt(_NONCE, shares, context)


def decrypt(key: bytes, ciphertext: bytes, context: bytes, sender: int) -> bytes:
    """Returns the shares; raises `CorruptDataError` if they were changed, or made for another context."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, ciphertext, context)
    except InvalidTag:
        raise CorruptDataError(
            f"the shares of cluster {sender} cannot be decrypted: they were garbled, or the scheduler has shown other keys to cluster "
            f"{sender} than to this one; run the round again"
        ) from None
