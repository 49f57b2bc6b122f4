"""Keys of one attempt at a round, and what is derived from them.

A cluster has two secrets of 16 bytes: the seed of its self-mask, and the seed of its mask key. 16 bytes are one value of the field in
which `shares` works, and as strong as X25519, whose security is about 128 bits (RFC 7748, section 7).
"""

from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from collapipe.errors import InvalidInputError

SECRET_BYTES = 16
ENCRYPTED_BYTES = 2 * SECRET_BYTES + 16
"""Bytes of two encrypted shares, with the tag that proves who has encrypted them."""


@dataclass(frozen=True)
class AttemptName:
    """The attempt to which keys, shares and masks belong."""

    job_id: str
    round_index: int
    attempt: int

    def __str__(self) -> str:
        return f"job {self.job_id}, round {self.round_index}, attempt {self.attempt}"


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a cluster, 32 bytes each.

    Args:
        mask: For the masks that it has in common with another cluster.
        share: For the shares that it gets. It differs from the mask key, because that one may be revealed.
    """

    mask: bytes
    share: bytes


def mask_key(seed: bytes) -> X25519PrivateKey:
    """Returns the X25519 key of a seed of 16 bytes."""
    return X25519PrivateKey.from_private_bytes(derive(seed, "mask key"))


def public_bytes(key: X25519PrivateKey) -> bytes:
    """Returns the public key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def agree(key: X25519PrivateKey, public_key: bytes) -> bytes:
    """Returns the secret that two clusters have in common; raises `InvalidInputError` if the public key is invalid."""
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError as error:
        raise InvalidInputError(
            f"a cluster sent a public key of {len(public_key)} bytes that cannot be used ({error}): run the same version on all "
            "control units"
        ) from error


def is_public_key(key: bytes) -> bool:
    """Returns whether a secret can be agreed on with a key. That is not so for the few points of small order."""
    try:
        agree(X25519PrivateKey.generate(), key)
    except InvalidInputError:
        return False
    return True


def self_mask_key(seed: bytes, name: AttemptName, cluster: int, unit_index: int) -> bytes:
    """Returns the ChaCha20 key of the self-mask of a unit."""
    return derive(seed, name, "self", cluster, unit_index)


def pair_mask_key(secret: bytes, name: AttemptName, a: int, b: int, unit_index: int) -> bytes:
    """Returns the ChaCha20 key of the mask of a unit that clusters a and b have in common."""
    return derive(secret, name, "pair", min(a, b), max(a, b), unit_index)


def derive(secret: bytes, *purpose: object) -> bytes:
    """Returns 32 bytes for one purpose, by HKDF (RFC 5869) with SHA-256."""
    info = "\0".join(["CollaPipe secure aggregation", *map(str, purpose)]).encode()
    return HKDF(hashes.SHA256(), length=32, salt=None, info=info).derive(secret)
